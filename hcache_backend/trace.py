"""The restore trace: times of a server's prefills, backups, reads of L3 and loads to the device.

With ``HCACHE_RESTORE_TRACE=/path/file.jsonl`` every rank adds one line per event to the file::

    {"stage": "prefill" | "backup" | "l3" | "load", "tokens": n, "start_ms": t, "ms": d}

``start_ms`` is on the monotonic clock. ``l3`` begins when HiCache queues the prefetch and counts
the tokens found; ``backup`` and ``load`` end with their last layer. Servers with any L3, or none,
write a trace: :mod:`hcache_backend.sglang.restore_trace` hooks stages of SGLang.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

TRACE_VARIABLE = "HCACHE_RESTORE_TRACE"


class TraceWriter:
    """Appends events to a file, a line at a time; raises OSError if it cannot be opened."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def add(self, stage: str, tokens: int, start_s: float) -> None:
        """Write an event that began at ``start_s`` (``time.monotonic``) and ends now."""
        times = {"start_ms": 1e3 * start_s, "ms": 1e3 * (time.monotonic() - start_s)}
        self._file.write(json.dumps({"stage": stage, "tokens": tokens, **times}) + "\n")
