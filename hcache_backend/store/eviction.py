"""Which pages go when a folder is full: the ends of sequences that were used least recently.

The store has a time of its own, in nanoseconds: wall time when a store is opened, or later if pages
have higher ranks, and then as much as the machine runs. It never steps back, in any process.

A page is of use only with every page before it in its sequence, so a use counts for a sequence from
its first page on. The *last use* of page ``i``, its rank in the index, is the time (epoch) of that
use minus ``i``; times never rise along a sequence. So the lowest ranks of every folder are those of
ends of sequences, and one sequence is gone before the next one loses a page. Ranks that store their
shards of a page at one time give them different epochs; a use makes them one.

A window or a state stands for all tokens before it, so a use counts for the last ones alone. States
at which no hit ends go before the pages around them.

A page whose epoch is young keeps it: its age is less than 1/16 of the age of the oldest page in the
folders. That bounds how often a page that is used all the time is written to the index.

The bounds are options: ``quota_bytes`` of page files in a folder, ``min_free_bytes`` on its file
system. Eviction begins at a bound, and goes on to 2% of the pages' bytes below it. No page goes for
one of a lower rank: a sequence that is larger than its bounds keeps its beginning.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import PageName
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.stats import ProblemLog, StoreStats

LOW_WATER = 0.98  # of the quota: eviction ends there
_YOUNG = 16
_MOST_PAGES = 1_000_000  # a rank is less than its epoch by the page's number at most
_PENDING_AT_MOST = 1 << 20  # keys of uses that wait to be saved; further ones are not noted

Keys = Sequence[bytes]  # of pages
# Namespace, keys of a sequence, number of the first page that is used, epoch of the use.
_Use = tuple[bytes, Keys, int, int]
_Changes = Sequence[dict[PageName, int]]  # new ranks of page files, for each disk


class Ranked(Protocol):
    """The pages of a folder, with their ranks: a :class:`.Disk`."""

    def lookup(self, namespace: bytes, keys: Keys) -> list[list[Entry]]: ...
    def rank_range(self) -> tuple[int, int] | None: ...
    def raise_ranks(self, ranks: Mapping[PageName, int]) -> None: ...


class Recency:
    """The uses of a store's pages, which its ``disks`` learn now and then. Any thread. :meth:`save`
    comes first, when the disks are open."""

    def __init__(self, disks: Sequence[Ranked]) -> None:
        self._disks = disks
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._pending: dict[tuple[bytes, bytes], _Use] = {}  # by namespace and last key
        self._pending_keys = 0
        self._ahead = 0  # nanoseconds that the store's time is ahead of time.monotonic_ns()
        self._follow(time.time_ns())

    def note(self, namespace: bytes, keys: Keys, first: int = 0) -> None:
        """See :meth:`.PageStore.use`. The thread that saves the use reads all keys but the last."""
        if keys:
            self._note(namespace, keys, first, self._now())

    def note_new(
        self, namespace: bytes, prefix: Keys, keys: Keys, *, alone: bool = False
    ) -> list[int]:
        """Pages ``keys`` behind those of ``prefix`` are about to be stored, or used if they are
        there already. Returns their ranks. ``alone``: they are of use without the ``prefix``."""
        if alone and keys:
            first, now = len(prefix), self._now()
            self._note(namespace, [*prefix, *keys], first, now)
            return [now - number for number in range(first, first + len(keys))]
        with self._saving:
            young, now = self._young(), self._now()
            epoch, start, used = now, 0, 0  # start: first page to look at; used: pages used now
            if prefix:
                [last] = self._epochs(namespace, prefix[-1:], len(prefix) - 1)
                if last and min(last) >= young:  # then the pages before it are young, too
                    epoch, start = min(epoch, *last), len(prefix)
            ranks = []
            sequence = [*prefix[start:], *keys]
            for number, epochs in enumerate(self._epochs(namespace, sequence, start), start):
                if epochs and min(epochs) >= young:  # it keeps its epoch; no later page has more
                    epoch = min(epoch, *epochs)
                elif epochs:  # it is there, and was last used long ago
                    used = number + 1
                if number >= len(prefix):
                    ranks.append(epoch - number)
            if used:
                self._note(namespace, [*prefix, *keys][:used], 0, now)
            return ranks

    def save(self) -> None:
        """Write the noted uses to the index of each folder, as higher ranks of the pages."""
        with self._saving:
            with self._lock:
                uses, self._pending, self._pending_keys = self._pending, {}, 0
            young = self._young()
            changes: _Changes = [{} for _ in self._disks]
            for use in uses.values():
                self._raise_ranks(use, young, changes)
            for disk, change in zip(self._disks, changes, strict=True):
                if change:
                    disk.raise_ranks(change)

    def _note(self, namespace: bytes, keys: Keys, first: int, epoch: int) -> None:
        with self._lock:
            if self._pending_keys < _PENDING_AT_MOST:
                self._pending[namespace, keys[-1]] = namespace, keys, first, epoch
                self._pending_keys += len(keys)

    def _raise_ranks(self, use: _Use, young: int, changes: _Changes) -> None:
        """Enter in ``changes``, by disk, the higher ranks that a use gives to pages. A page whose
        epoch is ``young`` or later keeps it, and pages behind it get no later one."""
        namespace, sequence, first, epoch = use
        [last] = self._epochs(namespace, sequence[-1:], len(sequence) - 1)
        if len(last) == 1 and min(last) >= young:
            return
        used = list(sequence)[first:]
        by_disk = [disk.lookup(namespace, used) for disk in self._disks]  # [disk, page]
        for number, page in enumerate(zip(*by_disk, strict=True), first):
            files = zip(changes, page, strict=True)
            entries = [(change, entry) for change, listed in files for entry in listed]
            epochs = {entry.rank + number for _, entry in entries}
            if len(epochs) == 1 and min(epochs) >= young:
                epoch = min(epoch, *epochs)
                continue
            newest = max(epochs, default=0)  # all shards of a page get one epoch
            for change, entry in entries:
                rank = max(max(epoch, newest) - number, change.get(entry.name, 0))
                if rank > entry.rank:
                    change[entry.name] = rank

    def _epochs(self, namespace: bytes, keys: Keys, first: int) -> list[set[int]]:
        """Of each page the epochs of its files; its number in the sequence is ``first`` or more."""
        epochs: list[set[int]] = [set() for _ in keys]
        for disk in self._disks:
            for i, entries in enumerate(disk.lookup(namespace, keys)):
                epochs[i].update(entry.rank + first + i for entry in entries)
        return epochs

    def _now(self) -> int:
        return time.monotonic_ns() + self._ahead

    def _follow(self, epoch: int) -> None:
        """Let the store's time be at least ``epoch`` from now on."""
        with self._lock:
            self._ahead = max(self._ahead, epoch - time.monotonic_ns())

    def _young(self) -> int:
        """The first epoch that is young. The store's time follows the ranks in all folders."""
        ranges = [ranks for disk in self._disks if (ranks := disk.rank_range()) is not None]
        # Another process may have given ranks by a later time.
        self._follow(max((last for _, last in ranges), default=0) + _MOST_PAGES)
        now = self._now()
        return now - max(0, now - min((first for first, _ in ranges), default=now)) // _YOUNG


