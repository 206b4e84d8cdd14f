"""Events of L3 in SGLang's format: pages that this server stores on its disks, and evicts. SGLang
publishes them with its own (``--kv-events-config``)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import hash_str_to_int64

from hcache_backend import metrics
from hcache_backend.prefetch.reservations import consecutive_runs

_MOST_PAGES = 100_000  # whose events wait for SGLang; those of further ones are dropped


class L3Events:
    """Events wait here until SGLang takes them. Any thread."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._lock = threading.Lock()
        self._waiting: list[Any] = []
        self._pages = 0

    def note_stored(
        self, keys: Sequence[str], present: Sequence[bool], prefix: Sequence[str], token_ids: Any
    ) -> None:
        """Pages ``keys`` with ``token_ids`` (of all of them) were written; they follow the pages
        ``prefix``. Adds an event for each run of pages that L3 has now (``present``, by page)."""
        hashes = [hash_str_to_int64(key) for key in keys]
        parent = hash_str_to_int64(prefix[-1]) if prefix else None
        present_numbers = [number for number, is_present in enumerate(present) if is_present]
        for run in consecutive_runs(present_numbers):
            event = BlockStored(
                block_hashes=hashes[run.start : run.stop],
                parent_block_hash=hashes[run.start - 1] if run.start else parent,
                token_ids=list(token_ids[run.start * self._size : run.stop * self._size]),
                block_size=self._size,
                lora_id=None,
                medium=StorageMedium.DISK,
            )
            self._add(event, len(run))

    def note_evicted(self, keys: Sequence[bytes]) -> None:
        hashes = [hash_str_to_int64(key.hex()) for key in keys]
        if hashes:
            self._add(BlockRemoved(block_hashes=hashes, medium=StorageMedium.DISK), len(hashes))

    def take_events(self) -> list[Any]:
        """All events that wait, in order."""
        with self._lock:
            taken, self._waiting, self._pages = self._waiting, [], 0
        return taken

    def _add(self, event: Any, pages: int) -> None:
        with self._lock:
            if self._pages + pages <= _MOST_PAGES:
                self._waiting.append(event)
                self._pages += pages
                return
        metrics.PROBLEMS.count("events_dropped")
