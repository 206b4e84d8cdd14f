"""The options of a server in tests and programs, and its command line."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env

Device = Literal["cpu", "cuda"]
ADMIN_KEY = secrets.token_hex(16)  # bearer token of administrative requests
MODULE = "sglang.launch_server"
ENVIRONMENT = dict(os.environ)
"""As this interpreter found it: pytest, torch and tests write to `os.environ`, and a server whose
environment differs from that of the nursery's imports cannot be forked. Use `extra_env`."""
CPU_ATTENTION = "intel_amx"  # SGLang's route for CPUs; exact in float32
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass
class ServerOptions:
    """The choices for one server. Defaults: HiCache with a small pool on the CPU engine, no L3.

    Attributes:
        model: A folder, or a name that SGLang knows.
        log: File for the server's output; its folder is the server's working directory.
        cache: HiCache (host memory behind the device), prefixes on the device only, or no
            cache.
        dtype: None: the model's own.
        attention_backend: None: SGLang's choice.
        hicache_ratio: None: SGLang divides the machine's memory.
        extra_config: For the L3 backend; a string (`@file.toml`) is passed on as it is.
        fork: On the CPU engine: fork the server off the nursery, and its workers off it, which
            takes seconds instead of imports. False is how real deployments start: a fresh `python
            -m`, which spawns its workers.
    """

    model: Path | str
    log: Path
    device: Device = "cpu"
    cache: Literal["hicache", "radix", "none"] = "hicache"
    dtype: str | None = "float32"
    attention_backend: str | None = CPU_ATTENTION
    page_size: int = 64
    max_total_tokens: int = 4096
    chunked_prefill_size: int | None = None
    overlap: bool = False
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    hicache_ratio: float | None = 2.0
    hicache_size_gb: int | None = None
    mem_layout: str = "page_first"
    io_backend: str = "kernel"
    storage_backend: str | None = None
    extra_config: Mapping[str, Any] | str | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    metrics: bool = False
    extra_args: Sequence[str] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    fork: bool = True
    ready_timeout_s: float = 600.0

    def arguments(self, port: int) -> list[str]:
        """Arguments of `python -m sglang.launch_server`."""
        model = Path(self.model).resolve() if Path(self.model).exists() else self.model
        args: list[Any] = [
            *("--model-path", model, "--admin-api-key", ADMIN_KEY),
            *("--host", "127.0.0.1", "--port", port),
            *("--max-total-tokens", self.max_total_tokens, "--page-size", self.page_size),
            *("--tp", self.tp, "--enable-cache-report"),
        ]
        if self.device == "cpu":
            args += ["--device", "cpu", "--disable-cuda-graph", "--mem-fraction-static", 0.1]
            args += ["--grammar-backend", "none", "--skip-server-warmup"]
            if not self.overlap:
                args += ["--disable-overlap-schedule"]
        args += _given(
            ("--dtype", self.dtype),
            ("--attention-backend", self.attention_backend),
            ("--pp-size", self.pp if self.pp > 1 else None),
            ("--dp-size", self.dp if self.dp > 1 else None),
            ("--chunked-prefill-size", self.chunked_prefill_size),
        )
        folder = Path(self.model)
        if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZERS):
            args += ["--skip-tokenizer-init"]
        if self.metrics:
            args += ["--enable-metrics"]
        if self.cache == "none":
            args += ["--disable-radix-cache"]
        if self.cache == "hicache":
            args += self._hicache_args()
        return [str(a) for a in [*args, *self.extra_args]]

    def _hicache_args(self) -> list[Any]:
        config = None if self.extra_config is None else as_text(self.extra_config)
        return [
            "--enable-hierarchical-cache",
            *("--hicache-write-policy", self.write_policy),
            *("--hicache-mem-layout", self.mem_layout, "--hicache-io-backend", self.io_backend),
            *("--hicache-storage-prefetch-policy", self.prefetch_policy),
            *_given(
                ("--hicache-ratio", self.hicache_ratio),
                ("--hicache-size", self.hicache_size_gb),
                ("--hicache-storage-backend", self.storage_backend),
                ("--hicache-storage-backend-extra-config", config),
            ),
        ]

    def environment(self) -> dict[str, str]:
        env = base_environment(self.device)
        if self.device == "cpu":
            env["HCACHE_CPU_ENGINE_FORK"] = str(int(self.forks))
            ranks = self.tp * self.pp * self.dp
            if ranks > 1:
                cores = os.cpu_count() or 1
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(r % cores) for r in range(ranks))
        return {**env, **self.extra_env}

    @property
    def forks(self) -> bool:
        """The nursery forks the server and its workers instead of starting them afresh."""
        return self.fork and self.device == "cpu"


def _given(*options: tuple[str, Any]) -> list[Any]:
    """Those that have a value."""
    return [part for option in options if option[1] is not None for part in option]


def hcache_config(
    folder: Path, *, prefetch_threshold: int = 16, **options: object
) -> dict[str, Any]:
    """`extra_config` that loads our backend, with its pages in ``folder`` unless ``options`` name
    other ``dirs``; HiCache does not fetch hits of fewer tokens than the threshold."""
    return {
        "backend_name": "hcache",
        "module_path": "hcache_backend",
        "class_name": "HCacheStorage",
        "interface_v1": 1,
        "prefetch_threshold": prefetch_threshold,
        "hcache": {"dirs": [str(folder)], **options},
    }


def base_environment(device: Device) -> dict[str, str]:
    """Of every server on a device; on the CPU engine also that of the nursery's imports."""
    health = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # otherwise it costs a generation
    return {**ENVIRONMENT, **(cpu_engine_env() if device == "cpu" else {}), **health}


def as_text(config: Mapping[str, Any] | str) -> str:
    return config if isinstance(config, str) else json.dumps(config)
