"""The page store: pages over any number of folders, one for each disk.

Pages that follow each other in a sequence go to the folders in turn, so that reading one
conversation back uses all disks at once. A folder that fails or vanishes costs its own pages only.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hcache_backend.config import HCacheConfig
from hcache_backend.store.base import (
    WHOLE,
    PageStore,
    Parts,
    SegmentTable,
    Share,
    StoreStats,
    Subset,
)
from hcache_backend.store.batch import Batch
from hcache_backend.store.caretaker import Caretaker
from hcache_backend.store.cover import cover
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import NotOurFolderError
from hcache_backend.store.format import check_names, check_share, check_writer, file_layout
from hcache_backend.store.index import Record
from hcache_backend.store.kvikio_ops import best_file_ops
from hcache_backend.store.page_files import Wanted, Written
from hcache_backend.store.page_io import PageMemory
from hcache_backend.store.problems import ProblemLog
from hcache_backend.store.volume import Volume

logger = logging.getLogger("hcache.store")

_GROUP_BYTES = 512 << 20
"""Pages are named in groups of about this size per folder, the next group being written meanwhile.

Naming a group syncs the index, which holds up the disk; so groups are large. Two of them at most
stand on a disk without being counted in its quota.
"""

_CLOSE_SECONDS = 10.0


class _Write(NamedTuple):
    """A page on its way to a folder; ``number`` is its place in the caller's lists."""

    number: int
    key: bytes
    memory: PageMemory
    table: SegmentTable

    @property
    def file_bytes(self) -> int:
        return file_layout(self.table, self.memory.share).file_bytes


class _Read(NamedTuple):
    """A page file on its way to memory."""

    number: int
    key: bytes
    record: Record
    memory: PageMemory
    wanted: Wanted


