"""Servers that benchmarks start: one way to bring a history back each."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from hcache_backend.cli.common import fail
from hcache_backend.cli.hicache_options import hicache_options, l3_options
from hcache_backend.cli.machine import Machine
from hcache_backend.trace import TRACE_VARIABLE

PAGE_SIZE = 64
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class Method:
    """A way to bring histories back.

    Attributes:
        title: Its name for people.
        hierarchical: HiCache is on: there is host memory behind the device.
        storage: SGLang's name of the L3 backend; None: there is none.
        hcache: Options of ours, where ``storage`` is ``dynamic``.
        radix: Prefixes that are on the device are used again.
        pages_of: The method whose L3 pages it can use, having the same; None: it has its own.
    """

    title: str
    hierarchical: bool = True
    storage: str | None = None
    hcache: dict[str, Any] = field(default_factory=dict)
    radix: bool = True
    pages_of: str | None = None


METHODS = {
    "ideal": Method("everything still on the device", hierarchical=False),
    "recompute": Method("recompute", hierarchical=False, radix=False),
    "file": Method("KV, SGLang file L3", storage="file"),
    "host": Method("KV, HiCache host memory"),
    "hcache-hidden": Method("HCache, hidden states", storage="dynamic", hcache={"mode": "hidden"}),
    "hcache-hidden-eager": Method(
        "HCache, hidden states, eager",
        storage="dynamic",
        hcache={"mode": "hidden", "restore": "eager"},
        pages_of="hcache-hidden",
    ),
    "hcache-kv": Method("HCache, KV pages", storage="dynamic", hcache={"mode": "kv"}),
    "hcache": Method("HCache, automatic", storage="dynamic", hcache={"mode": "auto"}),
    "hcache-eager": Method(
        "HCache, automatic, eager", storage="dynamic", hcache={"mode": "auto", "restore": "eager"}
    ),
}
HYBRID = "hybrid"
"""The paper's ablation without hidden states (section 6.3.1). What it recomputes is planned from a
profile, so only ``hcache bench compare`` knows it, and only where it has one."""


def unwind_when_terminated() -> None:
    """On SIGTERM leave blocks as on an error, so that servers that were started end too."""

    def unwind(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def check_model(model: str | None) -> None:
    """End a command whose ``--model-path`` is a path at which nothing is; SGLang says it later."""
    if model and model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        fail(f"--model-path {model}: there is nothing; it must be a model's folder, or its name")


def need_aiohttp() -> None:
    """End a command that asks servers when what it asks with is not installed."""
    if find_spec("aiohttp") is None:
        fail("this command needs aiohttp: pip install 'hcache-backend[bench]'")


def launch(
    method: Method,
    machine: Machine,
    model: str,
    folder: Path,
    *,
    pool_tokens: int,
    host_ratio: float = 2.0,
    trace: bool = False,
    extra: Sequence[str] = (),
    environment: dict[str, str] | None = None,
    l3: Path | None = None,
    hcache: Mapping[str, Any] | None = None,
    metrics: bool = True,
) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a server; cache reports are on.

    Args:
        model: A folder, or a name that SGLang knows.
        folder: For L3 (``l3``), unless another folder is given, and the trace (``trace.jsonl``).
        trace: Write the trace: every restore then waits for the device, to time itself.
        pool_tokens: Tokens of the device's KV pool.
        host_ratio: Host memory as a multiple of the pool.
        extra: More arguments, which come last.
        environment: More variables.
        l3: Another folder for L3.
        hcache: More options of ours.
        metrics: Metrics are on too. A CPU server starts faster without.
    """
    command = [
        *machine.launch_command(Path(model)),
        *("--page-size", str(PAGE_SIZE), "--max-total-tokens", str(pool_tokens)),
        "--enable-cache-report",
        *(["--enable-metrics"] if metrics else []),
    ]
    variables = {
        **machine.environment,
        **({TRACE_VARIABLE: str(folder / "trace.jsonl")} if trace else {}),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if machine.device == "cpu":
        command += ["--attention-backend", "torch_native", "--dtype", "float32"]
        command += ["--grammar-backend", "none", "--skip-server-warmup"]
        # torch_native pads what it computes to the whole sequence, chunk by chunk.
        command += ["--chunked-prefill-size", str(pool_tokens)]
        if metrics:
            # A forked worker has prometheus-client from before SGLang names its folder.
            variables["HCACHE_CPU_ENGINE_FORK"] = "0"
    if Path(model).is_dir() and not any((Path(model) / name).exists() for name in _TOKENIZERS):
        command += ["--skip-tokenizer-init"]
    if not method.radix:
        command += ["--disable-radix-cache"]
    if method.hierarchical:
        command += hicache_options(host_ratio)
    if method.storage is not None:
        ours = {**method.hcache, **(hcache or {})}
        options, where = l3_options(method.storage, PAGE_SIZE, l3 or folder / "l3", ours)
        command, variables = [*command, *options], variables | where
    return [*command, *extra], {**variables, **(environment or {})}
