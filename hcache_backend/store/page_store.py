"""The page store: pages over any number of folders, one for each disk.

Pages that follow each other in a sequence go to the folders in turn, so that reading one
conversation back uses all disks at once. A folder that fails or vanishes costs its own pages only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from typing import NamedTuple

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import (
    WRITER_BYTES,
    PageName,
    check_bytes,
    check_names,
    check_share,
)
from hcache_backend.format.file import file_layout
from hcache_backend.format.units import WHOLE, PageMemory, Parts, SegmentTable, Share
from hcache_backend.store import caretaker
from hcache_backend.store.cover import cover
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import NotOurFolderError
from hcache_backend.store.kvikio_ops import best_file_ops
from hcache_backend.store.page_files import PageRead, PageWrite, page_write
from hcache_backend.store.recency import Recency
from hcache_backend.store.stats import ProblemLog, StoreContext, StoreStats
from hcache_backend.store.volume import Volume, Writer, result_of

logger = logging.getLogger("hcache.store")

_GROUP_BYTES = 512 << 20
"""Pages are named in groups of about this size per folder, the next group being written meanwhile.

Naming a group syncs the index, which holds up the disk; so groups are large. Two of them at most
stand on a disk without being counted in its quota.
"""

_CLOSE_SECONDS = 10.0


class _Writing(NamedTuple):
    """As many ``pages`` of a group as a folder is writing."""

    volume: Volume
    pages: int
    writers: list[Writer]


class PageStore:
    """A local L3: maps ``(namespace, key)`` to the bytes of a page, in ``config.dirs``.

    It knows nothing of torch, of SGLang or of what the bytes mean. What is read back is verified,
    or it is a miss; a page that is missing, damaged or unwritable raises nothing. All methods may
    be called from several threads and processes.

    Args:
        writer: The server run, 8 bytes; stands in every page file.
        ops: The file operations; None for the ones that ``config`` asks for.
        background: Whether threads look after the folders; tests do it by hand.

    Raises:
        NotOurFolderError: A folder is in use for something else.
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
        self._problems = ProblemLog()
        self._closed = False
        ops = ops or best_file_ops(config)
        context = StoreContext(config, ops, writer, self.stats, self._problems)
        self.volumes = [Volume(path, context) for path in config.dirs]
        try:
            self._attach_all()
        except BaseException:
            for volume in self.volumes:
                volume.close()
            raise
        self._recency = Recency(self.volumes)
        self._stopping = threading.Event()
        self._caretakers: list[threading.Thread] = []
        if background:
            self._caretakers = caretaker.start(self.volumes, self._recency, config, self._stopping)

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, share: Share = WHOLE
    ) -> list[bool]:
        """Whether the share of each page is there, in files of whatever shares.

        It may still turn out to be damaged when it is read.
        """
        keys = list(keys)
        check_names(namespace, keys)
        check_share(share)
        wanted = share.eighths
        first, *others = self.volumes
        found = first.coverage(namespace, keys)
        for volume in others:
            numbers = [number for number, mask in enumerate(found) if wanted & ~mask]
            if not numbers:
                break
            masks = volume.coverage(namespace, [keys[number] for number in numbers])
            for number, mask in zip(numbers, masks, strict=True):
                found[number] |= mask
        return [wanted & mask == wanted for mask in found]

    def use(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """The pages ``keys`` (32 bytes each) of a sequence, from its first one on, are being used.

        Wherever they are: what L1 and L2 serve is worth keeping here, too. Never waits; all keys
        but the last are read later.

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

        When it returns, the memory of ``pages`` may change. What is there already, in files of
        whatever shares, is not written again.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each, in the order of the sequence: neighbours go to different folders.
            pages: The memory of the payload of the share: the share's units in the order of the
                page, with nothing between. The payload of the whole page is the page.
            prefix: The keys of the pages before them in their sequence, from its first one on.
                They are in use, too.
            share: The eighths of every page that the caller has.
            table: How the whole page divides; a must for shares and for reading parts of a layer.
                Without it every part is one segment.
            digests: Those of the share's units, of every page; without them they are computed here.
                A page that is not what they say is a miss when it is read.

        Raises:
            ValueError: Names of a wrong length, no such share, a share without a table, or memory
                or digests of another number than the share has bytes and units.
        """
        keys = list(keys)
        check_names(namespace, [*prefix[-1:], *keys])
        check_share(share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        if digests is not None and len(digests) != len(keys):
            raise ValueError(f"digests of {len(digests)} pages for {len(keys)} keys")
        deadline = time.monotonic() + self._config.write_seconds
        stamps = self._recency.note_new(namespace, prefix, keys)
        done = self._already_stored(namespace, keys, share)
        layout = None if table is None else file_layout(table, share)
        work = []
        for number, (key, parts) in enumerate(zip(keys, pages, strict=True)):
            if not done[number]:
                name = PageName(namespace, key, share)
                memory = PageMemory(parts, share, None if digests is None else digests[number])
                work.append(page_write(number, name, memory, layout, stamps[number]))
        volumes = [volume for volume in self.volumes if volume.is_online(writing=True)]
        if work and not volumes:
            self.stats.add(pages_dropped_offline=len(work))
            work = []
        before: list[_Writing] = []
        for group in _groups(work, len(volumes)):
            # The last round may end early: the folders that can do with more pages come first.
            volumes.sort(key=Volume.pressure)
            placed = [group[start :: len(volumes)] for start in range(len(volumes))]
            started = [
                self._start_writing(volume, items, deadline)
                for volume, items in zip(volumes, placed, strict=True)
                if items
            ]
            self._finish_writing(before, deadline, done)
            before = started
        self._finish_writing(before, deadline, done)
        if share != WHOLE:  # used together with the shares of other ranks
            self._recency.note(namespace, [*prefix, *keys])
        if self._config.durability == "always":
            for volume in self.volumes:
                if volume.dirty and not volume.flush():
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
        """Read a share of pages, from files of whatever shares.

        False is a miss; the memory of that page then holds anything.

        Args:
            namespace: 16 bytes.
            keys: 32 bytes each.
            pages: The memory of the payload of the share (see :meth:`put`), of just that length.

        Raises:
            ValueError: Names of a wrong length, or no such share.
        """
        keys = list(keys)
        check_names(namespace, keys)
        check_share(share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        covers = cover(self.volumes, namespace, keys, share.eighths)
        reads: dict[Volume, list[PageRead]] = {}
        for number, pieces in enumerate(covers):
            memory = PageMemory(pages[number], share)
            for volume, entry, own in pieces:
                reads.setdefault(volume, []).append(PageRead(number, entry, memory, own))
        seconds = self._config.read_seconds
        deadline = time.monotonic() + seconds
        reading = [
            future
            for volume, files in reads.items()
            for future in volume.start_reading(files, deadline)
        ]
        wait(reading, seconds)
        came: Counter[int] = Counter()
        for future in reading:
            # A reading that has begun is waited for: the memory may not be given back before.
            if not future.cancel():
                came.update(result_of(future) or ())
        found = [0 < len(pieces) == came[number] for number, pieces in enumerate(covers)]
        hits = sum(found)
        self.stats.add(pages_read=hits, misses=len(keys) - hits)
        return found

    def check_room(self, page_bytes: int) -> None:
        """Say in the log which folders could hold no page of ``page_bytes``, were they empty."""
        for volume in self.volumes:
            volume.check_room(page_bytes)

    def drop(self, namespace: bytes) -> int:
        """Delete the pages of a namespace; returns how many files."""
        check_names(namespace, [])
        return sum(volume.drop(namespace) for volume in self.volumes)

    def drop_writer(self, writer: bytes) -> int:
        """Delete the pages of all namespaces that a server run wrote; returns how many files."""
        check_bytes("writer", writer, WRITER_BYTES)
        return sum(volume.drop(b"", writer) for volume in self.volumes)

    def flush(self) -> bool:
        """Bring everything that was put to the disks; False when a disk refused."""
        self._recency.save()
        flushed = [volume.flush() for volume in self.volumes]
        return all(flushed)

    def close(self) -> None:
        """Release what the store holds; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._stopping.set()
        for thread in self._caretakers:
            thread.join(_CLOSE_SECONDS)
        self._recency.save()
        for volume in self.volumes:
            if self._config.durability != "none" and volume.dirty:
                volume.flush()
            volume.close()

    def _attach_all(self) -> None:
        failures = []
        for volume in self.volumes:
            try:
                volume.attach(create=True)
            except NotOurFolderError:
                raise
            except OSError as error:
                failures.append((volume.path, error))
        if len(failures) == len(self.volumes):
            raise failures[0][1]
        for path, failure in failures:
            logger.warning("hcache: %s cannot be used for now: %s", path, failure)

    def _already_stored(self, namespace: bytes, keys: Sequence[bytes], share: Share) -> list[bool]:
        """Which pages need not be written again; their files are looked for, not only entries."""
        covers = cover(self.volumes, namespace, keys, share.eighths, Volume.holds_file)
        stored = [bool(pieces) for pieces in covers]
        self.stats.add(pages_already_stored=sum(stored))
        return stored

    def _start_writing(
        self, volume: Volume, items: Sequence[PageWrite], deadline: float
    ) -> _Writing:
        incoming = sum(item.layout.file_bytes for item in items)
        if volume.is_full(incoming):
            self._recency.save()  # so that what goes is what nobody used
            if not volume.make_room(incoming, deadline - time.monotonic()):
                self.stats.add(pages_dropped_full=len(items))
                return _Writing(volume, 0, [])
        return _Writing(volume, len(items), volume.start_writing(items, deadline))

    def _finish_writing(
        self, started: Sequence[_Writing], deadline: float, done: list[bool]
    ) -> None:
        """Wait for a group of pages and name them; ``done`` learns which are stored."""
        for volume, pages, writers in started:
            wait([writer.future for writer in writers], max(deadline - time.monotonic(), 0.0))
            tried = [written for writer in writers for written in volume.take(writer)]
            ready = [written for written in tried if written is not None]
            named = volume.commit(ready, deadline, self._recency.save) if ready else []
            for written, ok in zip(ready, named, strict=True):
                done[written.number] = ok
            if late := pages - len(tried):
                self.stats.add(pages_dropped_late=late)
                self._problems.report(
                    "late", f"{volume.path} is too slow; {late} pages were dropped"
                )


def _groups(work: Sequence[PageWrite], volumes: int) -> Iterator[list[PageWrite]]:
    group: list[PageWrite] = []
    size = 0
    for item in work:
        group.append(item)
        size += item.memory.length
        if size >= _GROUP_BYTES * volumes:
            yield group
            group, size = [], 0
    if group:
        yield group
