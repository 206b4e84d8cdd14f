"""HiCache's storage threads: one looks pages up (SGLang takes the shortest hit of all ranks), one
reads a prefetch, one tells other ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from hcache_backend.prefetch.gate import HitGate, catching
from hcache_backend.prefetch.reader import batch_pages
from hcache_backend.sglang.backups import Backups
from hcache_backend.sglang.hook_registry import Hook, Original
from hcache_backend.sglang.runtime import current

_NO_REQUEST = "__storage_hit_query__"  # SGLang's name of look-ups by the scheduler's thread
_STOP_SECONDS = 60.0  # longest wait for the threads of an idle server to end a read

_CONTROLLER = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController."
_BASE = "sglang.srt.managers.cache_controller.HiCacheController."


def gate_of(cache: Any) -> HitGate | None:
    """The gate for hits of a cache or its controller; None if all hits are read."""
    return current().hit_gate if getattr(cache, "enable_storage", False) else None


class EventQueue(Protocol):
    """Events for routers (:class:`.L3Events`)."""

    def take_events(self) -> list[Any]: ...


class OurL3(Protocol):
    """Our storage backend (:class:`.HCacheStorage`)."""

    backups: Backups

    @property
    def events(self) -> EventQueue | None: ...
    def use(self, keys: Sequence[str]) -> None: ...
    def stop(self, cache: Any) -> None: ...
    def reaches(self, operation: Any) -> bool: ...
    def wrote(self, operation: Any) -> None: ...


def our_l3(cache: Any) -> OurL3 | None:
    """The storage backend of ``cache``; None if its L3 is another one, or none."""
    return our_l3_of(getattr(cache, "cache_controller", None))


def our_l3_of(controller: Any) -> OurL3 | None:
    backend: OurL3 | None = getattr(controller, "storage_backend", None)
    return backend if hasattr(backend, "backups") else None


def keys_to(cache: Any, node: int) -> list[str]:
    tree = cache.tree_core
    return [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]


def around_look_up(original: Original, controller: Any, operation: Any, *a: Any, **kw: Any) -> Any:
    """Around ``HybridCacheController._storage_hit_query``, before its MIN over ranks. Returns the
    keys of the pages that this rank wants to read, by the gate, and the number of their tokens."""
    gate = gate_of(controller)
    if gate is None or operation.request_id == _NO_REQUEST:
        return original(controller, operation, *a, **kw)
    prefetch = gate.prefetches.prefetch_of(operation)
    if prefetch.refused:
        return [], 0
    take_shared_pages = getattr(controller.storage_backend, "take_found_shared", lambda: 0)
    take_shared_pages()  # of a look-up that was judged nowhere
    with gate.l3.looking_up():
        keys, tokens = original(controller, operation, *a, **kw)
    taken, shared = tokens, min(tokens, take_shared_pages() * controller.page_size)
    if tokens:
        parts = not operation.pool_transfers
        taken = gate.tokens_to_read(prefetch, tokens, len(operation.token_ids), shared, parts=parts)
    return keys[: taken // controller.page_size], taken


def around_read(original: Original, controller: Any, operation: Any) -> Any:
    """Around ``_page_transfer``, the read of a whole prefetch: the gate learns its time."""
    gate = gate_of(controller)
    if gate is None:
        return original(controller, operation)
    size, prefetch = controller.page_size, gate.prefetches.prefetch_of(operation)
    pages = len(operation.hash_value)
    with catching():
        step = pages_per_report(controller, pages) * size
        gate.read_begins(prefetch, pages * size, step)
    try:
        return original(controller, operation)
    finally:
        with catching():
            if prefetch.meeting is not None and not operation.is_terminated():
                gate.l3.need_not_read(prefetch.meeting.taken_pages * size)
            gate.read_ends()


def around_read_batch(original: Original, controller: Any, *a: Any, **kw: Any) -> Any:
    pages = original(controller, *a, **kw)
    if not hasattr(controller, "node_backups"):  # ours tells each part itself
        current().l3.part_arrived(pages * controller.page_size)
    return pages


def around_backup(original: Original, controller: Any, operation: Any) -> Any:
    """Around ``HybridCacheController._page_backup``. A node is not written if L3 lacks a page
    before it: no look-up would find it. L3 publishes events of what it stores."""
    l3 = our_l3_of(controller)
    writes = not getattr(controller, "backup_skip", False)  # another rank writes the same for it
    if l3 is not None and writes and not l3.reaches(operation):
        return None
    result = original(controller, operation)
    if l3 is not None:
        l3.wrote(operation)
    return result


def around_stop(original: Original, controller: Any, *a: Any, **kw: Any) -> Any:
    """Around ``HiCacheController._stop_storage_threads``, for a flush or a detach; no request is
    served. If a thread of this rank stopped before a prefetch whose request is gone, the other
    ranks would stay in a reduction, and SGLang would give the server up."""
    gate = current().hit_gate
    if gate is not None:
        _let_threads_finish(gate, controller)
        gate.prefetches.unfinished.clear()
    return original(controller, *a, **kw)


def _let_threads_finish(gate: HitGate, controller: Any) -> None:
    """Wait, not for ever, until every ``unfinished`` prefetch was answered or read."""
    names = ("prefetch_thread", "prefetch_io_aux_thread", "prefetch_sync_thread")
    threads = [getattr(controller, name) for name in names]
    deadline = time.monotonic() + _STOP_SECONDS
    while all(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        answered = set(controller.prefetch_hit_queue.queue)
        reports = list(controller.ack_prefetch_queue.queue)
        read = {report.operation for report in reports if report.completed_req}
        if not gate.prefetches.unfinished - answered - read:
            return
        time.sleep(0.001)


def pages_per_report(controller: Any, pages: int) -> int:
    """Number of pages whose arrival is reported together in a prefetch of ``pages``."""
    from sglang.srt.managers.cache_controller import STORAGE_BATCH_SIZE

    smaller = getattr(controller, "eager", None) is not None
    return batch_pages(pages) if smaller else min(pages, STORAGE_BATCH_SIZE)


LOOK_UP = Hook(_CONTROLLER + "_storage_hit_query", around_look_up)
READ = Hook(_CONTROLLER + "_page_transfer", around_read)
READ_BATCH = Hook(_BASE + "_page_transfer_kv_batch", around_read_batch)
BACKUP = Hook(_CONTROLLER + "_page_backup", around_backup)
STOP = Hook(_BASE + "_stop_storage_threads", around_stop)
