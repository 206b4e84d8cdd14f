"""The pages of one folder of the store while the server runs.

The order of things keeps every crash harmless. Writing: file, then index, then the file's name. So
a crash leaves a nameless file (removed when the folder is opened next) or an entry without file
(removed when it is read next), never a page file that nobody counts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb

from hcache_backend.store.bounds import broken_bound, evict, excess_bytes, pressure
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import BLOCK, DamagedFileError, PageName, round_up
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import (
    OtherSizeError,
    Subset,
    Written,
    delete_page,
    file_exists,
    read_page,
    remove_nameless,
    write_page,
)
from hcache_backend.store.page_io import PageMemory
from hcache_backend.store.presence import OfflineError, Presence
from hcache_backend.store.stats import StoreContext
from hcache_backend.units import SegmentTable

logger = logging.getLogger("hcache.store")

_LOCK_SECONDS = 5.0

_Result = TypeVar("_Result")


class Volume(Presence):
    """One folder and its pages."""

    def __init__(self, path: Path, store: StoreContext) -> None:
        super().__init__(path, store)
        threads = store.config.io_threads
        self.readers = ThreadPoolExecutor(threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(threads, f"hcache-write-{path.name}")
        self.dirty = False

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """Bit mask of the eighths of every page that stand here."""
        nothing = [0] * len(keys)
        return self._ask(lambda folder: folder.index.coverage(namespace, keys), nothing)

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The page files of every page that stand here."""
        nothing: list[list[Entry]] = [[] for _ in keys]
        return self._ask(lambda folder: folder.index.lookup(namespace, keys), nothing)

    def holds_file(self, name: PageName) -> bool:
        """Whether a page file is really there."""
        return self._ask(lambda folder: file_exists(folder, name), False)

    def read(self, entry: Entry, memory: PageMemory, wanted: Subset, own: int) -> bool:
        """Read what is wanted of a page file (see :func:`read_page`); False is a miss."""
        try:
            with self.use() as folder:
                read, copied = read_page(folder, entry, memory, wanted, own)
        except OfflineError:
            return False
        except FileNotFoundError:
            self._discard(entry, None)
        except DamagedFileError as error:
            self._discard(entry, error.status)
            self._stats.add(bad_pages=1)
            self._problems.report("damaged", f"{self.path}: a page is damaged ({error})")
        except OtherSizeError as error:
            self._problems.report("size", f"{self.path}: page not read: {error}")
        except OSError as error:
            self._stats.add(read_errors=1)
            self.failed("read", error)
        else:
            self.worked()
            self._stats.add(bytes_read=read, bytes_copied=copied)
            return True
        return False

    def write(
        self, name: PageName, memory: PageMemory, table: SegmentTable, stamp: int
    ) -> Written | None:
        """Write a share to a nameless file; None when that fails. :meth:`commit` names it."""
        try:
            with self.use() as folder:
                written = write_page(folder, name, self._writer, memory, table, stamp)
        except OfflineError:
            self._stats.add(pages_dropped_offline=1)
            return None
        except OSError as error:
            self._stats.add(write_errors=1)
            self.failed("write", error)
            return None
        self.worked()
        self._stats.add(bytes_copied=written.copied)
        return written

    def start(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> Future[_Result]:
        """Have a thread of ``pool`` (the readers or the writers) do ``work``."""
        try:
            return pool.submit(work)
        except RuntimeError:  # the store was closed: the work finds that out, and counts it
            done: Future[_Result] = Future()
            done.set_result(work())
            return done

    def pressure(self) -> tuple[int, int]:
        """What grows with the worth of what a further page would drive out; see :mod:`.bounds`."""
        return self._ask(lambda folder: pressure(folder, self._config), (0, 0))

    def is_full(self, incoming: int) -> bool:
        """Whether ``incoming`` bytes have room only when others go."""
        return self._ask(lambda folder: excess_bytes(folder, self._config, incoming) > 0, False)

    def make_room(self, incoming: int, seconds: float) -> bool:
        """Evict what is needed for ``incoming`` bytes; False when there is no room."""

        def work(folder: Folder) -> bool:
            with folder.lock.held(seconds):
                return self._evict_for(folder, incoming)

        # What goes wrong here goes wrong again, and is counted, when the pages are written.
        return self._ask(work, True)

    def check_room(self, page_bytes: int) -> None:
        """Say in the log when the folder could hold no page of this size, were it empty."""
        file_bytes = BLOCK + round_up(page_bytes)

        def work(folder: Folder) -> None:
            bound = broken_bound(folder, self._config, file_bytes, empty=True)
            if bound is not None:
                logger.warning("hcache: %s can hold no page: %s", self.path, bound)

        self._ask(work, None)

    def commit(self, batch: Sequence[Written], seconds: float) -> list[bool]:
        """Make pages of nameless files, False for one that failed."""
        done = [False] * len(batch)
        try:
            with self.use() as folder:
                try:
                    with folder.lock.held(seconds):
                        self._commit(folder, batch, done)
                finally:
                    for written, ok in zip(batch, done, strict=True):
                        if not ok:
                            remove_nameless(folder, written.number)
        except OfflineError:
            self._stats.add(pages_dropped_offline=len(batch))
        except TimeoutError as error:
            self._stats.add(pages_dropped_late=len(batch))
            self._problems.report("lock", f"{self.path}: {error}")
        except (OSError, lmdb.Error) as error:
            self._stats.add(write_errors=done.count(False))
            self.failed("write", error)
        return done

    def abandon(self, writing: Future[Written | None]) -> None:
        """Have a page that nobody waits for not written, or its nameless file removed."""

        def remove(future: Future[Written | None]) -> None:
            written = result_of(future)
            if written is not None:
                self._ask(lambda folder: remove_nameless(folder, written.number), None)

        if not writing.cancel():
            writing.add_done_callback(remove)

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the pages of a namespace (those of one writer); returns how many."""

        def work(folder: Folder) -> int:
            dropped = 0
            doomed = [
                entry.name
                for entry in folder.index.entries(namespace)
                if writer is None or entry.writer == writer
            ]
            for start in range(0, len(doomed), 256):
                with folder.lock.held(_LOCK_SECONDS):
                    gone = [
                        name for name in doomed[start : start + 256] if self._delete(folder, name)
                    ]
                    folder.index.remove(gone)
                dropped += len(gone)
            return dropped

        return self._ask(work, 0)

    def flush(self) -> bool:
        """Bring everything to the disk; False when it refused."""
        self.dirty = False
        try:
            with self.use() as folder:
                folder.ops.sync(folder.root_fd)
        except OSError as error:
            self.dirty = True
            self._stats.add(sync_errors=1)
            self.failed("sync", error)
            return False
        self._stats.add(syncs=1)
        return True

    def oldest_stamp(self) -> int | None:
        """When the least recently used page was used; None where there is no page."""
        return self._ask(lambda folder: folder.index.oldest_stamp(), None)

    def set_stamps(self, stamps: Mapping[PageName, int]) -> None:
        """Tell the index when pages were used; those that are not there are ignored."""

        def work(folder: Folder) -> None:
            with folder.lock.held(_LOCK_SECONDS):
                folder.index.touch(stamps)

        self._ask(work, None)

    def close(self) -> None:
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        super().close()

    def _ask(self, work: Callable[[Folder], _Result], otherwise: _Result) -> _Result:
        try:
            with self.use() as folder:
                return work(folder)
        except OfflineError:
            return otherwise
        except TimeoutError as error:
            self._problems.report(f"lock {self.path}", f"{self.path}: {error}")
        except lmdb.Error as error:
            self.failed("index", error)
        except OSError as error:
            self.failed("use", error)
        return otherwise

    def _commit(self, folder: Folder, batch: Sequence[Written], done: list[bool]) -> None:
        fresh = []
        for number, written in enumerate(batch):
            name = written.entry.name
            if folder.index.find(name) is not None and file_exists(folder, name):
                # Another process was faster.
                remove_nameless(folder, written.number)
                self._stats.add(pages_already_stored=1)
                done[number] = True
            else:
                fresh.append(number)
        incoming = sum(batch[number].entry.file_bytes for number in fresh)
        # The files are on the disk already: what is missing is only room in the quota.
        if not self._evict_for(folder, incoming, on_disk=incoming):
            self._stats.add(pages_dropped_full=len(fresh))
            return
        folder.index.insert(batch[number].entry for number in fresh)
        self.dirty = True
        failed: OSError | None = None
        unnamed = []
        for number in fresh:
            try:
                _give_name(folder, batch[number])
                done[number] = True
            except OSError as error:
                failed = error
                name = batch[number].entry.name
                self._delete(folder, name)
                unnamed.append(name)
        written_bytes = sum(batch[i].entry.payload_bytes for i in fresh if done[i])
        self._stats.add(pages_written=len(fresh) - len(unnamed), bytes_written=written_bytes)
        if failed is not None:
            folder.index.remove(unnamed)
            raise failed

    def _evict_for(self, folder: Folder, incoming: int, on_disk: int = 0) -> bool:
        """Make room; the folder's lock is held."""
        excess = excess_bytes(folder, self._config, incoming, on_disk)
        if excess:
            evict(folder, excess, self._stats, self._problems)
        bound = broken_bound(folder, self._config, incoming, on_disk)
        if bound is not None:
            full = f"{self.path} is full: {bound}; new pages are not stored"
            self._problems.report(f"full {self.path}", full)
        return bound is None

    def _discard(self, entry: Entry, damaged: os.stat_result | None) -> None:
        """Take a page out that is damaged or, without status of a file, missing.

        Another file that stands there by now stays.
        """
        name = entry.name

        def work(folder: Folder) -> None:
            with folder.lock.held(_LOCK_SECONDS):
                known = folder.index.find(name)
                if known is None or known._replace(stamp=entry.stamp) != entry:
                    return
                if damaged is None:
                    gone = not file_exists(folder, name)
                else:
                    gone = delete_page(folder, name, only=damaged)
                if gone:
                    folder.index.remove([name])

        self._ask(work, None)

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            delete_page(folder, name)
        except OSError as error:
            self._stats.add(evict_errors=1)
            self.failed("delete", error)
            return False
        return True


class Piece(NamedTuple):
    """A page file, and the eighths that no other piece of the page is there for (bit mask)."""

    volume: Volume
    entry: Entry
    eighths: int


def cover(
    volumes: Sequence[Volume],
    namespace: bytes,
    keys: Sequence[bytes],
    eighths: int,
    counts: Callable[[Volume, PageName], bool] = lambda volume, name: True,
) -> list[list[Piece]]:
    """For every page the files that together have ``eighths``; none where some are missing.

    Files of large shares are taken before those of small ones, so that few files are read. A file
    that ``counts`` denies is not taken.
    """
    missing = [eighths] * len(keys)
    found: list[list[Piece]] = [[] for _ in keys]
    for volume in volumes:
        numbers = [number for number, mask in enumerate(missing) if mask]
        if not numbers:
            break
        listed = volume.lookup(namespace, [keys[number] for number in numbers])
        for number, entries in zip(numbers, listed, strict=True):
            for entry in sorted(entries, key=lambda entry: entry.name.share.of):
                useful = entry.name.share.eighths & missing[number]
                if useful and counts(volume, entry.name):
                    found[number].append(Piece(volume, entry, useful))
                    missing[number] &= ~useful
    return [[] if mask else pieces for mask, pieces in zip(missing, found, strict=True)]


def result_of(future: Future[_Result]) -> _Result | None:
    """The result of work that is done or soon will be; None when it raised."""
    try:
        return future.result()
    except Exception:
        # Whoever waits must not wait for ever; the page is a miss, or not stored.
        logger.exception("hcache: a job of the page store failed")
        return None


def _give_name(folder: Folder, written: Written) -> None:
    name = written.entry.name
    with folder.shard(name.shard, make=True) as shard_fd:
        source_fd, source = folder.session.place(written.number)
        folder.ops.rename(source, source_fd, name.file, shard_fd)
