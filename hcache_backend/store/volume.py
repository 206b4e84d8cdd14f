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

from hcache_backend.store.bounds import broken_bound, evict, excess_bytes, pressure
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import BLOCK, DamagedFileError, PageName, round_up
from hcache_backend.store.index import Entry
from hcache_backend.store.page_files import (
    OtherSizeError,
    PageRead,
    PageWrite,
    Subset,
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

    def start_reading(
        self, reads: Sequence[PageRead], wanted: Subset, deadline: float
    ) -> list[Future[list[int]]]:
        """Have threads read page files (see :func:`read_page`); they start none after ``deadline``.

        Their results are the numbers of the pages that came; what is missing is a miss.
        """
        left = iter(reads)  # a thread takes the next one when it has done one
        work = partial(self._read_all, left, wanted, deadline)
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

        return self._ask(work, True)  # what goes wrong does so again, and counts, when writing

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
            with self.use() as folder:
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
            self._stats.add(write_errors=done.count(False))
            self.failed("write", error)
        return done

    def take(self, writer: Writer) -> list[Written | None]:
        """What a thread has written by now; what it still writes is removed when it is done."""
        ended = writer.future.done() or writer.future.cancel()
        taken = writer.done[:]

        def remove(_: Future[None]) -> None:
            for written in writer.done[len(taken) :]:
                if written is not None:
                    self._ask(partial(remove_nameless, number=written.file), None)

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

    def _start(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> Future[_Result]:
        try:
            return pool.submit(work)
        except RuntimeError:  # the store was closed: the work finds that out, and counts it
            done: Future[_Result] = Future()
            done.set_result(work())
            return done

    def _read_all(self, reads: Iterator[PageRead], wanted: Subset, deadline: float) -> list[int]:
        """Read page files until there are no more; returns the numbers of the pages that came."""
        came: list[int] = []
        payload = copied = 0
        with suppress(OfflineError), self.use() as folder:
            for read in reads:
                if time.monotonic() > deadline or not self.is_online():
                    break
                if (sizes := self._read(folder, read, wanted)) is not None:
                    came.append(read.number)
                    payload, copied = payload + sizes[0], copied + sizes[1]
        self._stats.add(bytes_read=payload, bytes_copied=copied)
        return came

    def _read(self, folder: Folder, read: PageRead, wanted: Subset) -> tuple[int, int] | None:
        """Read a page file; None is a miss."""
        try:
            sizes = read_page(folder, read, wanted)
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
            with self.use() as folder:
                for write in writes:
                    if time.monotonic() > deadline:
                        return
                    done.append(self._write(folder, write))
        except OfflineError:
            dropped = [None for _ in writes]
            self._stats.add(pages_dropped_offline=len(dropped))
            done += dropped

    def _write(self, folder: Folder, write: PageWrite) -> Written | None:
        """Write a page to a nameless file; None when that fails. :meth:`commit` names it."""
        if not self.is_online():
            self._stats.add(pages_dropped_offline=1)
            return None
        try:
            written = write_page(folder, write, self._writer)
        except OSError as error:
            self._stats.add(write_errors=1)
            self.failed("write", error)
            return None
        self.worked()
        return written

    def _ask(self, work: Callable[[Folder], _Result], otherwise: _Result) -> _Result:
        try:
            with self.use() as folder:
                return work(folder)
        except OfflineError:
            return otherwise
        except TimeoutError as error:
            self._problems.report(f"lock {self.path}", f"{self.path}: {error}")
        except sqlite3.Error as error:
            self.failed("index", error)
        except OSError as error:
            self.failed("use", error)
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
        folder.index.insert(batch[number].entry for number in fresh)
        self.dirty = True
        failed: OSError | None = None
        unnamed = []
        for number in fresh:
            try:
                give_name(folder, batch[number])
                done[number] = True
            except OSError as error:
                failed = error
                name = batch[number].entry.name
                self._delete(folder, name)
                unnamed.append(name)
        self._stats.add(
            pages_written=len(fresh) - len(unnamed),
            bytes_written=sum(batch[i].entry.payload_bytes for i in fresh if done[i]),
            bytes_copied=sum(written.copied for written in batch),
        )
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

        self._ask(work, None)

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            delete_page(folder, name)
        except OSError as error:
            self._stats.add(evict_errors=1)
            self.failed("delete", error)
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
