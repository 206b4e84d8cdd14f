"""SGLang's options for HiCache, as the demo and the benchmarks start servers with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def hicache_options(host_ratio: float) -> list[str]:
    """Arguments of a server with host memory of ``host_ratio`` times the KV pool, and no L3."""
    return [
        *("--enable-hierarchical-cache", "--hicache-ratio", f"{host_ratio:g}"),
        *("--hicache-write-policy", "write_through"),
        *("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"),
    ]


def l3_options(
    backend: str, threshold: int, folder: Path, hcache: Mapping[str, Any]
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment that add an L3 in ``folder``.

    Args:
        backend: ``file``, SGLang's, or ``dynamic``: ours.
        threshold: Shorter hits, in tokens, are not fetched.
        folder: Where its files go.
        hcache: Options of ours.
    """
    extra: dict[str, Any] = {"prefetch_threshold": threshold}
    if backend == "dynamic":
        extra |= {
            "backend_name": "hcache",
            "module_path": "hcache_backend",
            "class_name": "HCacheStorage",
            "interface_v1": 1,
            "hcache": {"dirs": [str(folder)], **hcache},
        }
    environment = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    return [
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend", backend),
        *("--hicache-storage-backend-extra-config", json.dumps(extra)),
    ], environment if backend == "file" else {}
