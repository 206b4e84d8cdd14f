"""The pages of one folder of the store while the server runs.

The order of things keeps every crash harmless. Writing: file, then index, then the file's name. So
a crash leaves a nameless file (removed when the folder is opened next) or an entry without file
(removed when it is read next), never a page file that nobody counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple, Unpack

import lmdb

from hcache_backend.config import HCacheConfig
from hcache_backend.store.bounds import Bounds, evict
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import DamagedFileError, Identity, PageName
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_files import (
    OtherSizeError,
    Wanted,
    Written,
    delete_page,
    file_exists,
    read_page,
    remove_nameless,
    write_page,
)
from hcache_backend.store.page_io import PageIO, PageMemory
from hcache_backend.store.presence import OfflineError, Presence
from hcache_backend.store.shares import SegmentTable
from hcache_backend.store.stats import ProblemLog, StoreStats

logger = logging.getLogger("hcache.store")

_LOCK_SECONDS = 5.0
_TOUCHES_AT_MOST = 65536

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class Volume(Presence):
    """One folder and its pages.

    Args:
        path: The folder; made when missing.
        config: The options.
        writer: The server run, 8 bytes.
        ops: The file operations.
        stats: Counters.
        problems: Where problems are logged.
    """

    def __init__(
        self,
        path: Path,
        config: HCacheConfig,
        writer: bytes,
        ops: FileOps,
        stats: StoreStats,
        problems: ProblemLog,
    ) -> None:
        super().__init__(path, ops, stats, problems)
        self.io = PageIO(ops, config.buffer_bytes)
        self.readers = ThreadPoolExecutor(config.io_threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(config.io_threads, f"hcache-write-{path.name}")
        self._writer = writer
        self._bounds = Bounds(
            config.quota_bytes, config.min_free_bytes, config.high_water, config.low_water
        )
        self._touched: dict[PageName, None] = {}
        self._touch_lock = threading.Lock()
        self.dirty = False

    # ---- looking up ----

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """Bit mask of the eighths of every page that stand here."""
        nothing = [0] * len(keys)
        return self._ask(lambda folder: folder.index.coverage(namespace, keys), nothing)

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Record]]:
        """The page files of every page that stand here."""
        nothing: list[list[Record]] = [[] for _ in keys]
        return self._ask(lambda folder: folder.index.lookup(namespace, keys), nothing)

    def holds_file(self, name: PageName) -> bool:
        """Whether a page file is really there."""
        return self._ask(lambda folder: file_exists(folder, name), False)

    # ---- pages ----

    def start_reading(self, entry: Entry, memory: PageMemory, wanted: Wanted) -> Future[bool]:
        """Have a thread :meth:`read`."""
        return self._start(self.readers, self.read, entry, memory, wanted)

    def start_writing(
        self, namespace: bytes, key: bytes, memory: PageMemory, table: SegmentTable
    ) -> Future[Written | None]:
        """Have a thread :meth:`write`."""
        return self._start(self.writers, self.write, namespace, key, memory, table)

    def read(self, entry: Entry, memory: PageMemory, wanted: Wanted) -> bool:
        """Read what is wanted of a page file into ``memory``; False is a miss."""
        try:
            with self.use() as folder:
                return self._read(folder, entry, memory, wanted)
        except OfflineError:
            return False

    def write(
        self, namespace: bytes, key: bytes, memory: PageMemory, table: SegmentTable
    ) -> Written | None:
        """Write a share to a nameless file; None when that fails. :meth:`commit` names it."""
        names = (namespace, key, self._writer)
        try:
            with self.use() as folder:
                written = write_page(folder, self.io, names, memory, table, time.time_ns())
        except OfflineError:
            self._stats.add(pages_dropped_offline=1)
            return None
        except OSError as error:
            self._stats.add(write_errors=1)
            self.failed("write", str(error))
            return None
        self.worked()
        self._stats.add(bytes_copied=written.copied)
        return written

    def make_room(self, incoming: int, seconds: float) -> bool:
        """Evict what is needed for ``incoming`` bytes; False when there is no room."""

        def work(folder: Folder) -> bool:
            if self._bounds.excess(folder, incoming) == 0:
                return True
            with folder.lock.held(seconds):
                return self._evict_for(folder, incoming)

        # What goes wrong here goes wrong again, and is counted, when the pages are written.
        return self._ask(work, True)

    def commit(self, batch: Sequence[Written], seconds: float) -> list[bool]:
        """Make pages of nameless files, all of one namespace; False for one that failed."""
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
            self.failed("write", str(error), error)
        return done

    def abandon(self, writing: Future[Written | None]) -> None:
        """Have a page that nobody waits for not written, or its nameless file removed."""

        def remove(future: Future[Written | None]) -> None:
            written = result_of(future)
            if written is not None:
                self._ask(lambda folder: remove_nameless(folder, written.number), None)

        if not writing.cancel():
            writing.add_done_callback(remove)

    def touch(self, name: PageName) -> None:
        """Note that a page was used; the index learns it later."""
        with self._touch_lock:
            self._touched[name] = None
            enough = len(self._touched) >= _TOUCHES_AT_MOST
        if enough:
            self.save_recency()

    def _take_touched(self) -> dict[PageName, None]:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        return touched

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the pages of a namespace (those of one writer); returns how many."""

        def work(folder: Folder) -> int:
            dropped = 0
            doomed = [
                entry.name
                for entry in folder.index.entries(namespace)
                if writer is None or entry.record.writer == writer
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

    # ---- lasting ----

    def flush(self) -> bool:
        """Bring everything to the disk; False when it refused."""
        self.save_recency()
        self.dirty = False
        try:
            with self.use() as folder:
                folder.ops.sync(folder.root_fd)
        except OSError as error:
            self.dirty = True
            self._stats.add(sync_errors=1)
            self.failed("sync", str(error))
            return False
        self._stats.add(syncs=1)
        return True

    def save_recency(self) -> None:
        """Tell the index which pages were used."""
        touched = self._take_touched()
        if not touched:
            return

        def work(folder: Folder) -> None:
            with folder.lock.held(_LOCK_SECONDS):
                folder.index.touch(touched, time.time_ns())

        self._ask(work, None)

    def close(self) -> None:
        """Finish and let go."""
        self.save_recency()
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        super().close()

    # ---- internals ----

    def _ask(self, work: Callable[[Folder], _Result], otherwise: _Result) -> _Result:
        try:
            with self.use() as folder:
                return work(folder)
        except OfflineError:
            return otherwise
        except TimeoutError as error:
            self._problems.report(f"lock {self.path}", f"{self.path}: {error}")
        except lmdb.Error as error:
            self.failed("index", str(error), error)
        except OSError as error:
            self.failed("use", str(error))
        return otherwise

    def _commit(self, folder: Folder, batch: Sequence[Written], done: list[bool]) -> None:
        fresh = []
        found = folder.index.lookup(batch[0].entry.namespace, [item.entry.key for item in batch])
        for number, (written, records) in enumerate(zip(batch, found, strict=True)):
            entry = written.entry
            known = any(record.share == entry.record.share for record in records)
            if known and file_exists(folder, entry.name):
                # Another process was faster.
                remove_nameless(folder, written.number)
                self._stats.add(pages_already_stored=1)
                done[number] = True
            else:
                fresh.append(number)
        incoming = sum(batch[number].entry.record.file_bytes for number in fresh)
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
        written_bytes = sum(batch[i].entry.record.payload_bytes for i in fresh if done[i])
        self._stats.add(pages_written=len(fresh) - len(unnamed), bytes_written=written_bytes)
        if failed is not None:
            folder.index.remove(unnamed)
            raise failed

    def _evict_for(self, folder: Folder, incoming: int, on_disk: int = 0) -> bool:
        """Make room; the folder's lock is held."""
        excess = self._bounds.excess(folder, incoming, on_disk)
        if excess:
            folder.index.touch(self._take_touched(), time.time_ns())
            evict(folder, excess, self._stats, self._problems)
        return self._bounds.has_room(folder, incoming, on_disk)

    def _read(self, folder: Folder, entry: Entry, memory: PageMemory, wanted: Wanted) -> bool:
        try:
            read = read_page(folder, self.io, entry, memory, wanted)
        except FileNotFoundError:
            self._discard(folder, entry, None)
        except DamagedFileError as error:
            self._discard(folder, entry, error.identity)
            self._stats.add(bad_pages=1)
            self._problems.report("damaged", f"{self.path}: a page is damaged ({error})")
        except OtherSizeError as error:
            self._problems.report("size", f"{self.path}: page not read: {error}")
        except OSError as error:
            self._stats.add(read_errors=1)
            self.failed("read", str(error))
        else:
            self.worked()
            self._stats.add(bytes_read=read.bytes, bytes_copied=read.copied)
            self.touch(entry.name)
            return True
        return False

    def _discard(self, folder: Folder, entry: Entry, identity: Identity | None) -> None:
        """Take a damaged or missing page out, unless another one stands there by now."""
        name = entry.name
        try:
            with folder.lock.held(_LOCK_SECONDS):
                [records] = folder.index.lookup(entry.namespace, [entry.key])
                if not any(_same_file(record, entry.record) for record in records):
                    return
                if identity is None:
                    gone = not file_exists(folder, name)
                else:
                    gone = delete_page(folder, name, only=identity)
                if gone:
                    folder.index.remove([name])
        except lmdb.Error as error:
            self.failed("index", str(error), error)
        except OSError as error:
            self.failed("delete", str(error))

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            delete_page(folder, name)
        except OSError as error:
            self._stats.add(evict_errors=1)
            self.failed("delete", str(error))
            return False
        return True

    def _start(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[Unpack[_Arguments]], _Result],
        *arguments: *_Arguments,
    ) -> Future[_Result]:
        try:
            return pool.submit(work, *arguments)
        except RuntimeError:  # the store was closed: the work finds that out, and counts it
            done: Future[_Result] = Future()
            done.set_result(work(*arguments))
            return done


def result_of(future: Future[_Result]) -> _Result | None:
    """The result of work that is done or soon will be; None when it raised."""
    try:
        return future.result()
    except Exception:
        # Whoever waits must not wait for ever; the page is a miss, or not stored.
        logger.exception("hcache: a job of the page store failed")
        return None


def _same_file(one: Record, other: Record) -> bool:
    return one._replace(stamp=0) == other._replace(stamp=0)


def _give_name(folder: Folder, written: Written) -> None:
    name = written.entry.name
    with folder.shard(name.shard, make=True) as shard_fd:
        source_fd, source = folder.session.place(written.number)
        folder.ops.rename(source, source_fd, name.file, shard_fd)
