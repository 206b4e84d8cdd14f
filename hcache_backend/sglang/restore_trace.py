"""Hooks that write the restore trace (:mod:`hcache_backend.trace`). Backups and loads are timed to
their end, which waits for the device: not for production."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hcache_backend.sglang.hook_registry import Hook, install
from hcache_backend.sglang.model_runner import FORWARD
from hcache_backend.streams import current_stream
from hcache_backend.trace import TRACE_VARIABLE, TraceWriter

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_OURS = "hcache_backend.sglang.controller.OwnPagesController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."


def install_if_asked() -> None:
    """Hook the stages of a restore if the environment variable is set. Raises RuntimeError, which
    stops the server, if a trace cannot be written: its reader would wait in vain."""
    path = os.environ.get(TRACE_VARIABLE)
    if not path:
        return
    try:
        hooks = _Hooks(TraceWriter(Path(path)))
    except OSError as error:
        raise RuntimeError(
            f"{TRACE_VARIABLE} is {path!r}: cannot append to it: {error.strerror}"
        ) from None
    missing = install(
        [
            Hook(_CONTROLLER + "_page_transfer", hooks.page_transfer),
            Hook(_OURS + "transfer_from_back", hooks.page_transfer),
            Hook(_BASE + "start_writing", hooks.backup),
            Hook(_BASE + "start_loading", hooks.load),
            Hook(FORWARD.target, hooks.forward),
        ]
    )
    if missing:
        raise RuntimeError(f"{TRACE_VARIABLE} is set, but {missing}; unset it to serve without")


class _Hooks:
    def __init__(self, trace: TraceWriter) -> None:
        self._trace = trace

    def page_transfer(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        result = original(controller, operation)
        tokens = len(operation.hash_value) * controller.page_size
        self._trace.add("l3", tokens, operation.start_time)
        return result

    def backup(self, original: Callable[..., Any], controller: Any) -> None:
        tokens = sum(len(operation.device_indices) for operation in controller.write_queue)
        start = time.monotonic()
        original(controller)
        if tokens:
            controller.ack_write_queue[-1].finish_event.synchronize()
            self._trace.add("backup", tokens, start)

    def load(self, original: Callable[..., Any], controller: Any) -> Any:
        tokens = sum(len(operation.device_indices) for operation in controller.load_queue)
        start = time.monotonic()
        producer = original(controller)
        if tokens:
            controller.layer_done_counter.events[producer].finish_event.synchronize()
            self._trace.add("load", tokens, start)
        return producer

    def forward(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        extend, tokens = batch.forward_mode.is_extend(), len(batch.input_ids)
        start = time.monotonic()
        result = original(runner, batch, *args, **kwargs)
        if extend:
            current_stream(runner.device).record().synchronize()
            self._trace.add("prefill", tokens, start)
        return result
