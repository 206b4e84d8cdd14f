"""Servers as their capabilities are asked for, without a GPU."""

from types import SimpleNamespace
from typing import Any

import torch

from hcache_backend.config import HCacheConfig
from hcache_backend.start.capabilities import Server
from tests.engine.in_process.storage_config import server_args


def server(**arguments: Any) -> Server:
    """A server on a GPU that has every capability."""
    runner = SimpleNamespace(
        server_args=server_args(**arguments),
        model_config=SimpleNamespace(model_is_mrope=False, is_multimodal=False),
        attn_backend=SimpleNamespace(prefill_attention_backend_str="fa3"),
        req_to_token_pool=SimpleNamespace(free_slots=[1, 2]),
        sliding_window_size=None,
    )
    pool = SimpleNamespace(
        device="cuda",
        dtype=torch.bfloat16,
        k_buffer=[torch.empty(1, 1, 1)],
        v_buffer=[torch.empty(1, 1, 1)],
        k_scale_buffer=None,
        quant_method=SimpleNamespace(),
    )
    return Server(runner, HCacheConfig(), pool)
