"""SGLang plugin: a server writes times of its prefills, backups, reads of L3 and loads.

With ``HCACHE_RESTORE_TRACE=/path/file.jsonl`` every rank adds one line per event to the file::

    {"stage": "prefill" | "backup" | "l3" | "load", "tokens": n, "start_ms": t, "ms": d}

``start_ms`` is on the monotonic clock. ``l3`` begins when HiCache queues the prefetch and counts
the tokens found. Backups and loads are timed to their end, which waits for the device. Servers with
any L3, or none, write a trace.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "HCACHE_RESTORE_TRACE"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner."
_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_OURS = "hcache_backend.sglang.controller.OwnPagesController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_RUNNER + "load_model", after_load_model, HookType.AFTER)


def after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook the stages of a restore if the environment variable is set. Raises OSError or
    RuntimeError, which stops the server, if a trace cannot be written: its reader would wait in
    vain."""
    from hcache_backend.sglang.hook_registry import Hook, install

    if VARIABLE not in os.environ or runner.is_draft_worker:
        return result
    trace = Trace(Path(os.environ[VARIABLE]))
    missing = install(
        [
            Hook(_CONTROLLER + "_page_transfer", trace.page_transfer),
            Hook(_OURS + "read_in_batches", trace.page_transfer),
            Hook(_BASE + "start_writing", trace.backup),
            Hook(_BASE + "start_loading", trace.load),
            Hook(_RUNNER + "forward", trace.forward),
        ]
    )
    if missing:
        raise RuntimeError(f"{VARIABLE} is set, but {missing}; unset it to serve without")
    return result


class Trace:
    """Appends events to a file, a line at a time; raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def add(self, stage: str, tokens: int, start_s: float) -> None:
        """Write an event that began at ``start_s`` (``time.monotonic``) and ends now."""
        times = {"start_ms": 1e3 * start_s, "ms": 1e3 * (time.monotonic() - start_s)}
        self._file.write(json.dumps({"stage": stage, "tokens": tokens, **times}) + "\n")

    def page_transfer(self, original: Callable[..., Any], controller: Any, operation: Any) -> Any:
        result = original(controller, operation)
        tokens = len(operation.hash_value) * controller.page_size
        self.add("l3", tokens, operation.start_time)
        return result

    def backup(self, original: Callable[..., Any], controller: Any) -> None:
        tokens = sum(len(operation.device_indices) for operation in controller.write_queue)
        start = time.monotonic()
        original(controller)
        if tokens:
            controller.ack_write_queue[-1].finish_event.synchronize()
            self.add("backup", tokens, start)

    def load(self, original: Callable[..., Any], controller: Any) -> Any:
        tokens = sum(len(operation.device_indices) for operation in controller.load_queue)
        start = time.monotonic()
        producer = original(controller)
        if tokens:
            controller.layer_done_counter.events[producer].finish_event.synchronize()
            self.add("load", tokens, start)
        return producer

    def forward(
        self, original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        from hcache_backend.streams import current_stream

        extend, tokens = batch.forward_mode.is_extend(), len(batch.input_ids)
        start = time.monotonic()
        result = original(runner, batch, *args, **kwargs)
        if extend:
            current_stream(runner.device).record().synchronize()
            self.add("prefill", tokens, start)
        return result
