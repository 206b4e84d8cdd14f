"""Bytes a token of DSA models are those of SGLang's arguments and pools, and of our pages."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from hcache_backend.cli.plan import sizing
from hcache_backend.format.file import file_layout
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.model_config import shape_from_config
from hcache_backend.plan.model_shape import DSAType, dsa_rows
from hcache_backend.plan.restore import Partition
from hcache_backend.sglang.compat import SUPPORTED, sglang_version
from hcache_backend.start.machine import model_shape
from hcache_backend.start.page_plan import kv_bytes_per_token
from tests.unit.partition.pipelines import CONFIGS

if sglang_version() != SUPPORTED[-1]:  # the plan is that of the newest version
    pytest.skip("other versions resolve rows elsewhere", allow_module_level=True)

PAGE, TOKENS = 64, 128
GPUS = {"H200 SXM": 9, "NVIDIA B200": 10, "RTX 5090": 12}  # capability
LAYERS = 7
GLM_5_2 = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
TYPES = ["full", *["shared"] * 5, "full", "full"]  # the last is a draft layer's


def resolved(
    table: dict[str, Any], asked: DSAType, capability: int, patch: pytest.MonkeyPatch
) -> tuple[torch.dtype, int]:
    """Type and width of rows of latents, by SGLang's own functions, on such a GPU."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    model = SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64)
    model.hf_config = SimpleNamespace(**table)
    patch.setattr(overrides, "model_config_of", lambda view: model)
    patch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    view = SimpleNamespace(kv_cache_dtype=asked, enable_hisparse=False, dcp_size=1)
    view.dsa_prefill_backend = view.dsa_decode_backend = None
    for resolve in (overrides._dsa_kv_cache_dtype_default, overrides._dsa_split_backend_resolution):
        vars(view).update(resolve(view))
    patch.setattr(configurator, "get_exec", lambda: SimpleNamespace(kernel=view))
    patch.setattr(configurator, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    dtype = {"bfloat16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn}[view.kv_cache_dtype]
    width = configurator.calculate_mla_kv_cache_dim
    return dtype, width(model_config=model, kv_cache_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "changes", "asked", "gpu", "row", "keys"),
    [
        ("deepseek-v3.2", {}, "auto", "H200 SXM", 1152, LAYERS),
        ("deepseek-v3.2", {}, "fp8_e4m3", "H200 SXM", 656, LAYERS),
        ("deepseek-v3.2", {}, "auto", "NVIDIA B200", 576, LAYERS),
        ("deepseek-v3.2", {}, "bfloat16", "NVIDIA B200", 1152, LAYERS),
        ("deepseek-v3.2", {"cli_factor": 2}, "auto", "H200 SXM", 1152, 4),
        ("glm-5", {}, "auto", "NVIDIA B200", 576, LAYERS),
        ("glm-5", {}, "auto", "RTX 5090", 656, LAYERS),
        ("glm-5", GLM_5_2, "auto", "H200 SXM", 1152, 4),
        ("glm-5", {"index_topk_pattern": "FFSSSFS"}, "auto", "H200 SXM", 1152, 3),
        ("glm-5", {"indexer_types": TYPES}, "auto", "H200 SXM", 1152, 2),
    ],
)
def test_a_token_takes_what_sglangs_pools_take(
    name: str, changes: dict[str, Any], asked: DSAType, gpu: str, row: int, keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    table = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    table["num_hidden_layers"] = LAYERS
    shape, of_all = (
        dsa_rows(shape_from_config(table, "a test"), asked, gpu),
        Partition(0, 0, LAYERS),
    )
    assert (size := of_all.bytes_per_token(shape)) == LAYERS * row + keys * 132
    dtype, width = resolved(table, asked, GPUS[gpu], monkeypatch)
    skipped = [dsa_layer_skips_topk(SimpleNamespace(**table), layer) for layer in range(LAYERS)]
    geometry = (TOKENS, PAGE, 512, dtype, 64, LAYERS, "cpu", 128, False, width)
    device = DSATokenToKVPool(*geometry, index_buf_size=TOKENS, skip_topk_layers=skipped)
    assert device.get_kv_size_bytes() == size * (TOKENS + PAGE)  # one page is padding
    host = MLATokenToKVPoolHost(
        *(device.get_device_pool_infos()[0].buffer_info, 1.0, 0, PAGE, "page_first", False),
        **{"start_layer": 0, "end_layer": LAYERS, "target_layer_num": LAYERS},
        **{"device_capacity_tokens": TOKENS, "override_kv_cache_dim": device.kv_cache_dim},
    )  # fmt: skip
    index = DSAIndexerPoolHost(device.host_pool_decls()[-1], host, pin_memory=False)
    assert (host.size_per_token, index.size_per_token) == (LAYERS * row, keys * 132)

    kv = KVSegments(device, range(LAYERS), PAGE, WHOLE, 1)
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], WHOLE)
    assert layout.page_bytes == layout.header_bytes + PAGE * size
    found = sizing(shape, "bfloat16", of_all, conversations=1, tokens=TOKENS, codec="none")
    pages = 2 * file_layout(layout.table, WHOLE).file_bytes
    assert (found.page_bytes, found.disk_bytes, found.files) == (layout.page_bytes, pages, 2)
    assert kv_bytes_per_token(device) == size
    served = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: table))
    judged = model_shape(SimpleNamespace(dtype=torch.bfloat16, model_config=served), device)
    assert judged is not None and of_all.bytes_per_token(judged) == size
