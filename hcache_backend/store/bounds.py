"""Keeping a folder within its bounds: least recently used pages go first."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hcache_backend.store.folder import Folder
from hcache_backend.store.format import PageName
from hcache_backend.store.page_files import delete_page
from hcache_backend.store.stats import ProblemLog, StoreStats


@dataclass(frozen=True)
class Bounds:
    """The bounds of one folder.

    Attributes:
        quota_bytes: Bytes of page files that it may hold; None means no quota.
        min_free_bytes: Bytes that stay free on its file system.
        high_water: Share of the quota at which eviction begins.
        low_water: Share of the quota down to which it goes.
    """

    quota_bytes: int | None
    min_free_bytes: int
    high_water: float
    low_water: float

    def excess(self, folder: Folder, incoming: int, on_disk: int = 0) -> int:
        """Bytes that must go before ``incoming`` bytes may come; 0 when there is room.

        Args:
            on_disk: How many of them are written already.

        Raises:
            OSError: The file system does not say how much is free.
        """
        used = folder.index.totals().bytes
        excess = 0
        if self.quota_bytes is not None and used + incoming > self.high_water * self.quota_bytes:
            excess = used + incoming - int(self.low_water * self.quota_bytes)
        free = folder.ops.free_bytes(folder.root_fd)
        missing = self.min_free_bytes + incoming - on_disk - free
        if missing > 0:
            slack = int((self.high_water - self.low_water) * used)
            excess = max(excess, missing + slack)
        return excess

    def has_room(self, folder: Folder, incoming: int, on_disk: int = 0) -> bool:
        """Whether ``incoming`` bytes would keep the folder within its bounds.

        Args:
            on_disk: How many of them are written already.

        Raises:
            OSError: The file system does not say how much is free.
        """
        used = folder.index.totals().bytes
        within = self.quota_bytes is None or used + incoming <= self.quota_bytes
        free = folder.ops.free_bytes(folder.root_fd)
        return within and free - (incoming - on_disk) >= self.min_free_bytes


def evict(folder: Folder, wanted: int, stats: StoreStats, problems: ProblemLog) -> int:
    """Delete least recently used pages until ``wanted`` bytes are free; returns how many are.

    The folder's lock is held. A file that cannot be deleted is passed over: it stays a page, and
    counts as just used. Files go before their entries: a crash in between leaves entries without
    file, which the next read removes, never files that nobody counts.

    Raises:
        lmdb.Error: The index could not be changed.
    """
    freed = 0
    mark = b""
    now = time.time_ns()
    stuck: list[PageName] = []
    while freed < wanted:
        batch = folder.index.oldest(after=mark)
        if not batch:
            break
        gone = []
        expected = 0
        for mark, entry in batch:  # noqa: B007 - the last mark goes on
            if freed + expected >= wanted:
                break
            try:
                delete_page(folder, entry.name)
            except OSError as error:
                stats.add(evict_errors=1)
                problems.report("evict", f"{folder.path}: a page could not be evicted: {error}")
                stuck.append(entry.name)
            else:
                gone.append(entry.name)
                expected += entry.record.file_bytes
        removed = folder.index.remove(gone)
        freed += removed
        stats.add(pages_evicted=len(gone), bytes_evicted=removed)
    if stuck:
        folder.index.touch(stuck, now)
    return freed
