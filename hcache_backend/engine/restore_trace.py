"""Optional timing of restores, for the demo and the benchmarks.

With ``HCACHE_RESTORE_TRACE=/path/file.jsonl`` every rank adds one line for every prefill, every
transfer from L3 and every load to the device::

    {"stage": "prefill" | "l3" | "load", "tokens": n, "start_ms": t, "ms": d}

``start_ms`` is on the machine's monotonic clock. ``l3`` starts when HiCache queues the prefetch and
counts the tokens that were found. A load is timed to the end of its last layer, which waits for the
device: not for production. The stages are SGLang's, so any server with the variable is timed,
whatever its L3 is and whether or not it has one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hcache_backend.config import TRACE_VARIABLE
from hcache_backend.engine.hooks import FORWARD, Hook, install

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."


def install_if_asked() -> None:
    """Hook the stages of a restore when the environment variable is set.

    Raises:
        RuntimeError: The file cannot be written, or SGLang has no place for a hook. It stops the
            server, because who asked for a trace would wait for it in vain.
    """
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return
    trace = _Trace(Path(path))
    missing = install(
        [
            Hook(_CONTROLLER + "_page_transfer", trace.page_transfer),
            Hook(_BASE + "start_loading", trace.load),
            Hook(FORWARD, trace.forward),
        ]
    )
    if missing:
        raise RuntimeError(f"{TRACE_VARIABLE} is set, but {missing}; unset it to serve without")


class _Trace:
    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("a", buffering=1)
        except OSError as error:
            raise RuntimeError(
                f"{TRACE_VARIABLE} is {str(path)!r}: cannot append to it: {error.strerror}"
            ) from None

    def page_transfer(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        result = original(controller, operation)
        tokens = len(operation.hash_value) * controller.page_size
        self._line("l3", tokens, operation.start_time)
        return result

    def load(self, original: Callable[..., Any], controller: Any) -> Any:
        tokens = sum(len(operation.device_indices) for operation in controller.load_queue)
        start = time.monotonic()
        producer = original(controller)
        if tokens:
            controller.layer_done_counter.events[producer].finish_event.synchronize()
            self._line("load", tokens, start)
        return producer

    def forward(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        extend, tokens = batch.forward_mode.is_extend(), len(batch.input_ids)
        start = time.monotonic()
        result = original(runner, batch, *args, **kwargs)
        if extend:
            if runner.device != "cpu":
                import torch

                torch.cuda.synchronize()
            self._line("prefill", tokens, start)
        return result

    def _line(self, stage: str, tokens: int, start: float) -> None:
        event = {
            "stage": stage,
            "tokens": tokens,
            "start_ms": 1e3 * start,
            "ms": 1e3 * (time.monotonic() - start),
        }
        self._file.write(json.dumps(event) + "\n")
