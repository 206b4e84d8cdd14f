"""The page store: pages over any number of folders, one for each disk.

Pages that follow each other in a sequence go to the folders in turn, so that reading one
conversation back uses all disks at once. A folder that fails or vanishes costs its own pages only.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import wait
from itertools import chain

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import WRITER_BYTES, PageName, check_bytes, check_names
from hcache_backend.format.file import file_layout
from hcache_backend.format.units import WHOLE, Eighths, PageMemory, Parts, SegmentTable, Shard
from hcache_backend.store.disk import Disk, Writing, result_of
from hcache_backend.store.eviction import Keys, Recency
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import NotOurFolderError, PageRead, PageWrite
from hcache_backend.store.index import Entry
from hcache_backend.store.kvikio_ops import best_file_ops
from hcache_backend.store.maintenance import maintain
from hcache_backend.store.stats import StoreStats, logger

# Pages are named in groups of this size per folder at most, while the next group is written. Naming
# syncs the index, which holds up the disk. Two groups at most are on a disk beyond its quota.
_GROUP_BYTES = 512 << 20

WRITE_SECONDS = 30.0  # for a batch of pages; the rest of the batch is dropped
READ_SECONDS = 30.0  # until a batch has its turn; after that its pages are misses


class PageStore:
    """A local L3: maps namespace (16 bytes) and key (32 bytes) to the bytes of a page.

    A page that is read back is verified, or it is a miss; a page that is missing, damaged or
    unwritable raises nothing. Any thread and process may call all methods. They raise a ValueError
    for names of a wrong length, and for a shard that no page has.

    ``writer`` (8 bytes) is the server run. Without ``background`` no thread looks after folders.
    Raises a NotOurFolderError if a folder has other files, an OSError if none can be used.
    """

    def __init__(
        self,
        config: HCacheConfig,
        writer: bytes,
        *,
        ops: FileOps | None = None,
        background: bool = True,
    ) -> None:
        check_bytes("writer", writer, WRITER_BYTES)
        self._config, self._writer = config, writer
        self.stats = StoreStats()
        self.disks: list[Disk] = []
        self._recency = Recency(self.disks)
        ops = ops or best_file_ops(config)
        self.disks += [Disk(path, config, ops, self.stats, self._recency) for path in config.dirs]
        try:
            self._attach()
        except BaseException:
            for disk in self.disks:
                disk.close()
            raise
        self._recency.save()
        self._stopping = threading.Event()
        self._maintenance = []
        for disk in self.disks if background else ():
            work = disk, self._recency, config, self._stopping
            self._maintenance.append(threading.Thread(target=maintain, args=work, daemon=True))
            self._maintenance[-1].start()

    def exists(self, namespace: bytes, keys: Keys, *, shard: Shard = WHOLE) -> list[bool]:
        """Of each page whether ``shard`` of it can be read from the files in all folders together,
        which may be of other shards. Only the index is read: a file may be damaged."""
        keys = list(keys)
        check_names(namespace, keys, shard)
        wanted, (first, *others) = shard.eighths, self.disks  # missing: eighths of each page
        missing = [wanted & ~part for part in first.coverage(namespace, keys)]
        for disk in others:
            numbers = [number for number, part in enumerate(missing) if part]
            parts = disk.coverage(namespace, [keys[number] for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                missing[number] &= ~part
        return [not part for part in missing]

    def use(self, namespace: bytes, keys: Keys, first: int = 0) -> None:
        """The pages ``keys`` of a sequence are being used, from page ``first`` on. They may be in
        L1, L2 or here: pages that are served are worth keeping. Never waits; all keys but the last
        are read later."""
        check_names(namespace, list(keys[-1:]))
        self._recency.note(namespace, keys, first)

    def put(
        self,
        namespace: bytes,
        keys: Keys,
        pages: Sequence[Parts],
        *,
        prefix: Keys = (),
        alone: bool = False,
        shard: Shard = WHOLE,
        table: SegmentTable | None = None,
        digests: Sequence[Sequence[int]] | None = None,
    ) -> list[bool]:
        """Store a shard of pages; False for a page that was not stored (the counters say why).

        When it returns, the memory of ``pages`` may change. A page that is there already, in files
        of any shards, is not written again. Also a ValueError for memory or digests of another
        number than the shard has bytes and units.

        Args:
            keys: In the order of the sequence: neighbours go to different folders.
            pages: The shard's units of every page in the order of the page, with nothing between.
            prefix: The keys of the pages before them in their sequence, from its first one on.
                They are in use, too, unless the pages are of use ``alone``.
            table: How the whole page divides; a must for shards. Without it every part is one
                segment.
            digests: Those of the shard's units of every page; without them they are computed here.
                A page that does not have them is a miss when it is read.
        """
        check_names(namespace, [*prefix[-1:], *keys], shard)
        for what, values in (("pages", pages), ("pages' digests", digests)):
            if values is not None and len(values) != len(keys):
                raise ValueError(f"{len(values)} {what} for {len(keys)} keys")
        if table is None and shard != WHOLE:
            raise ValueError(f"shard {shard.number} of {shard.of} without a table of the page")
        ranks = self._recency.note_new(namespace, prefix, keys, alone=alone)
        covers = self._cover(namespace, keys, shard.eighths, on_disk=True)
        stored = [bool(files) for files in covers]  # by page
        self.stats.add(pages_already_stored=sum(stored))
        work = []
        for number, (key, parts, rank) in enumerate(zip(keys, pages, ranks, strict=True)):
            if not stored[number]:
                memory = PageMemory(parts, shard, None if digests is None else digests[number])
                layout = file_layout(table or SegmentTable.of_parts(memory.parts), shard)
                layout.check(memory)
                name = PageName(namespace, key, shard)
                entry = Entry(name, layout.header_bytes, layout.payload_bytes, self._writer, rank)
                work.append(PageWrite(number, entry, memory, layout))
        self._write(work, time.monotonic() + WRITE_SECONDS)
        for write in work:
            stored[write.number] = write.stored
        if shard != WHOLE:  # used together with the shards of other ranks
            self._recency.note(namespace, [*prefix, *keys])
        if self._config.durability == "always":
            # Another thread or process may not have synced a page that was there.
            covering = {disk for files in covers for disk, *_ in files}
            for disk in self.disks:
                if (disk.dirty or disk in covering) and not disk.flush():
                    stored = [False] * len(stored)
        return stored

    def _write(self, work: Sequence[PageWrite], deadline: float) -> None:
        """Write pages to all folders at once, neighbours to different ones, until ``deadline``. A
        group of pages is written to files while the group before it gets its entries and names."""
        disks = [disk for disk in self.disks if disk.is_online(writing=True)]
        if not disks:
            self.stats.add(pages_dropped_offline=len(work))
        previous: list[tuple[Disk, Writing]] = []
        largest = max((write.memory.length for write in work), default=1)
        size = max(1, _GROUP_BYTES * len(disks) // largest)  # pages of a group
        for first in range(0, len(work) + size, size):  # an empty group finishes the last one
            group, current = work[first : first + size], []
            if group:
                # The last round may end early: the folders that can do with more pages come first.
                disks.sort(key=Disk.pressure)
            for start, disk in enumerate(disks):
                if items := group[start :: len(disks)]:
                    current.append((disk, disk.start_writing(items, deadline)))
            for disk, writing in previous:
                disk.finish_writing(writing, deadline)
            previous = current

    def get(
        self, namespace: bytes, keys: Keys, pages: Sequence[Parts], *, shard: Shard = WHOLE
    ) -> list[bool]:
        """Read ``shard`` of each page, from files of any shards, to ``pages``, the memory of its
        payload. False is a miss; then the memory of the page holds anything. See :meth:`put`."""
        keys = list(keys)
        check_names(namespace, keys, shard)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        covers = self._cover(namespace, keys, shard.eighths)
        reads: dict[Disk, list[PageRead]] = {}
        for number, files in enumerate(covers):
            memory = PageMemory(pages[number], shard)
            for disk, entry, part in files:
                reads.setdefault(disk, []).append(PageRead(number, entry, part, memory))
        deadline = time.monotonic() + READ_SECONDS
        reading = [disk.start_reading(of_disk, deadline) for disk, of_disk in reads.items()]
        wait(chain(*reading), READ_SECONDS)
        arrived: Counter[int] = Counter()  # number of files read, by number of the page
        for future in chain(*reading):
            # A reading that has begun is waited for, because it may write the memory.
            if not future.cancel():
                arrived.update(result_of(future) or ())
        hits = [0 < len(files) == arrived[number] for number, files in enumerate(covers)]
        self.stats.add(pages_read=sum(hits), misses=hits.count(False))
        return hits

    def check_room(self, page_bytes: int) -> None:
        """Log which folders could hold no page of ``page_bytes``, were they empty."""
        for disk in self.disks:
            disk.check_room(page_bytes)

    def drop(self, namespace: bytes) -> int:
        """Delete the pages of a namespace; returns how many files."""
        check_names(namespace, [])
        return sum(disk.drop(namespace) for disk in self.disks)

    def drop_writer(self, writer: bytes) -> int:
        """Delete the pages of all namespaces that a server run wrote; returns how many files."""
        check_bytes("writer", writer, WRITER_BYTES)
        return sum(disk.drop(b"", writer) for disk in self.disks)

    def flush(self) -> bool:
        """Bring everything that was put to the disks; False when a disk refused."""
        self._recency.save()
        flushed = [disk.flush() for disk in self.disks]
        return all(flushed)

    def close(self) -> None:
        """Save last uses, sync if options want it, and close the folders; a second call is none."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        for thread in self._maintenance:
            thread.join(10.0)
        self._recency.save()
        for disk in self.disks:
            if self._config.durability != "none" and disk.dirty:
                disk.flush()
            disk.close()

    def _attach(self) -> None:
        """Open the folders; raises if one has other files, or none can be used."""
        failures = []
        for disk in self.disks:
            try:
                disk.attach(create=True)
            except NotOurFolderError:
                raise
            except OSError as error:
                failures.append((disk.path, error))
        if len(failures) == len(self.disks):
            raise failures[0][1]
        for failure in failures:
            logger.warning("hcache: %s cannot be used for now: %s", *failure)

    def _cover(
        self, namespace: bytes, keys: Keys, part: Eighths, *, on_disk: bool = False
    ) -> list[list[tuple[Disk, Entry, Eighths]]]:
        """Of each page the files that together have its eighths ``part``, each with its disk, its
        entry and the eighths that it brings. An empty list if some of ``part`` is missing.
        ``on_disk``: entries without a file do not count. Files of large shards come first."""
        missing = [part] * len(keys)
        covers: list[list[tuple[Disk, Entry, Eighths]]] = [[] for _ in keys]
        for disk in self.disks:
            numbers = [number for number, part in enumerate(missing) if part]
            listed = disk.lookup(namespace, [keys[number] for number in numbers])
            for number, entries in zip(numbers, listed, strict=True):
                for entry in sorted(entries, key=lambda entry: entry.name.shard.of):
                    useful = entry.name.shard.eighths & missing[number]
                    if useful and (not on_disk or disk.holds_file(entry.name)):
                        covers[number].append((disk, entry, useful))
                        missing[number] &= ~useful
        return [[] if part else files for part, files in zip(missing, covers, strict=True)]
