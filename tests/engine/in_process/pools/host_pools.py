"""SGLang's own host pools over small device pools, built as each supported version wants it."""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import dsa
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from tests.engine.in_process.storage_config import PAGE

LAYERS, TOKENS = 2, 16 * PAGE
STATES = 8


def kv_cache_of_llama_3_8b(page_size: int) -> SimpleNamespace:
    """A KV pool of 65,536 slots without memory: 32 layers, 8 heads of 128 values, bfloat16."""
    slots = 1 << 16
    buffers = [
        torch.empty(slots + page_size, 8, 128, dtype=torch.bfloat16, device="meta")
        for _ in range(32)
    ]
    return SimpleNamespace(
        k_buffer=buffers, v_buffer=buffers, layer_num=32, size=slots, page_size=page_size
    )


def mha(layout: str, heads: int = 4) -> MHATokenToKVPoolHost:
    return _host(MHATokenToKVPoolHost, _mha_device(heads), layout)


def asymmetric(layout: str) -> AsymmetricMHATokenToKVPoolHost:
    return _host(AsymmetricMHATokenToKVPoolHost, _mha_device(v_head_dim=4), layout)


def mla(layout: str) -> MLATokenToKVPoolHost:
    device = MLATokenToKVPool(
        TOKENS, PAGE, torch.bfloat16, 16, 8, LAYERS, "cpu", enable_memory_saver=False
    )
    return _host(MLATokenToKVPoolHost, device, layout)


def indexer(layout: str) -> DSAIndexerPoolHost:
    device = SimpleNamespace(
        device="cpu",
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=LAYERS - 1,
        layer_num=LAYERS,
        layer_shard_enabled=False,
        page_size=PAGE,
        index_page_size=PAGE,
        index_head_dim=128,
        quant_block_size=128,
        skip_topk_layers=[False] * LAYERS,
        index_k_with_scale_buffer=[
            torch.zeros((TOKENS // PAGE, PAGE * 132), dtype=torch.uint8) for _ in range(LAYERS)
        ],
    )
    if hasattr(dsa, "make_dsa_indexer_pool_decl"):  # from 0.5.22 on
        declared = dsa.make_dsa_indexer_pool_decl(device)
        return DSAIndexerPoolHost(declared, mla(layout), pin_memory=False)
    return DSAIndexerPoolHost(device, mla(layout), layout, pin_memory=False)


def mamba(
    layout: str,
    temporal: int = 6,
    dtype: torch.dtype = torch.bfloat16,
    beside: tuple[torch.Tensor, ...] = (),
) -> MambaPoolHost:
    """``beside``: what the model keeps in the slots of states, `[slots, ...]`; from 0.5.22 on."""
    convolution = torch.zeros((LAYERS, STATES, 5, 3), dtype=dtype)
    recurrent = torch.zeros((LAYERS, STATES, temporal), dtype=torch.float32)
    if "buffer_info" in inspect.signature(MambaPoolHost).parameters:  # from 0.5.22 on
        from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo

        info = MambaStateBufferInfo(
            temporal=recurrent, conv=(convolution,), extra_checkpoint_buffers=beside
        )
        return MambaPoolHost(info, 2.0, 0, device_capacity=STATES, pin_memory=False, layout=layout)
    state = SimpleNamespace(conv=[convolution], temporal=recurrent)
    device = SimpleNamespace(device="cpu", size=STATES, num_mamba_layers=LAYERS, mamba_cache=state)
    return MambaPoolHost(device, 2.0, 0, pin_memory=False, layout=layout)


def qsa_indexer(layout: str) -> Any:
    """Compressed keys of Qwen4, one for two tokens; from 0.5.22 on."""
    from sglang.srt.mem_cache.pool_host.qsa import QSAIndexerPoolHost

    keys = [torch.zeros(TOKENS // 2 + 2, 1, 64, dtype=torch.bfloat16) for _ in range(LAYERS)]
    device: Any = SimpleNamespace(qsa_compress_ratio=2, qsa_compressed_k_buffer_pool=keys)
    return QSAIndexerPoolHost(device, mha(layout))


def fp4() -> tuple[MHATokenToKVPool, Callable[[], Any]]:
    """A KV pool in FP4, with scales beside it, and what makes its host pool."""
    device = MHATokenToKVPool(
        *(TOKENS, PAGE, torch.float4_e2m1fn_x2, 4, 32, LAYERS, "cpu"),
        enable_memory_saver=False,
        quant_method=FP4MXBlock16KVCacheMethod(),
    )
    return device, lambda: _host(MHATokenToKVPoolHost, device, "page_first")


def _mha_device(heads: int = 4, v_head_dim: int = 8) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        TOKENS,
        PAGE,
        torch.bfloat16,
        heads,
        8,
        LAYERS,
        "cpu",
        enable_memory_saver=False,
        v_head_dim=v_head_dim,
    )


def _host(cls: Any, device: Any, layout: str) -> Any:
    """A host pool with two slots for each of ``device``.

    Up to 0.5.22 it asks the device pool for its geometry, from 0.5.23 on it is told.
    """
    asked = inspect.signature(cls).parameters
    if "device_pool" in asked:
        return cls(device, 2.0, 0, PAGE, layout, pin_memory=False)
    geometry = {
        "device_capacity_tokens": device.size,
        "start_layer": device.start_layer,
        "end_layer": device.end_layer,
        "target_layer_num": device.layer_num,
    }
    return cls(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        **{name: value for name, value in geometry.items() if name in asked},
    )
