"""What SGLang tells a storage backend about a rank."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from hcache_backend.sglang.runtime import Runtime, Weights

PAGE = 4


def storage_config(
    folder: Path, hcache: dict[str, Any] | None = None, **rank: Any
) -> HiCacheStorageConfig:
    """The only rank of a server, unless ``rank`` says otherwise, with the options ``hcache``."""
    extra_config = {
        "backend_name": "hcache",
        "module_path": "hcache_backend",
        "class_name": "HCacheStorage",
        "interface_v1": 1,
        "hcache": {"dirs": [str(folder)], "min_gain": 0} | (hcache or {}),
    }
    alone: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": True,
        "model_name": "m",
        "extra_config": extra_config,
    }
    known = {field.name for field in fields(HiCacheStorageConfig)}  # no dp_rank in the oldest
    given = {**alone, **rank}
    return HiCacheStorageConfig(**{name: given[name] for name in given if name in known})


def unconfigured_runtime() -> Runtime:
    """A process whose model is loaded and that nobody configured."""
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
        model_path="m",
        context_len=1 << 20,
    )
    runner = SimpleNamespace(
        model_config=model_config,
        model=torch.nn.Module(),
        max_total_num_tokens=0,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        server_args=SimpleNamespace(
            page_size=PAGE,
            disaggregation_mode="null",
            enable_pd_role_switch=False,
            enable_priority_scheduling=False,
            enable_lora=False,
            lora_paths=None,
            hicache_host_memory_mode="cache",
        ),
    )
    return Runtime(runner, weights=Weights(b"w" * 16))
