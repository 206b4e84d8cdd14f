"""The memory that the guide says is enough is enough."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import torch

from hcache_backend.engine.startup.page_plan import kv_bytes_per_token, plan_host_pages
from hcache_backend.page import RECOMPUTED, PageLayout, hidden_layer, kv_layer

SIZE = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "size.py"))
LAYERS = {"recompute": 1, "hidden": 2, "kv": 1}
PLAN = {
    "model": {"layers": 4, "hidden": 256, "kv_heads": 4, "element_bytes": 2},
    "tp": 1,
    "layers": LAYERS,
    "bytes_per_token_and_layer": {"hidden": 512, "kv": 1024},
}


def test_as_many_pages_fit_as_were_asked_for() -> None:
    found = SIZE["size"](PLAN, device_tokens=640, histories=3, tokens=128)
    # As in SGLang: one page more than the pool gives out.
    buffers = [torch.empty((640 + 64, 4, 64), dtype=torch.bfloat16) for _ in range(4)]
    kvcache = SimpleNamespace(k_buffer=buffers, v_buffer=buffers, size=640, layer_num=4)
    assert kv_bytes_per_token(kvcache) == 4 * 1024
    hidden = hidden_layer(64, 512, 256)
    layout = PageLayout(64, (RECOMPUTED, hidden, hidden, kv_layer(64, 256, 256, 2, 1)))
    by_size = plan_host_pages(kvcache, layout, found.host_bytes / 1e9, 0, 1e12, with_shadows=True)
    assert by_size == (found.pages, found.shadows)
    ratio = found.ratio + 1e-9
    by_ratio = plan_host_pages(kvcache, layout, 0, ratio, 1e12, with_shadows=True)
    assert by_ratio == (found.pages, found.shadows)