def margin(used: int) -> int:
    """Bytes that go at least if a disk is full; ``used`` are those of all pages."""
    return int((1 - LOW_WATER) * used)


class Room(NamedTuple):
    """How much of what comes a folder has room for."""

    fits: int  # bytes of it that may come now
    excess: int  # bytes that must go before all of it may
    bound: str | None  # that all of it would break
    disk_is_full: bool  # it would break the bound of the disk


def room_for(
    folder: Folder, config: HCacheConfig, incoming: int, on_disk: int = 0, *, empty: bool = False
) -> Room:
    """The room for ``incoming`` bytes, of which ``on_disk`` are written already, but are not in the
    index. ``empty``: as if the folder held no pages."""
    stored = folder.index.totals().bytes
    used = 0 if empty else stored
    quota, reserve = config.quota_bytes, config.min_free_bytes
    fits, excess, bound = incoming, 0, None
    if quota is not None and used + incoming > quota:
        fits, excess = quota - used, used + incoming - int(LOW_WATER * quota)
        bound = (
            f"option 'quota_bytes' allows {quota:,} bytes of page files, and with "
            f"{incoming:,} more there would be {used + incoming:,}"
        )
    # Free bytes of the file system when all incoming bytes are there; ``empty``: and no old pages.
    free_after = folder.ops.free_bytes(folder.root_fd) + stored - used - (incoming - on_disk)
    if free_after < reserve:
        fits = min(fits, incoming - (reserve - free_after))
        excess = max(excess, reserve - free_after + margin(used))
        bound = bound or (
            f"option 'min_free_bytes' keeps {reserve:,} bytes of its file system free, and with "
            f"{incoming:,} more {max(free_after, 0):,} would be"
        )
    return Room(max(fits, 0), excess, bound, free_after < reserve)


