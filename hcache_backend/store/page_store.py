"""The page store: pages over any number of folders, one for each disk.

Pages that follow each other in a sequence go to the folders in turn, so that reading one
conversation back uses all disks at once. A folder that fails or vanishes costs its own pages only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import WRITER_BYTES, PageName, check_bytes, check_names
from hcache_backend.format.file import file_layout
from hcache_backend.format.units import WHOLE, Eighths, PageMemory, Parts, SegmentTable, Share
from hcache_backend.store.disk import Disk, Writing, result_of
from hcache_backend.store.eviction import Recency
from hcache_backend.store.file_ops import FileOps, best_file_ops
from hcache_backend.store.folder import NotOurFolderError
from hcache_backend.store.index import Entry
from hcache_backend.store.maintenance import maintain
from hcache_backend.store.page_files import PageRead, PageWrite
from hcache_backend.store.stats import ProblemLog, StoreStats

logger = logging.getLogger("hcache.store")

_GROUP_BYTES = 512 << 20
"""Pages are named in groups of about this size per folder, while the next group is written.

Naming a group syncs the index, which holds up the disk, so groups are large. At most two of them
are on a disk without being counted in its quota.
"""

WRITE_SECONDS = 30.0  # for a batch of pages; the rest of the batch is dropped
READ_SECONDS = 30.0  # until a batch has its turn; after that its pages are misses
_CLOSE_SECONDS = 10.0


class PageStore:
    """A local L3: maps ``(namespace, key)`` to the bytes of a page, in ``config.dirs``.

    It knows bytes: no torch, no SGLang, no models. A page that is read back is verified, or it is a
    miss; a page that is missing, damaged or unwritable raises nothing. Any thread and process may
    call all methods.

    Args:
        writer: The server run, 8 bytes; every page file has it.
        ops: The file operations; None for those of ``config``.
        background: Whether threads look after the folders; tests do it by hand.

    Raises:
        NotOurFolderError: A folder has other files.
        OSError: None of the folders can be used.
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
        self.stats = StoreStats()
        self._config = config
        self._writer = writer
        self._problems = ProblemLog()
        self._closed = False
        ops = ops or best_file_ops(config)
        shared = config, ops, self.stats, self._problems
        self.disks = [Disk(path, *shared) for path in config.dirs]
        try:
            self._attach_all()
        except BaseException:
            for disk in self.disks:
                disk.close()
            raise
        self._recency = Recency(self.disks)
        self._stopping = threading.Event()
        care = self._recency, config, self._stopping
        self._maintenance = [
            threading.Thread(target=maintain, args=(disk, *care), daemon=True)
            for disk in (self.disks if background else ())
        ]
        for thread in self._maintenance:
            thread.start()

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, share: Share = WHOLE
    ) -> list[bool]:
        """Whether the share of each page is there, in files of any shares.

        It may still turn out to be damaged when it is read.
        """
        keys = list(keys)
        check_names(namespace, keys, share)
        wanted = share.eighths
        first, *others = self.disks
        found = first.coverage(namespace, keys)
        for disk in others:
            numbers = [number for number, part in enumerate(found) if wanted & ~part]
            if not numbers:
                break
            parts = disk.coverage(namespace, [keys[number] for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                found[number] |= part
        return [wanted & part == wanted for part in found]

    def use(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """The pages ``keys`` (32 bytes each) of a sequence, from its first one on, are being used.

        They may be in L1, L2 or here: pages that are served are worth keeping. Never waits; all
        keys but the last are read later.

        Raises:
            ValueError: Names of a wrong length.
        """
        check_names(namespace, list(keys[-1:]))
        self._recency.note(namespace, keys)

    def put(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        prefix: Sequence[bytes] = (),
        share: Share = WHOLE,
        table: SegmentTable | None = None,
        digests: Sequence[Sequence[int]] | None = None,
    ) -> list[bool]:
        """Store a share of pages; False for a page that was not stored (the counters say why).

        When it returns, the memory of ``pages`` may change. A page that is there already, in files
        of any shares, is not written again.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each, in the order of the sequence: neighbours go to different folders.
            pages: The memory of the payload of the share: the share's units in the order of the
                page, with nothing between. The payload of the whole page is the page.
            prefix: The keys of the pages before them in their sequence, from its first one on.
                They are in use, too.
            share: The share of every page that the caller has.
            table: How the whole page divides; a must for shares. Without it every part is one
                segment.
            digests: Those of the share's units, of every page; without them they are computed here.
                A page that does not have them is a miss when it is read.

        Raises:
            ValueError: Names of a wrong length, no such share, a share without a table, or memory
                or digests of another number than the share has bytes and units.
        """
        keys = list(keys)
        check_names(namespace, [*prefix[-1:], *keys], share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        if digests is not None and len(digests) != len(keys):
            raise ValueError(f"digests of {len(digests)} pages for {len(keys)} keys")
        if table is None and share != WHOLE:
            raise ValueError(f"share {share.number} of {share.of} without a table of the page")
        deadline = time.monotonic() + WRITE_SECONDS
        ranks = self._recency.note_new(namespace, prefix, keys)
        done = self._already_stored(namespace, keys, share)
        work = []
        for number, (key, parts) in enumerate(zip(keys, pages, strict=True)):
            if not done[number]:
                name = PageName(namespace, key, share)
                memory = PageMemory(parts, share, None if digests is None else digests[number])
                layout = file_layout(table or SegmentTable.of_parts(memory.parts), share)
                layout.check(memory)
                sizes = layout.header_bytes, layout.payload_bytes
                entry = Entry(name, *sizes, self._writer, ranks[number])
                work.append(PageWrite(number, entry, memory, layout))
        disks = [disk for disk in self.disks if disk.is_online(writing=True)]
        if work and not disks:
            self.stats.add(pages_dropped_offline=len(work))
            work = []
        limits = deadline, self._recency.save
        before: list[tuple[Disk, Writing]] = []
        for group in (*_groups(work, len(disks)), ()):  # the empty one: to finish the last one
            started = []
            if group:
                # The last round may end early: the folders that can do with more pages come first.
                disks.sort(key=Disk.pressure)
            for start, disk in enumerate(disks):
                if items := group[start :: len(disks)]:
                    started.append((disk, disk.start_writing(items, *limits)))
            for disk, writing in before:
                disk.finish_writing(writing, *limits)
            before = started
        for write in work:
            done[write.number] = write.stored
        if share != WHOLE:  # used together with the shares of other ranks
            self._recency.note(namespace, [*prefix, *keys])
        if self._config.durability == "always":
            for disk in self.disks:
                if disk.dirty and not disk.flush():
                    done = [False] * len(done)
        return done

    def get(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        share: Share = WHOLE,
    ) -> list[bool]:
        """Read a share of pages, from files of any shares.

        False is a miss; the memory of that page then holds anything.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each.
            pages: The memory of the payload of the share (see :meth:`put`), of that length.

        Raises:
            ValueError: Names of a wrong length, or no such share.
        """
        keys = list(keys)
        check_names(namespace, keys, share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        covers = self._cover(namespace, keys, share.eighths)
        reads: dict[Disk, list[PageRead]] = {}
        for number, files in enumerate(covers):
            memory = PageMemory(pages[number], share)
            for disk, entry, part in files:
                reads.setdefault(disk, []).append(PageRead(number, entry, part, memory))
        seconds = READ_SECONDS
        deadline = time.monotonic() + seconds
        reading = [
            future for disk, some in reads.items() for future in disk.start_reading(some, deadline)
        ]
        wait(reading, seconds)
        came: Counter[int] = Counter()
        for future in reading:
            # A reading that has begun is waited for: until then it may write the memory.
            if not future.cancel():
                came.update(result_of(future) or ())
        found = [0 < len(files) == came[number] for number, files in enumerate(covers)]
        hits = sum(found)
        self.stats.add(pages_read=hits, misses=len(keys) - hits)
        return found

    def check_room(self, page_bytes: int) -> None:
        """Say in the log which folders could hold no page of ``page_bytes``, were they empty."""
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
        """Release what the store holds; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        for thread in self._maintenance:
            thread.join(_CLOSE_SECONDS)
        self._recency.save()
        for disk in self.disks:
            if self._config.durability != "none" and disk.dirty:
                disk.flush()
            disk.close()

    def _attach_all(self) -> None:
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
        for path, failure in failures:
            logger.warning("hcache: %s cannot be used for now: %s", path, failure)

    def _already_stored(self, namespace: bytes, keys: Sequence[bytes], share: Share) -> list[bool]:
        """Which pages need not be written again; their files are looked for, not only entries."""
        covers = self._cover(namespace, keys, share.eighths, Disk.holds_file)
        stored = [bool(files) for files in covers]
        self.stats.add(pages_already_stored=sum(stored))
        return stored

    def _cover(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        part: Eighths,
        counts: Callable[[Disk, PageName], bool] = lambda disk, name: True,
    ) -> list[list[tuple[Disk, Entry, Eighths]]]:
        """The files that together have ``part`` of each page; none if some of it is missing.

        Every file comes with the part of the page that it is there for. Files of large shares are
        taken before those of small ones, so that few files are read, and only if one ``counts``.
        """
        missing = [part] * len(keys)
        found: list[list[tuple[Disk, Entry, Eighths]]] = [[] for _ in keys]
        for disk in self.disks:
            numbers = [number for number, left in enumerate(missing) if left]
            if not numbers:
                break
            listed = disk.lookup(namespace, [keys[number] for number in numbers])
            for number, entries in zip(numbers, listed, strict=True):
                if len(entries) > 1:
                    entries.sort(key=lambda entry: entry.name.share.of)
                for entry in entries:
                    useful = entry.name.share.eighths & missing[number]
                    if useful and counts(disk, entry.name):
                        found[number].append((disk, entry, useful))
                        missing[number] &= ~useful
        return [[] if left else files for left, files in zip(missing, found, strict=True)]


def _groups(work: Sequence[PageWrite], disks: int) -> Iterator[list[PageWrite]]:
    group: list[PageWrite] = []
    size = 0
    for item in work:
        group.append(item)
        size += item.memory.length
        if size >= _GROUP_BYTES * disks:
            yield group
            group, size = [], 0
    if group:
        yield group