class StripedPageStore(PageStore):
    """Pages in ``config.dirs``.

    Args:
        config: The options.
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
        check_writer(writer)
        self.stats = StoreStats()
        self._config = config
        self._lasting = config.durability == "always"
        self._turn = itertools.count(int.from_bytes(os.urandom(2), "little"))
        self._turn_lock = threading.Lock()
        self._problems = ProblemLog()
        self._closed = False
        ops = ops or best_file_ops(config.reader)
        self.volumes = [
            Volume(path, config, writer, ops, self.stats, self._problems) for path in config.dirs
        ]
        try:
            self._attach_all()
        except BaseException:
            for volume in self.volumes:
                volume.close()
            raise
        self._caretakers = (
            [Caretaker(volume, config) for volume in self.volumes] if background else []
        )

    def exists(
        self, namespace: bytes, keys: Sequence[bytes], *, share: Share = WHOLE
    ) -> list[bool]:
        keys = list(keys)
        check_names(namespace, keys)
        check_share(share)
        missing = [share.eighths] * len(keys)
        for volume in self.volumes:
            numbers = [number for number, mask in enumerate(missing) if mask]
            if not numbers:
                break
            masks = volume.coverage(namespace, [keys[number] for number in numbers])
            for number, mask in zip(numbers, masks, strict=True):
                missing[number] &= ~mask
        return [not mask for mask in missing]

    def put(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        share: Share = WHOLE,
        table: SegmentTable | None = None,
    ) -> list[bool]:
        keys = list(keys)
        check_names(namespace, keys)
        check_share(share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        deadline = time.monotonic() + self._config.write_seconds
        done = self._already_stored(namespace, keys, share)
        work = []
        for number, (key, parts) in enumerate(zip(keys, pages, strict=True)):
            if not done[number]:
                work.append(_write(number, key, parts, table, share))
        volumes = self._writable()
        if work and not volumes:
            self.stats.add(pages_dropped_offline=len(work))
            work = []
        start = self._next_turn(len(work))
        before: Callable[[], None] | None = None
        for group in _groups(work, len(volumes)):
            placed: dict[int, list[_Write]] = {}
            for item in group:
                # By its place in the sequence, so that what is stored already keeps its turn.
                placed.setdefault((start + item.number) % len(volumes), []).append(item)
            placed_on = [(volumes[place], items) for place, items in placed.items()]
            finish = self._begin(namespace, placed_on, deadline, done)
            if before is not None:
                before()
            before = finish
        if before is not None:
            before()
        if self._lasting:
            self._make_lasting(done)
        return done

    def get(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        *,
        subset: Subset | None = None,
        share: Share = WHOLE,
    ) -> list[bool]:
        keys = list(keys)
        check_names(namespace, keys)
        check_share(share)
        if len(pages) != len(keys):
            raise ValueError(f"{len(pages)} pages for {len(keys)} keys")
        plan = self._plan(namespace, keys, pages, subset or Subset(), share)
        planned = {item.number for items in plan.values() for item in items}
        found = [number in planned for number in range(len(keys))]
        batches = []
        for place, items in plan.items():
            batch = self._start_reading(self.volumes[place], namespace, items)
            batches.append((items, batch))
        deadline = time.monotonic() + self._config.read_seconds
        for items, batch in batches:
            results = batch.wait(deadline - time.monotonic(), running=True)
            for item, ok in zip(items, results, strict=True):
                found[item.number] = found[item.number] and bool(ok)
        hits = sum(found)
        self.stats.add(pages_read=hits, misses=len(keys) - hits)
        return found

    def drop_writer(self, namespace: bytes, writer: bytes) -> int:
        check_names(namespace, [])
        check_writer(writer)
        return sum(volume.drop(namespace, writer) for volume in self.volumes)

    def clear(self, namespace: bytes) -> None:
        check_names(namespace, [])
        for volume in self.volumes:
            volume.drop(namespace)

    def flush(self) -> bool:
        flushed = [volume.flush() for volume in self.volumes]
        return all(flushed)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for caretaker in self._caretakers:
            caretaker.stop(_CLOSE_SECONDS)
        for volume in self.volumes:
            if self._config.durability != "none" and volume.dirty:
                volume.flush()
            volume.close()

    def look_after(self) -> None:
        """Notice folders that vanished or came back; done in the background when that is on."""
        for volume in self.volumes:
            volume.look_after()

    # ---- internals ----

    def _attach_all(self) -> None:
        failures = []
        for volume in self.volumes:
            try:
                volume.attach(create=True)
            except NotOurFolderError:
                raise
            except OSError as error:
                failures.append(error)
                logger.warning("hcache: %s cannot be used for now: %s", volume.path, error)
        if len(failures) == len(self.volumes):
            raise failures[0]

    def _already_stored(self, namespace: bytes, keys: Sequence[bytes], share: Share) -> list[bool]:
        """Which pages need not be written again; their files are looked for, not only entries."""
        covers = cover(self.volumes, namespace, keys, share.eighths, Volume.holds_file)
        for key, pieces in zip(keys, covers, strict=True):
            for piece in pieces:
                self.volumes[piece.place].touch((namespace, key, piece.record.share))
        stored = [bool(pieces) for pieces in covers]
        self.stats.add(pages_already_stored=sum(stored))
        return stored

    def _writable(self) -> list[Volume]:
        return [volume for volume in self.volumes if volume.is_online()]

    def _next_turn(self, count: int) -> int:
        """Where this batch begins in the round of folders: where the one before ended."""
        with self._turn_lock:
            start = next(self._turn)
            self._turn = itertools.count(start + max(count, 1))
            return start

    def _begin(
        self,
        namespace: bytes,
        placed: Sequence[tuple[Volume, list[_Write]]],
        deadline: float,
        done: list[bool],
    ) -> Callable[[], None]:
        """Start writing a group; what is returned waits for it and names the pages."""
        started: list[tuple[Volume, list[_Write], Batch[_Write, Written | None]]] = []
        for volume, items in placed:
            incoming = sum(item.file_bytes for item in items)
            if not volume.make_room(incoming, deadline - time.monotonic()):
                self.stats.add(pages_dropped_full=len(items))
                self._problems.report("full", f"{volume.path} is full; pages are not stored")
                continue

            def work(item: _Write, volume: Volume = volume) -> Written | None:
                return volume.write(namespace, item.key, item.memory, item.table)

            batch = Batch(items, work, volume.abandon)
            batch.start(volume.writers, self._config.io_threads)
            started.append((volume, items, batch))

        def finish() -> None:
            for volume, items, batch in started:
                results = batch.wait(deadline - time.monotonic())
                ready = [
                    (item.number, written)
                    for item, written in zip(items, results, strict=True)
                    if written is not None
                ]
                late = max(deadline - time.monotonic(), 0.0)
                named = volume.commit([written for _, written in ready], late) if ready else []
                for (number, _), ok in zip(ready, named, strict=True):
                    done[number] = ok
                if batch.left_undone:
                    self.stats.add(pages_dropped_late=batch.left_undone)
                    self._problems.report(
                        "late", f"{volume.path} is too slow; {batch.left_undone} pages were dropped"
                    )

        return finish

    def _make_lasting(self, done: list[bool]) -> None:
        for volume in self.volumes:
            if volume.dirty and not volume.flush():
                done[:] = [False] * len(done)

    def _plan(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        pages: Sequence[Parts],
        subset: Subset,
        share: Share,
    ) -> dict[int, list[_Read]]:
        """Which page files to read, by folder; pages that are not there are left out."""
        plan: dict[int, list[_Read]] = {}
        covers = cover(self.volumes, namespace, keys, subset.eighths & share.eighths)
        for number, pieces in enumerate(covers):
            memory = PageMemory(pages[number], share)
            for order, (place, record, eighths) in enumerate(pieces):
                # What every share repeats comes from one file: two would race for its memory.
                wanted = Wanted(subset.segments, eighths, undivided=order == 0)
                item = _Read(number, keys[number], record, memory, wanted)
                plan.setdefault(place, []).append(item)
        return plan

    def _start_reading(
        self, volume: Volume, namespace: bytes, items: list[_Read]
    ) -> Batch[_Read, bool]:
        def work(item: _Read) -> bool:
            return volume.read(namespace, item.key, item.record, item.memory, item.wanted)

        batch = Batch(items, work)
        batch.start(volume.readers, self._config.io_threads)
        return batch


def open_store(config: HCacheConfig, writer: bytes) -> PageStore:
    """The page store of a server run.

    Args:
        config: The options; the folders are made when missing.
        writer: The server run, 8 bytes.

    Raises:
        NotOurFolderError: A folder is in use for something else.
        OSError: None of the folders can be used.
    """
    return StripedPageStore(config, writer)


def _write(
    number: int, key: bytes, parts: Parts, table: SegmentTable | None, share: Share
) -> _Write:
    memory = PageMemory(parts, share)
    if table is None:
        if share != WHOLE:
            raise ValueError(f"share {share.number} of {share.of} without a table of the page")
        table = SegmentTable.of_parts(parts)
    payload_bytes = file_layout(table, share).payload_bytes
    if payload_bytes != memory.length:
        raise ValueError(
            f"memory of {memory.length} bytes for share {share.number} of {share.of} of a page; "
            f"by its table it has {payload_bytes}"
        )
    return _Write(number, key, memory, table)


def _groups(work: Sequence[_Write], volumes: int) -> Iterator[list[_Write]]:
    group: list[_Write] = []
    size = 0
    for item in work:
        group.append(item)
        size += item.memory.length
        if size >= _GROUP_BYTES * volumes:
            yield group
            group, size = [], 0
    if group:
        yield group