def pressure(folder: Folder, config: HCacheConfig) -> tuple[int, int]:
    """The rank of the page that is evicted next, 0 if there is room for one more; and the bytes of
    all pages. New pages go to the folder with the least of these pairs first."""
    totals = folder.index.totals()
    file_bytes = totals.bytes // max(totals.files, 1)  # of a further one, about
    quota = config.quota_bytes
    free = folder.ops.free_bytes(folder.root_fd) - margin(totals.bytes) - file_bytes
    full = quota is not None and totals.bytes + file_bytes > LOW_WATER * quota
    ranks = folder.index.rank_range() if full or free < config.min_free_bytes else None
    return ranks[0] if ranks else 0, totals.bytes


def evict(
    folder: Folder, wanted: int, below: int, seconds: float, stats: StoreStats, problems: ProblemLog
) -> bool:
    """Delete pages, lowest rank first, until ``wanted`` bytes are freed; no page of rank ``below``
    or higher. Returns False if no byte was freed; raises LockedError if the lock is not free within
    ``seconds``. The lock is held for a batch at a time; what other servers evict meanwhile counts.
    A file that cannot be deleted stays a page, and counts as used last. Files go before entries: a
    crash in between leaves entries without file, which the next read removes."""
    deadline = time.monotonic() + seconds
    target = folder.index.totals().bytes - wanted
    freed = 0
    last: Entry | None = None  # that was tried; the next batch begins after it
    stuck: list[PageName] = []  # could not be deleted
    while freed < wanted and folder.index.totals().bytes > target:
        count = folder.lock.batch
        with folder.lock.hold(deadline - time.monotonic(), batch=count):
            oldest = folder.index.oldest(count, after=last)
            batch = [entry for entry in oldest if entry.rank < below]
            gone = []
            for last in batch:
                if freed >= wanted:
                    break
                try:
                    folder.delete_page(last.name)
                except OSError as error:
                    stats.add(evict_errors=1)
                    problems.report("evict", f"{folder.path}: a page could not be evicted: {error}")
                    stuck.append(last.name)
                else:
                    gone.append(last.name)
                    freed += last.file_bytes
            stats.add(pages_evicted=len(gone), bytes_evicted=folder.index.remove(gone))
        stats.on_evicted(gone)
        if not batch:
            break
    if stuck:
        ranks = folder.index.rank_range()
        with folder.lock.hold(deadline - time.monotonic()):
            folder.index.raise_ranks(dict.fromkeys(stuck, ranks[1] + 1 if ranks else 0))
    return freed > 0
