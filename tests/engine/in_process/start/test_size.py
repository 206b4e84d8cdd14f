"""The memory that `hcache size` says is enough is enough."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hcache_backend.cli.plan import sizing
from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.restore import Partition
from hcache_backend.sglang.host_pool import HostPages
from hcache_backend.start.page_plan import kv_bytes_per_token, plan_host_pages
from hcache_kernels.codecs import make_codec

MODEL = ModelShape(
    family="llama", layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64, value_dim=64,
    mlp_width=256,
)  # fmt: skip


@pytest.mark.parametrize("codec", ["auto", "none", "exp3", "exp4", "int8"])
def test_as_many_pages_fit_as_were_asked_for(codec: str) -> None:
    given = {"conversations": 400, "tokens": 128, "device_tokens": 640, "codec": codec}
    found = sizing(MODEL, "bfloat16", Partition(1, 2, 1), **given)
    # As in SGLang: one page more than the pool gives out.
    buffers = [torch.empty((640 + 64, 4, 64), dtype=torch.bfloat16) for _ in range(4)]
    kvcache = SimpleNamespace(k_buffer=buffers, v_buffer=buffers, size=640, layer_num=4)
    assert kv_bytes_per_token(kvcache) == 4 * 1024
    used = "exp3" if codec == "auto" else codec
    kv = KVSegments(kvcache, (3,), 64, WHOLE, 1, used)
    hidden = hidden_layer(64, make_codec(used, 256, torch.bfloat16).row_bytes, 256)
    layout = PageLayout(64, (RECOMPUTED, hidden, hidden, kv.stored_layer(3)))
    plan = partial(
        plan_host_pages,
        kvcache,
        layout,
        budget_bytes=1e12,
        with_shadows=True,
    )
    wanted = HostPages(found.pages, found.shadows)
    assert plan(size_gb=(found.host_bytes + 1) / 1e9, ratio=0) == wanted
    assert found.ratio is not None
    assert plan(size_gb=0, ratio=found.ratio + 1e-9) == wanted
