"""Servers as their capabilities are asked for, without a GPU."""

from types import SimpleNamespace
from typing import Any

import torch

from hcache_backend.config import HCacheConfig


def server(**arguments: Any) -> tuple[Any, Any]:
    """A runtime and a KV pool of a server on a GPU that has every capability."""
    usual = {
        "enable_lora": False,
        "lora_paths": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": 1,
        "speculative_ngram_max_bfs_breadth": 1,
        "enable_dp_attention": False,
        "hicache_host_memory_mode": "default",
        "disaggregation_mode": "null",
        "enable_pd_role_switch": False,
        "enable_two_batch_overlap": False,
        "enable_torch_compile": False,
        "enable_pdmux": False,
        "pp_size": 1,
        "tp_size": 1,
    }
    runner = SimpleNamespace(
        server_args=SimpleNamespace(**usual | arguments),
        model_config=SimpleNamespace(model_is_mrope=False, is_multimodal=False),
        attn_backend=SimpleNamespace(prefill_attention_backend_str="fa3"),
        req_to_token_pool=SimpleNamespace(free_slots=[1, 2]),
    )
    pool = SimpleNamespace(
        device="cuda",
        dtype=torch.bfloat16,
        k_buffer=[torch.empty(1, 1, 1)],
        v_buffer=[torch.empty(1, 1, 1)],
        k_scale_buffer=None,
        quant_method=SimpleNamespace(),
    )
    return SimpleNamespace(runner=runner, config=HCacheConfig()), pool
