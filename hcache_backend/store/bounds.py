"""Keeping a folder within its bounds: least recently used pages go first.

The bounds are options: ``quota_bytes`` of page files in a folder, ``min_free_bytes`` on its file
system. Eviction begins at the share ``high_water`` of the quota and goes down to ``low_water``.
A folder that cannot be asked raises an OSError, an index that cannot be changed a sqlite3.Error.
"""

from __future__ import annotations

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import PageName
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import delete_page
from hcache_backend.store.stats import ProblemLog, StoreStats


def excess_bytes(folder: Folder, config: HCacheConfig, incoming: int, on_disk: int = 0) -> int:
    """Bytes that must go before ``incoming`` bytes may come; 0 when there is room.

    Args:
        on_disk: How many of them are written already.
    """
    high, low = config.high_water, config.low_water
    used = folder.index.totals().bytes
    quota = config.quota_bytes
    excess = 0
    if quota is not None and used + incoming > high * quota:
        excess = used + incoming - int(low * quota)
    missing = config.min_free_bytes + incoming - on_disk - folder.ops.free_bytes(folder.root_fd)
    if missing > 0:
        excess = max(excess, missing + int((high - low) * used))
    return excess


def broken_bound(
    folder: Folder, config: HCacheConfig, incoming: int, on_disk: int = 0, *, empty: bool = False
) -> str | None:
    """The bound that ``incoming`` bytes would break, in words; None when there is room for them.

    Args:
        on_disk: How many of them are written already.
        empty: Whether to ask as if the folder held no pages.
    """
    used = folder.index.totals().bytes
    kept = 0 if empty else used
    quota = config.quota_bytes
    if quota is not None and kept + incoming > quota:
        return (
            f"option 'quota_bytes' allows {quota:,} bytes of page files, and with {incoming:,} "
            f"more there would be {kept + incoming:,}"
        )
    left = folder.ops.free_bytes(folder.root_fd) + used - kept - (incoming - on_disk)
    if left < config.min_free_bytes:
        return (
            f"option 'min_free_bytes' keeps {config.min_free_bytes:,} bytes of its file system "
            f"free, and with {incoming:,} more {max(left, 0):,} would be"
        )
    return None


def pressure(folder: Folder, config: HCacheConfig) -> tuple[int, int]:
    """The last use of the page that goes next, 0 where there is room; and the bytes of all pages.

    Folders that get pages in this order lose what was used least recently in all of them.
    """
    totals = folder.index.totals()
    page = totals.bytes // max(totals.pages, 1)
    margin = int((config.high_water - config.low_water) * totals.bytes)
    quota = config.quota_bytes
    has_room = (quota is None or totals.bytes + page <= config.low_water * quota) and (
        folder.ops.free_bytes(folder.root_fd) >= config.min_free_bytes + margin + page
    )
    ends = None if has_room else folder.index.stamps()
    return ends[0] if ends else 0, totals.bytes


def evict(folder: Folder, wanted: int, stats: StoreStats, problems: ProblemLog) -> None:
    """Delete least recently used pages until ``wanted`` bytes are free.

    The folder's lock is held. A file that cannot be deleted is passed over: it stays a page, and
    counts as used last. Files go before their entries: a crash in between leaves entries without
    file, which the next read removes, never files that nobody counts.
    """
    freed = 0
    last: Entry | None = None
    stuck: list[PageName] = []
    while freed < wanted and (batch := folder.index.oldest(after=last)):
        gone = []
        expected = 0
        for last in batch:
            if freed + expected >= wanted:
                break
            try:
                delete_page(folder, last.name)
            except OSError as error:
                stats.add(evict_errors=1)
                problems.report("evict", f"{folder.path}: a page could not be evicted: {error}")
                stuck.append(last.name)
            else:
                gone.append(last.name)
                expected += last.file_bytes
        removed = folder.index.remove(gone)
        freed += removed
        stats.add(pages_evicted=len(gone), bytes_evicted=removed)
    if stuck:
        ends = folder.index.stamps()
        folder.index.touch(dict.fromkeys(stuck, ends[1] + 1 if ends else 0))
