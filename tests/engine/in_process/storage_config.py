"""What SGLang tells a storage backend about a rank, and a host pool."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

from hcache_backend.fingerprint import Weights
from hcache_backend.sglang.runtime import Runtime, StartOptions
from hcache_backend.sglang.weights import LoadedWeights

PAGE = 4
KEYS = [f"{i:064x}" for i in range(8)]


class HostPool:
    """Two pieces of memory a page, as SGLang's page_first pools have."""

    layout = "page_first"
    size = 64 * PAGE
    conv_dtype = temporal_dtype = torch.uint8  # those of states

    def __init__(self, bytes_per_token: int) -> None:
        self.size_per_token = 2 * bytes_per_token
        self.page_size = PAGE
        self.data = torch.zeros((2, 64, PAGE * bytes_per_token), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        pages = (indices[::PAGE] // PAGE).tolist()
        parts = [self.data[half, page] for page in pages for half in (0, 1)]
        return [part.data_ptr() for part in parts], [part.numel() for part in parts]

    def fill(self, pages: range) -> torch.Tensor:
        """Random bytes in ``pages``; returns their host indices."""
        self.data[:, pages.start : pages.stop].random_(0, 255)
        return torch.arange(pages.start * PAGE, pages.stop * PAGE)


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


def server_args(**changes: Any) -> Any:
    """SGLang's arguments of a server without options, as far as we look at them."""
    usual = {
        "page_size": PAGE,
        "tp_size": 1,
        "pp_size": 1,
        "enable_hierarchical_cache": True,
        "kv_cache_dtype": "auto",
        "hicache_host_memory_mode": "cache",
        "hicache_storage_backend": None,
        "hicache_storage_backend_extra_config": None,
        "disaggregation_mode": "null",
        "disaggregation_decode_enable_offload_kvcache": False,
        "enable_pd_role_switch": False,
        "enable_priority_scheduling": False,
        "disable_priority_preemption": False,
        "enable_deterministic_inference": False,
        "enable_lora": False,
        "lora_paths": None,
        "speculative_algorithm": None,
        "speculative_eagle_topk": 1,
        "speculative_ngram_max_bfs_breadth": 1,
        "enable_two_batch_overlap": False,
        "enable_torch_compile": False,
        "enable_pdmux": False,
    }
    return SimpleNamespace(**usual | changes)


def unconfigured_runtime() -> Runtime:
    """A process whose model is loaded and that nobody configured."""
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["M"], to_dict=lambda: {"hidden_size": 8}),
        model_path="m",
        context_len=1 << 20,
    )
    runner = SimpleNamespace(
        model_config=model_config,
        model=torch.nn.Module(),
        max_total_num_tokens=0,
        dtype=torch.bfloat16,
        kv_cache_dtype=torch.bfloat16,
        server_args=server_args(),
        device="cpu",
    )
    return Runtime(runner, StartOptions(None), LoadedWeights(runner, Weights(b"w" * 16)))
