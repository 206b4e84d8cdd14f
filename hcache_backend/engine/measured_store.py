"""A page store whose work shows in the metrics."""

from __future__ import annotations

from collections.abc import Sequence

from hcache_backend.engine import metrics
from hcache_backend.store.base import WHOLE, PageStore, Parts, SegmentTable, Share, Subset


class MeasuredStore(PageStore):
    """Passes everything on to ``store``, and times and counts it.

    Args:
        store: The store; closed with this one.
    """

    def __init__(self, store: PageStore) -> None:
        self._store = store
        self.stats = store.stats
        self.counters = metrics.StoreCounters(store.stats)

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, share: Share = WHOLE
    ) -> list[bool]:
        with metrics.timed("l3_exists"):
            found = self._store.exists(namespace, keys, share=share)
        metrics.count_lookups("found", sum(found))
        metrics.count_lookups("absent", len(found) - sum(found))
        return found

    def put(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        share: Share = WHOLE,
        table: SegmentTable | None = None,
    ) -> list[bool]:
        with metrics.timed("l3_write"):
            stored = self._store.put(namespace, keys, pages, share=share, table=table)
        self.counters.publish(now=True)
        return stored

    def get(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        subset: Subset | None = None,
        share: Share = WHOLE,
    ) -> list[bool]:
        with metrics.timed("l3_read"):
            found = self._store.get(namespace, keys, pages, subset=subset, share=share)
        self.counters.publish(now=True)
        return found

    def drop_writer(self, namespace: bytes, writer: bytes) -> int:
        return self._store.drop_writer(namespace, writer)

    def clear(self, namespace: bytes) -> None:
        self._store.clear(namespace)

    def flush(self) -> bool:
        return self._store.flush()

    def close(self) -> None:
        self._store.close()
        self.counters.publish(now=True)
