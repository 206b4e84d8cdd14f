"""What a test chooses about a server, and the command line and environment that follow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env

ADMIN_KEY = "test-admin"
MODULE = "sglang.launch_server"
ENVIRONMENT = dict(os.environ)
"""As this interpreter found it: pytest, torch and tests write to `os.environ`, and a server whose
environment differs from that of the nursery's imports cannot be forked. Use `extra_env`."""


@dataclass
class ServerOptions:
    """What a test chooses. Defaults: HiCache with a small pool on the CPU, no L3."""

    model: Path
    log: Path
    cache: Literal["hicache", "radix", "none"] = "hicache"
    dtype: str = "float32"
    page_size: int = 64
    max_total_tokens: int = 4096
    chunked_prefill_size: int | None = None
    overlap: bool = False
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    hicache_ratio: float = 2.0
    hicache_size_gb: int | None = None
    mem_layout: str = "page_first"
    io_backend: str = "kernel"
    storage_backend: str | None = None
    extra_config: Mapping[str, Any] | str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    extra_args: Sequence[str] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    fork: bool = True
    """Fork the server off the nursery, and its workers off it: seconds instead of imports.

    False is how real deployments start: a fresh `python -m`, which spawns its workers.
    """
    ready_timeout_s: float = 240.0

    def arguments(self, port: int) -> list[str]:
        """Arguments of `python -m sglang.launch_server`."""
        args: list[Any] = [
            *("--model-path", self.model, "--admin-api-key", ADMIN_KEY),
            *("--host", "127.0.0.1", "--port", port),
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
            *("--grammar-backend", "none", "--skip-tokenizer-init"),
            *("--mem-fraction-static", 0.1, "--max-total-tokens", self.max_total_tokens),
            *("--dtype", self.dtype, "--page-size", self.page_size, "--tp", self.tp),
            *("--skip-server-warmup", "--enable-cache-report"),
        ]
        if self.pp > 1:
            args += ["--pp-size", self.pp]
        if self.dp > 1:
            args += ["--dp-size", self.dp]
        if not self.overlap:
            args += ["--disable-overlap-schedule"]
        if self.chunked_prefill_size is not None:
            args += ["--chunked-prefill-size", self.chunked_prefill_size]
        if self.cache == "none":
            args += ["--disable-radix-cache"]
        if self.cache == "hicache":
            args += self._hicache_args()
        return [str(a) for a in [*args, *self.extra_args]]

    def _hicache_args(self) -> list[Any]:
        args: list[Any] = [
            *("--enable-hierarchical-cache", "--hicache-ratio", self.hicache_ratio),
            *("--hicache-write-policy", self.write_policy),
            *("--hicache-mem-layout", self.mem_layout, "--hicache-io-backend", self.io_backend),
            *("--hicache-storage-prefetch-policy", self.prefetch_policy),
        ]
        if self.hicache_size_gb is not None:
            args += ["--hicache-size", self.hicache_size_gb]
        if self.storage_backend is not None:
            args += ["--hicache-storage-backend", self.storage_backend]
        if self.extra_config is not None:
            args += ["--hicache-storage-backend-extra-config", as_text(self.extra_config)]
        return args

    def environment(self) -> dict[str, str]:
        env = base_environment() | {"HCACHE_CPU_ENGINE_FORK": str(int(self.fork))}
        ranks = self.tp * self.pp * self.dp
        if ranks > 1:
            cores = os.cpu_count() or 1
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r % cores) for r in range(ranks))
        return {**env, **self.extra_env}


def base_environment() -> dict[str, str]:
    """What every server has, and what the nursery's imports see."""
    health = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # else it costs a generation
    return {**ENVIRONMENT, **cpu_engine_env(), **health}


def as_text(config: Mapping[str, Any] | str) -> str:
    """JSON of a mapping; a string (`@file.toml`) as it is."""
    return config if isinstance(config, str) else json.dumps(config)
