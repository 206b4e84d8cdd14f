"""The pages of one folder of the store while the server runs.

The order of things keeps every crash harmless. Writing: file, then index, then the file's name. So
a crash leaves a nameless file (removed when the folder is opened next) or an entry without file
(removed when it is read next), never a page file that nobody counts.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from hcache_backend.format.envelope import BLOCK, PageName, round_up
from hcache_backend.format.file import DamagedFileError
from hcache_backend.store.bounds import broken_bound, evict, excess_bytes, pressure
from hcache_backend.store.file_ops import is_no_space
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import (
    OtherSizeError,
    PageRead,
    PageWrite,
    Written,
    delete_page,
    file_exists,
    give_name,
    read_page,
    remove_nameless,
    write_page,
)
from hcache_backend.store.presence import OfflineError, Presence
from hcache_backend.store.stats import StoreContext

logger = logging.getLogger("hcache.store")

_LOCK_SECONDS = 5.0
_EVICTIONS_IN_VAIN = 3
"""Others may want the space, too: after so many evictions that were no help there are no more."""

_Result = TypeVar("_Result")


class Writer(NamedTuple):
    """A thread that writes pages; ``done`` has each that is written, None for one that failed."""

    future: Future[None]
    done: list[Written | None]


class Volume(Presence):
    """One folder and its pages."""

    def __init__(self, path: Path, store: StoreContext) -> None:
        super().__init__(path, store)
        self._threads = store.config.io_threads
        self.readers = ThreadPoolExecutor(self._threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(self._threads, f"hcache-write-{path.name}")
        self.dirty = False
        self._evictions = 0  # because the disk had no space...
        self._in_vain = 0  # ...of which the last ones were no help

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

    def start_reading(self, reads: Sequence[PageRead], deadline: float) -> list[Future[list[int]]]:
        """Have threads read page files (see :func:`read_page`); they start none after ``deadline``.

        Their results are the numbers of the pages that came; what is missing is a miss.
        """
        left = iter(reads)  # a thread takes the next one when it has done one
        work = partial(self._read_all, left, deadline)
        return [self._start(self.readers, work) for _ in reads[: self._threads]]

    def start_writing(self, writes: Sequence[PageWrite], deadline: float) -> list[Writer]:
        """Have threads write shares to nameless files; they start none after ``deadline``."""
        left = iter(writes)
        started = []
        for _ in writes[: self._threads]:
            done: list[Written | None] = []
            work = partial(self._write_all, left, deadline, done)
            started.append(Writer(self._start(self.writers, work), done))
        return started

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

        # What goes wrong does so again, and counts, when writing.
        return self._ask(work, True, writing=True)

    def check_room(self, page_bytes: int) -> None:
        """Say in the log when the folder could hold no page of this size, were it empty."""
        file_bytes = BLOCK + round_up(page_bytes)

        def work(folder: Folder) -> None:
            bound = broken_bound(folder, self._config, file_bytes, empty=True)
            if bound is not None:
                logger.warning("hcache: %s can hold no page: %s", self.path, bound)

        self._ask(work, None)

    def commit(
        self, batch: Sequence[Written], deadline: float, save_uses: Callable[[], None]
    ) -> list[bool]:
        """Make pages of nameless files, False for one that failed.

        Before others are evicted, uses are saved, so that what goes is what nobody used.
        """
        done = [False] * len(batch)
        size = sum(written.entry.file_bytes for written in batch)
        try:
            with self.use(writing=True) as folder:
                try:
                    for saved in (False, True):
                        with folder.lock.held(max(deadline - time.monotonic(), 0.0)):
                            if saved or not excess_bytes(folder, self._config, size, size):
                                self._commit(folder, batch, done)
                                break
                        save_uses()
                finally:
                    for written, ok in zip(batch, done, strict=True):
                        if not ok:
                            remove_nameless(folder, written.file)
        except OfflineError:
            self._stats.add(pages_dropped_offline=len(batch))
        except TimeoutError as error:
            self._stats.add(pages_dropped_late=len(batch))
            self._problems.report("lock", f"{self.path}: {error}")
        except (OSError, sqlite3.Error) as error:
            self._not_written(error, done.count(False))
        return done

    def take(self, writer: Writer) -> list[Written | None]:
        """What a thread has written by now; what it still writes is removed when it is done."""
        ended = writer.future.done() or writer.future.cancel()
        taken = writer.done[:]

        def remove(_: Future[None]) -> None:
            for written in writer.done[len(taken) :]:
                if written is not None:
                    self._ask(partial(remove_nameless, number=written.file), None, writing=True)

        if not ended:
            writer.future.add_done_callback(remove)
        elif not writer.future.cancelled():
            result_of(writer.future)
        return taken

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the pages of a namespace (b"": of all), of any writer or one; returns how many."""

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

        return self._ask(work, 0, writing=True)

    def flush(self) -> bool:
        """Bring everything to the disk; False when it refused."""
        self.dirty = False
        try:
            with self.use(writing=True) as folder:
                folder.ops.sync(folder.root_fd)
        except OfflineError:
            self.dirty = True
            return False
        except OSError as error:
            self.dirty = True
            self._stats.add(sync_errors=1)
            self.failed("sync", error, writing=True)
            return False
        self._stats.add(syncs=1)
        return True

    def stamps(self) -> tuple[int, int] | None:
        """The stamps of the least and the most recently used page; None: there is no page."""
        return self._ask(lambda folder: folder.index.stamps(), None)

    def set_stamps(self, stamps: Mapping[PageName, int]) -> None:
        """Tell the index when pages were used; those that are not there are ignored."""

        def work(folder: Folder) -> None:
            with folder.lock.held(_LOCK_SECONDS):
                folder.index.touch(stamps)

        self._ask(work, None, writing=True)

    def close(self) -> None:
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        super().close()

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> Future[_Result]:
        try:
            return pool.submit(work)
        except RuntimeError:  # the store was closed: the work finds that out, and counts it
            done: Future[_Result] = Future()
            done.set_result(work())
            return done

    def _read_all(self, reads: Iterator[PageRead], deadline: float) -> list[int]:
        """Read page files until there are no more; returns the numbers of the pages that came."""
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
            self._stats.add(read_errors=1)
            self.failed("read", error)
        else:
            self.worked()
            return sizes
        return None

    def _write_all(
        self, writes: Iterator[PageWrite], deadline: float, done: list[Written | None]
    ) -> None:
        """Write pages until there are no more; ``done`` learns of each, None: it failed."""
        try:
            with self.use(writing=True) as folder:
                for write in writes:
                    if time.monotonic() > deadline:
                        return
                    done.append(self._write(folder, write, deadline))
        except OfflineError:
            dropped = [None for _ in writes]
            self._stats.add(pages_dropped_offline=len(dropped))
            done += dropped

    def _write(self, folder: Folder, write: PageWrite, deadline: float) -> Written | None:
        """Write a page to a nameless file; None when that fails. :meth:`commit` names it."""
        if not self.is_online(writing=True):
            self._stats.add(pages_dropped_offline=1)
            return None
        for is_last in (False, False, True):  # another thread may take the room that was made
            evictions = self._evictions
            try:
                written = write_page(folder, write, self._writer)
            except OSError as error:
                size = write.layout.file_bytes
                if not is_last and self._make_room_after(error, folder, size, evictions, deadline):
                    continue
                self._not_written(error, 1)
                return None
            self._in_vain = 0
            self.worked(writing=True)
            return written
        raise AssertionError("unreachable")

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
        """Evict what the disk refused room for; the folder's lock is held. False: that is no help.

        It had refused after so many ``evictions``: if there was one since then, that was it.
        """
        if self._evictions == evictions:
            if self._in_vain >= _EVICTIONS_IN_VAIN:
                return False
            self._in_vain += 1
            self._evictions += 1
            share = self._config.high_water - self._config.low_water
            wanted = max(wanted, int(share * folder.index.totals().bytes))
            evict(folder, wanted, self._stats, self._problems)
        return True

    def _not_written(self, error: Exception, pages: int) -> None:
        if is_no_space(error):  # a full disk works
            self._stats.add(pages_dropped_full=pages)
            full = f"{self.path} is full: {error}; new pages are not stored"
            self._problems.report(f"full {self.path}", full)
            return
        self._stats.add(write_errors=pages)
        self.failed("write", error, writing=True)

    def _ask(
        self, work: Callable[[Folder], _Result], otherwise: _Result, *, writing: bool = False
    ) -> _Result:
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
            self.failed("use", error, writing=writing)
        return otherwise

    def _commit(self, folder: Folder, batch: Sequence[Written], done: list[bool]) -> None:
        fresh = []
        known = folder.index.known(written.entry.name for written in batch)
        for number, written in enumerate(batch):
            name = written.entry.name
            if name in known and file_exists(folder, name):
                # Another process was faster.
                remove_nameless(folder, written.file)
                self._stats.add(pages_already_stored=1)
                done[number] = True
            else:
                fresh.append(number)
        incoming = sum(batch[number].entry.file_bytes for number in fresh)
        # The files are on the disk already: what is missing is only room in the quota.
        if not self._evict_for(folder, incoming, on_disk=incoming):
            self._stats.add(pages_dropped_full=len(fresh))
            return

        failed = self._name(folder, batch, fresh, done)
        refused = failed is not None and is_no_space(failed)
        if refused and self._evict_share(folder, incoming, self._evictions):
            failed = self._name(folder, batch, [n for n in fresh if not done[n]], done)
        self.dirty = True
        named = [batch[number] for number in fresh if done[number]]
        self._stats.add(
            pages_written=len(named),
            bytes_written=sum(written.entry.payload_bytes for written in named),
            bytes_copied=sum(written.copied for written in batch),
        )
        if failed is not None:
            raise failed

    def _name(
        self, folder: Folder, batch: Sequence[Written], numbers: Sequence[int], done: list[bool]
    ) -> OSError | sqlite3.Error | None:
        """Make pages of some files of a batch; why not of all of them, or None."""
        try:
            folder.index.insert(batch[number].entry for number in numbers)
        except sqlite3.Error as error:
            return error
        failed: OSError | None = None
        unnamed = []
        for number in numbers:
            try:
                give_name(folder, batch[number])
                done[number] = True
            except OSError as error:
                failed = error
                name = batch[number].entry.name
                self._delete(folder, name)
                unnamed.append(name)
        if unnamed:
            folder.index.remove(unnamed)
        return failed

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
        """Take just this file of a page out, damaged or, without status of a file, missing."""
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

        self._ask(work, None, writing=True)

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            delete_page(folder, name)
        except OSError as error:
            self._stats.add(evict_errors=1)
            self.failed("delete", error, writing=True)
            return False
        return True


def result_of(future: Future[_Result]) -> _Result | None:
    """The result of work that is done or soon will be; None when it raised."""
    try:
        return future.result()
    except Exception:
        # Whoever waits must not wait for ever; the page is a miss, or not stored.
        logger.exception("hcache: a job of the page store failed")
        return None
