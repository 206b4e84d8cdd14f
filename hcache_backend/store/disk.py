"""The pages of one folder of the store while the server runs: the folder may fail, vanish, return.

The order of steps keeps every crash harmless. A write makes the file, then its entry in the index,
then its name. So a crash leaves a nameless file, which the next opening of the folder removes, or
an entry without file, which the next read removes. It never leaves a page file that nothing counts.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK, PageName, round_up
from hcache_backend.format.file import DamagedFileError
from hcache_backend.format.units import Eighths
from hcache_backend.store.eviction import broken_bound, evict, excess_bytes, margin, pressure
from hcache_backend.store.file_ops import FileOps, is_no_space
from hcache_backend.store.folder import Folder, descriptors_of_each, is_store_folder
from hcache_backend.store.index import Entry, is_damaged
from hcache_backend.store.page_files import (
    OtherSizeError,
    PageRead,
    PageWrite,
    delete_page,
    file_exists,
    give_name,
    read_page,
    remove_nameless,
    write_page,
)
from hcache_backend.store.stats import ProblemLog, StoreStats

logger = logging.getLogger("hcache.store")

_LOCK_SECONDS = 5.0
_ERRORS_IN_A_ROW = 8
_REST_SECONDS = 5.0
_EVICTIONS_IN_VAIN = 3
"""Evictions in a row that were no help; then there are no more, for others may take the space."""

_COUNTERS = {"read": "read_errors", "sync": "sync_errors", "delete": "evict_errors"}

_Result = TypeVar("_Result")


class OfflineError(OSError):
    """The folder is not there at the moment."""


class Writing(NamedTuple):
    """Pages that threads of a disk write: their number, and those that were written or failed."""

    pages: int
    tried: list[PageWrite]
    threads: list[Future[None]]


class Disk:
    """One folder and its pages. Any thread.

    If its reads fail again and again, it rests for some seconds, so that a dying disk does not hold
    up every request. If its writes fail, only writing rests: a disk that is full, or was made
    read-only, can be read. A folder that vanishes is let go of, and opened again when it is back.

    Attributes:
        dirty: Something was written since the last sync.
    """

    def __init__(
        self, path: Path, config: HCacheConfig, ops: FileOps, stats: StoreStats, log: ProblemLog
    ) -> None:
        self.path = path
        self._config, self._ops, self._stats, self._problems = config, ops, stats, log
        self._state = threading.Lock()
        self._folder: Folder | None = None
        self._errors_in_a_row = [0, 0]  # of reading and of writing; likewise:
        self._rest_until = [0.0, 0.0]
        self._index_is_broken = False
        self._had_own_device = False
        self._closed = False
        self._threads = self._config.io_threads
        self.readers = ThreadPoolExecutor(self._threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(self._threads, f"hcache-write-{path.name}")
        self.dirty = False
        self._evictions = 0  # because the disk had no space...
        self._in_vain = 0  # ...of which the last ones were no help

    # ---- the state of the disk ----

    def attach(self, *, create: bool) -> None:
        """Open the folder; an OSError if it cannot be used."""
        try:
            descriptors = descriptors_of_each(len(self._config.dirs))
            folder = Folder(self.path, self._ops, create=create, descriptors=descriptors)
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"its index: {error}", str(self.path)) from None
        with self._state:
            self._folder = folder
            folder.users = 1
            self._errors_in_a_row = [0, 0]
            self._rest_until = [0.0, 0.0]
            self._index_is_broken = False
        self._had_own_device = self.path.is_mount()
        if not folder.io.alignment.flags:
            logger.debug("hcache: %s has no direct I/O; reads and writes are buffered", self.path)

    def is_online(self, *, writing: bool = False) -> bool:
        """Whether it can be read, or written, now."""
        return self._folder is not None and not self._rests(writing)

    @contextmanager
    def use(self, *, writing: bool = False) -> Iterator[Folder]:
        """The open folder, which stays open while in use; OfflineError if it is not there."""
        with self._state:
            folder = self._folder
            if folder is None or self._rests(writing):
                raise OfflineError(errno.ENODEV, "the folder is offline", str(self.path))
            folder.users += 1
        try:
            yield folder
        finally:
            self._let_go(folder)

    def look_after(self) -> None:
        """Notice that the folder vanished or came back. Called now and then; never raises."""
        folder = self._folder
        if folder is not None and folder.is_in_place() and folder.index_file_is_gone():
            self._index_is_broken = True
        if folder is not None and self._index_is_broken:
            self._problems.report(
                "index", f"{self.path}: the index is damaged or gone; it is made anew"
            )
            try:
                folder.set_index_aside()
            except OSError as error:
                self._problems.report("index", f"{self.path}: {error}")
        if folder is not None and not folder.is_in_place():
            self._stats.add(folders_lost=1)
            self._problems.report(
                "vanished", f"{self.path} is not there any more; its pages are misses until it is"
            )
            self.detach()
        if self._folder is None and not self._closed:
            self._come_back()

    def detach(self) -> None:
        """Let go of the folder as soon as it is not in use."""
        with self._state:
            folder, self._folder = self._folder, None
        if folder is not None:
            self._let_go(folder)

    def close(self) -> None:
        """Let go for good."""
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        self._closed = True
        self.detach()

    def failed(self, what: str, error: Exception, *, writing: bool = False) -> None:
        """Log and count that the operation ``what`` failed, which read or wrote the folder."""
        self._problems.report(f"{what} {self.path}", f"{self.path}: {what} failed: {error}")
        if what in _COUNTERS:
            self._stats.add(**{_COUNTERS[what]: 1})
        if isinstance(error, sqlite3.Error):
            self._stats.add(index_errors=1)
        if is_damaged(error):
            self._index_is_broken = True
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return  # the process has too many files open: no fault of the disk
        self._errors_in_a_row[writing] += 1
        if self._errors_in_a_row[writing] >= _ERRORS_IN_A_ROW:
            self._errors_in_a_row[writing] = 0
            self._rest_until[writing] = time.monotonic() + _REST_SECONDS
            use = "written" if writing else "used"
            self._problems.report(
                f"rest {writing} {self.path}",
                f"{self.path} failed {_ERRORS_IN_A_ROW} times in a row; not {use} for "
                f"{_REST_SECONDS:.0f} s",
            )

    def _rests(self, writing: bool) -> bool:
        """Whether it is left alone for now. A disk that cannot be read is not written, either."""
        until = self._rest_until
        return time.monotonic() < (max(until[False], until[True]) if writing else until[False])

    def _come_back(self) -> None:
        # An empty folder may be the place where a disk is not mounted: only a folder that was
        # never a mount point, and that is missing altogether, is made anew.
        create = not self.path.exists() and not self._had_own_device
        if not create and not is_store_folder(self.path):
            return
        try:
            self.attach(create=create)
        except OSError as error:
            self._problems.report("offline", f"{self.path} cannot be used: {error}")
            return
        logger.info("hcache: %s works again", self.path)

    def _let_go(self, folder: Folder) -> None:
        with self._state:
            folder.users -= 1
            is_last = folder.users == 0
        if is_last:
            folder.close()

    def _ask(
        self,
        work: Callable[[Folder], _Result],
        otherwise: _Result,
        what: str = "use",
        *,
        writing: bool = False,
    ) -> _Result:
        """The result of ``work``; ``otherwise`` if the folder is away or fails."""
        try:
            with self.use(writing=writing) as folder:
                return work(folder)
        except OfflineError:
            return otherwise
        except TimeoutError as error:
            self._problems.report(f"lock {self.path}", f"{self.path}: {error}")
        except sqlite3.Error as error:
            self.failed("index", error, writing=writing)
        except OSError as error:
            self.failed(what, error, writing=writing)
        return otherwise

    def _ask_alone(self, work: Callable[[Folder], _Result], otherwise: _Result) -> _Result:
        """As :meth:`_ask`, with the folder's lock, to change it."""

        def alone(folder: Folder) -> _Result:
            with folder.lock.held(_LOCK_SECONDS):
                return work(folder)

        return self._ask(alone, otherwise, writing=True)

    # ---- what is there ----

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[Eighths]:
        """The part of every page that is here."""
        return self._ask(lambda folder: folder.index.coverage(namespace, keys), [0] * len(keys))

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The page files of every page that are here."""
        nothing: list[list[Entry]] = [[] for _ in keys]
        return self._ask(lambda folder: folder.index.lookup(namespace, keys), nothing)

    def holds_file(self, name: PageName) -> bool:
        """Whether a page file is really there."""
        return self._ask(lambda folder: file_exists(folder, name), False)

    def rank_range(self) -> tuple[int, int] | None:
        """The lowest and the highest eviction rank of its pages; None if there is no page."""
        return self._ask(lambda folder: folder.index.rank_range(), None)

    def raise_ranks(self, ranks: Mapping[PageName, int]) -> None:
        """Give pages higher eviction ranks; those that are not there are ignored."""
        self._ask_alone(lambda folder: folder.index.raise_ranks(ranks), None)

    # ---- reading ----

    def start_reading(self, reads: Sequence[PageRead], deadline: float) -> list[Future[list[int]]]:
        """Have threads read page files (see :func:`read_page`); they start none after ``deadline``.

        Their results are the numbers of the pages that came; the others are misses.
        """
        left = iter(reads)  # a thread takes the next one when it has done one
        work = partial(self._read_all, left, deadline)
        return [self._start(self.readers, work) for _ in reads[: self._threads]]

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> Future[_Result]:
        try:
            return pool.submit(work)
        except RuntimeError:  # the store was closed: the work finds that out, and counts it
            done: Future[_Result] = Future()
            done.set_result(work())
            return done

    def _read_all(self, reads: Iterator[PageRead], deadline: float) -> list[int]:
        came: list[int] = []
        payload = copied = 0
        with suppress(OfflineError), self.use() as folder:
            for read in reads:
                if time.monotonic() > deadline or not self.is_online():
                    break
                if (sizes := self._read(folder, read)) is not None:
                    came.append(read.number)
                    payload, copied = payload + sizes[0], copied + sizes[1]
        self._stats.add(bytes_read=payload, bytes_copied=copied)
        return came

    def _read(self, folder: Folder, read: PageRead) -> tuple[int, int] | None:
        """Read a page file; None is a miss."""
        try:
            sizes = read_page(folder, read)
        except FileNotFoundError:
            self._discard(read.entry, None)
        except DamagedFileError as error:
            self._discard(read.entry, error.status)
            self._stats.add(bad_pages=1)
            self._problems.report("damaged", f"{self.path}: a page is damaged ({error})")
        except OtherSizeError as error:
            self._problems.report("size", f"{self.path}: page not read: {error}")
        except OSError as error:
            self.failed("read", error)
        else:
            self._errors_in_a_row[False] = 0
            return sizes
        return None

    def _discard(self, entry: Entry, damaged: os.stat_result | None) -> None:
        """Take just this file of a page out, damaged or, without status of a file, missing."""
        name = entry.name

        def work(folder: Folder) -> None:
            known = folder.index.find(name)
            if known is None or known._replace(rank=entry.rank) != entry:
                return
            if damaged is None:
                gone = not file_exists(folder, name)
            else:
                gone = delete_page(folder, name, only=damaged)
            if gone:
                folder.index.remove([name])

        self._ask_alone(work, None)

    # ---- writing ----

    def start_writing(
        self, writes: Sequence[PageWrite], deadline: float, save_uses: Callable[[], None]
    ) -> Writing:
        """Have threads write shares to nameless files; they start none after ``deadline``.

        Before pages are evicted, uses are saved, so that those go that were not used.
        """
        incoming = sum(write.entry.file_bytes for write in writes)
        if self._ask(lambda folder: excess_bytes(folder, self._config, incoming) > 0, False):
            save_uses()
            if not self.make_room(incoming, deadline - time.monotonic()):
                self._stats.add(pages_dropped_full=len(writes))
                return Writing(0, [], [])
        tried: list[PageWrite] = []
        work = partial(self._write_all, iter(writes), deadline, tried)
        threads = [self._start(self.writers, work) for _ in writes[: self._threads]]
        return Writing(len(writes), tried, threads)

    def finish_writing(
        self, writing: Writing, deadline: float, save_uses: Callable[[], None]
    ) -> None:
        """Make pages of the files that were written by ``deadline``; these are then ``stored``.

        A file that is written later is removed.
        """
        pages, tried, threads = writing
        wait(threads, max(deadline - time.monotonic(), 0.0))
        late = [thread for thread in threads if not (thread.done() or thread.cancel())]
        taken = tried[:]

        def remove(_: Future[None]) -> None:
            for write in tried[len(taken) :]:
                self._ask(partial(remove_nameless, file=write.file), None, writing=True)

        for thread in threads:
            if thread in late:
                thread.add_done_callback(remove)
            elif not thread.cancelled():
                result_of(thread)
        if ready := [write for write in taken if write.file is not None]:
            self._commit(ready, deadline, save_uses)
        if missing := pages - len(taken):
            self._stats.add(pages_dropped_late=missing)
            self._problems.report("late", f"{self.path} is too slow; {missing} pages were dropped")

    def _commit(
        self, batch: Sequence[PageWrite], deadline: float, save_uses: Callable[[], None]
    ) -> None:
        size = sum(write.entry.file_bytes for write in batch)
        try:
            with self.use(writing=True) as folder:
                try:
                    for saved in (False, True):
                        with folder.lock.held(max(deadline - time.monotonic(), 0.0)):
                            if saved or not excess_bytes(folder, self._config, size, size):
                                self._enter(folder, batch)
                                break
                        save_uses()
                finally:
                    for write in batch:
                        if not write.stored:
                            remove_nameless(folder, write.file)
        except OfflineError:
            self._stats.add(pages_dropped_offline=len(batch))
        except TimeoutError as error:
            self._stats.add(pages_dropped_late=len(batch))
            self._problems.report("lock", f"{self.path}: {error}")
        except (OSError, sqlite3.Error) as error:
            self._not_written(error, sum(not write.stored for write in batch))

    def flush(self) -> bool:
        """Bring everything to the disk; False if it refused."""
        self.dirty = False

        def work(folder: Folder) -> bool:
            folder.ops.sync(folder.root_fd)
            self._stats.add(syncs=1)
            return True

        synced = self._ask(work, False, "sync", writing=True)
        self.dirty = self.dirty or not synced
        return synced

    def _write_all(
        self, writes: Iterator[PageWrite], deadline: float, tried: list[PageWrite]
    ) -> None:
        try:
            with self.use(writing=True) as folder:
                for write in writes:
                    if time.monotonic() > deadline:
                        return
                    self._write(folder, write, deadline)
                    tried.append(write)
        except OfflineError:
            dropped = list(writes)
            self._stats.add(pages_dropped_offline=len(dropped))
            tried += dropped

    def _write(self, folder: Folder, write: PageWrite, deadline: float) -> None:
        """Write a page to a nameless file, or count why not. :meth:`commit` names it."""
        if not self.is_online(writing=True):
            self._stats.add(pages_dropped_offline=1)
            return
        size = write.layout.file_bytes
        for tries_left in (2, 1, 0):  # another thread may take the room that was made
            evictions = self._evictions
            try:
                write_page(folder, write)
            except OSError as error:
                if tries_left and self._make_room_after(error, folder, size, evictions, deadline):
                    continue
                self._not_written(error, 1)
            else:
                self._in_vain = 0
                self._errors_in_a_row[True] = 0
            return

    def _not_written(self, error: Exception, pages: int) -> None:
        if is_no_space(error):  # a full disk works
            self._stats.add(pages_dropped_full=pages)
            full = f"{self.path} is full: {error}; new pages are not stored"
            self._problems.report(f"full {self.path}", full)
            return
        self._stats.add(write_errors=pages)
        self.failed("write", error, writing=True)

    def _enter(self, folder: Folder, batch: Sequence[PageWrite]) -> None:
        """Make room for a batch, and name it. The folder's lock is held."""
        fresh = []
        known = folder.index.known(write.entry.name for write in batch)
        for write in batch:
            if write.entry.name in known and file_exists(folder, write.entry.name):
                # Another process was faster.
                remove_nameless(folder, write.file)
                self._stats.add(pages_already_stored=1)
                write.stored = True
            else:
                fresh.append(write)
        incoming = sum(write.entry.file_bytes for write in fresh)
        # The files are on the disk already: only room in the quota is missing.
        if not self._evict_for(folder, incoming, on_disk=incoming):
            self._stats.add(pages_dropped_full=len(fresh))
            return
        failed = self._name(folder, fresh)
        refused = failed is not None and is_no_space(failed)
        if refused and self._evict_share(folder, incoming, self._evictions):
            failed = self._name(folder, [write for write in fresh if not write.stored])
        self.dirty = True
        named = [write.entry for write in fresh if write.stored]
        self._stats.add(
            pages_written=len(named),
            bytes_written=sum(entry.payload_bytes for entry in named),
            bytes_copied=sum(write.copied for write in batch),
        )
        if failed is not None:
            raise failed

    def _name(self, folder: Folder, batch: Sequence[PageWrite]) -> OSError | sqlite3.Error | None:
        """Enter and name the files of a batch; the reason if not all of them are pages now."""
        try:
            folder.index.insert(write.entry for write in batch)
        except sqlite3.Error as error:
            return error
        failed: OSError | None = None
        unnamed = []
        for write in batch:
            try:
                give_name(folder, write)
            except OSError as error:
                failed = error
                self._delete(folder, write.entry.name)
                unnamed.append(write.entry.name)
        if unnamed:
            folder.index.remove(unnamed)
        return failed

    # ---- room ----

    def pressure(self) -> tuple[int, int]:
        """Grows with the worth of the pages that a further one would drive out."""
        return self._ask(lambda folder: pressure(folder, self._config), (0, 0))

    def make_room(self, incoming: int, seconds: float) -> bool:
        """Evict what is needed for ``incoming`` bytes; False if there is no room."""

        def work(folder: Folder) -> bool:
            with folder.lock.held(seconds):
                return self._evict_for(folder, incoming)

        # An error comes again, and counts, when pages are written.
        return self._ask(work, True, writing=True)

    def check_room(self, page_bytes: int) -> None:
        """Say in the log if the folder could hold no page of this size, were it empty."""
        file_bytes = BLOCK + round_up(page_bytes)

        def work(folder: Folder) -> None:
            bound = broken_bound(folder, self._config, file_bytes, empty=True)
            if bound is not None:
                logger.warning("hcache: %s can hold no page: %s", self.path, bound)

        self._ask(work, None)

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the pages of a namespace (b"": of all), of any writer or one; returns how many."""

        def work(folder: Folder) -> int:
            entries = list(folder.index.entries(namespace))
            doomed = [entry.name for entry in entries if writer in (None, entry.writer)]
            dropped = 0
            for start in range(0, len(doomed), 256):
                with folder.lock.held(_LOCK_SECONDS):
                    some = doomed[start : start + 256]
                    gone = [name for name in some if self._delete(folder, name)]
                    folder.index.remove(gone)
                dropped += len(gone)
            return dropped

        return self._ask(work, 0, writing=True)

    def _make_room_after(
        self, error: OSError, folder: Folder, size: int, evictions: int, deadline: float
    ) -> bool:
        """Evict if the disk refused ``size`` bytes for want of space; whether to try again."""
        if is_no_space(error):
            with (
                suppress(OSError, sqlite3.Error),  # then the page is dropped
                folder.lock.held(max(deadline - time.monotonic(), 0.0)),
            ):
                return self._evict_share(folder, size, evictions)
        return False

    def _evict_share(self, folder: Folder, wanted: int, evictions: int) -> bool:
        """Evict the room that the disk refused; the folder's lock is held. False: that is no help.

        It had refused after ``evictions``: if there was one since then, that was it.
        """
        if self._evictions == evictions:
            if self._in_vain >= _EVICTIONS_IN_VAIN:
                return False
            self._in_vain += 1
            self._evictions += 1
            wanted = max(wanted, margin(folder.index.totals().bytes))
            evict(folder, wanted, self._stats, self._problems)
        return True

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

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            delete_page(folder, name)
        except OSError as error:
            self.failed("delete", error, writing=True)
            return False
        return True


def result_of(future: Future[_Result]) -> _Result | None:
    """The result of work that is done or soon will be; None if it raised."""
    try:
        return future.result()
    except Exception:
        # Who waits must not wait for ever; the page is a miss, or not stored.
        logger.exception("hcache: a job of the page store failed")
        return None
