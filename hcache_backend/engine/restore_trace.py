"""Optional timing of restores, for the demo and the benchmarks.

With ``HCACHE_RESTORE_TRACE=/path/file.jsonl`` every prefill, every transfer from L3 and every load
to the device adds one line ``{"stage", "tokens", "ms"}``; works with any HiCache backend, so that
ours is timed as the others are. A load is timed to the end of its last layer, which waits for the
device: not for production.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hcache_backend.engine.hooks import FORWARD, Hook, install

TRACE_VARIABLE = "HCACHE_RESTORE_TRACE"
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."


def install_if_asked() -> None:
    """Hook the stages of a restore when the environment variable is set."""
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return
    trace = _Trace(Path(path))
    missing = install(
        [
            Hook(_CONTROLLER + "prefetch", trace.prefetch),
            Hook(_CONTROLLER + "_page_transfer", trace.page_transfer),
            Hook(_BASE + "start_loading", trace.load),
            Hook(FORWARD, trace.forward),
        ]
    )
    if missing:
        raise RuntimeError(f"{TRACE_VARIABLE}: {missing}")


class _Trace:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def prefetch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operation = original(*args, **kwargs)
        operation.hcache_start = time.perf_counter()
        return operation

    def page_transfer(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        result = original(controller, operation)
        tokens = len(operation.hash_value) * controller.page_size
        self._line("l3", tokens, operation.hcache_start)
        return result

    def load(self, original: Callable[..., Any], controller: Any) -> Any:
        tokens = sum(len(operation.device_indices) for operation in controller.load_queue)
        start = time.perf_counter()
        producer = original(controller)
        if tokens:
            controller.layer_done_counter.events[producer].finish_event.synchronize()
            self._line("load", tokens, start)
        return producer

    def forward(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        extend, tokens = batch.forward_mode.is_extend(), len(batch.input_ids)
        start = time.perf_counter()
        result = original(runner, batch, *args, **kwargs)
        if extend:
            if runner.device != "cpu":
                import torch

                torch.cuda.synchronize()
            self._line("prefill", tokens, start)
        return result

    def _line(self, stage: str, tokens: int, start: float) -> None:
        ms = 1e3 * (time.perf_counter() - start)
        self._file.write(json.dumps({"stage": stage, "tokens": tokens, "ms": ms}) + "\n")
