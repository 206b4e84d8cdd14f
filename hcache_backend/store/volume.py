"""One folder of the store while the server runs: it may fail, vanish and come back.

The order of things keeps every crash harmless. Writing: file, then index, then the file's name. So
a crash leaves a nameless file (removed when the folder is opened next) or an entry without file
(removed when it is read next), never a page file that nobody counts.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import lmdb

from hcache_backend.config import HCacheConfig
from hcache_backend.store.base import SegmentTable, Share, StoreStats, Subset
from hcache_backend.store.bounds import Bounds, evict
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import Folder, is_store_folder, open_folder
from hcache_backend.store.format import file_name
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_files import (
    Identity,
    Outcome,
    Reading,
    Written,
    read_page,
    remove_temporary,
    write_page,
)
from hcache_backend.store.page_io import PageIO, PageMemory
from hcache_backend.store.problems import ProblemLog

logger = logging.getLogger("hcache.store")

_LOCK_SECONDS = 5.0
_TOUCHES_AT_MOST = 65536
_ERRORS_IN_A_ROW = 8
_REST_SECONDS = 5.0

Name = tuple[bytes, bytes, Share]
_Result = TypeVar("_Result")


class OfflineError(OSError):
    """The folder is not there at the moment."""


class Volume:
    """One folder.

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
        self.path = path
        self.io = PageIO(ops, config.buffer_bytes)
        self.readers = ThreadPoolExecutor(config.io_threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(config.io_threads, f"hcache-write-{path.name}")
        self._ops = ops
        self._writer = writer
        self._stats = stats
        self._problems = problems
        self._bounds = Bounds(
            config.quota_bytes, config.min_free_bytes, config.high_water, config.low_water
        )
        self._state = threading.Lock()
        self._folder: Folder | None = None
        self._users: dict[int, int] = {}
        self._retired: list[Folder] = []
        self._errors_in_a_row = 0
        self._rest_until = 0.0
        self._index_is_broken = False
        self._touched: dict[Name, None] = {}
        self._touch_lock = threading.Lock()
        self._closed = False
        self.dirty = False
        self._had_own_device = False

    # ---- being there ----

    def attach(self, *, create: bool) -> None:
        """Open the folder.

        Raises:
            OSError: It cannot be used.
        """
        try:
            folder = open_folder(self.path, self._ops, create=create)
        except lmdb.Error as error:
            raise OSError(errno.EIO, f"its index: {error}", str(self.path)) from None
        with self._state:
            self._folder = folder
            self._users[id(folder)] = 0
            self._errors_in_a_row = 0
            self._rest_until = 0.0
            self._index_is_broken = False
        self._had_own_device = self.path.is_mount()
        if not folder.alignment.flags:
            logger.info("hcache: %s has no direct I/O; reads and writes are buffered", self.path)

    def is_online(self) -> bool:
        """Whether it can be used now."""
        return self._folder is not None and time.monotonic() >= self._rest_until

    @contextmanager
    def use(self) -> Iterator[Folder]:
        """The open folder; it stays open while in use.

        Raises:
            OfflineError: It is not there.
        """
        with self._state:
            folder = self._folder
            if folder is None or time.monotonic() < self._rest_until:
                raise OfflineError(errno.ENODEV, "the folder is offline", str(self.path))
            self._users[id(folder)] += 1
        try:
            yield folder
        finally:
            with self._state:
                self._users[id(folder)] -= 1
            self._close_retired()

    def look_after(self) -> None:
        """Notice that the folder vanished or came back. Called now and then; never raises."""
        folder = self._folder
        if folder is not None and self._index_is_broken:
            self._problems.report("index", f"{self.path}: the index is damaged; it is rebuilt")
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
        """Let go of the folder as soon as nobody uses it."""
        with self._state:
            if self._folder is not None:
                self._retired.append(self._folder)
                self._folder = None
        self._close_retired()

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
        logger.warning("hcache: %s is back", self.path)

    def _close_retired(self) -> None:
        with self._state:
            idle = [folder for folder in self._retired if not self._users[id(folder)]]
            for folder in idle:
                self._retired.remove(folder)
                del self._users[id(folder)]
        for folder in idle:
            folder.close()

    # ---- looking up ----

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """Bit mask of the eighths of every page that stand here."""
        nothing = [0] * len(keys)
        return self._ask(lambda folder: folder.index.coverage(namespace, keys), nothing)

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Record]]:
        """The page files of every page that stand here."""
        nothing: list[list[Record]] = [[] for _ in keys]
        return self._ask(lambda folder: folder.index.lookup(namespace, keys), nothing)

    def holds_file(self, name: Name) -> bool:
        """Whether a page file is really there."""
        return self._ask(lambda folder: _file_exists(folder, name), False)

    # ---- pages ----

    def read(
        self,
        namespace: bytes,
        key: bytes,
        record: Record,
        memory: PageMemory,
        subset: Subset | None,
    ) -> bool:
        """Read a page file into ``memory``; False is a miss."""
        entry = Entry(namespace, key, record)
        try:
            with self.use() as folder:
                reading = read_page(folder, self.io, entry, memory, subset)
                if reading.outcome in (Outcome.DAMAGED, Outcome.GONE):
                    self._discard(folder, entry, reading)
        except OSError:
            return False
        self._stats.add(bytes_copied=reading.copied)
        if reading.outcome is Outcome.HIT:
            self._errors_in_a_row = 0
            self._stats.add(bytes_read=reading.read)
            self.touch((namespace, key, record.share))
            return True
        if reading.outcome is Outcome.DAMAGED:
            self._stats.add(bad_pages=1)
            self._problems.report("damaged", f"{self.path}: a page is damaged ({reading.reason})")
        elif reading.outcome is Outcome.OTHER_SIZE:
            self._problems.report("size", f"{self.path}: page not read: {reading.reason}")
        elif reading.outcome is Outcome.ERROR:
            self._stats.add(read_errors=1)
            self._failed("read", reading.reason)
        return False

    def write(
        self,
        namespace: bytes,
        key: bytes,
        memory: PageMemory,
        table: SegmentTable,
        share: Share,
    ) -> Written | None:
        """Write a page to a nameless file; None when that fails. :meth:`commit` names it."""
        names = (namespace, key, self._writer)
        try:
            with self.use() as folder:
                written = write_page(folder, self.io, names, memory, table, share, time.time_ns())
        except OfflineError:
            self._stats.add(pages_dropped_offline=1)
            return None
        except OSError as error:
            self._stats.add(write_errors=1)
            self._failed("write", str(error))
            return None
        self._errors_in_a_row = 0
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
        """Make pages of nameless files; False for one that could not become one."""
        done = [False] * len(batch)
        try:
            with self.use() as folder:
                try:
                    with folder.lock.held(seconds):
                        self._commit(folder, batch, done)
                finally:
                    for written, ok in zip(batch, done, strict=True):
                        if not ok:
                            remove_temporary(folder, written.temporary)
        except OfflineError:
            self._stats.add(pages_dropped_offline=len(batch))
        except TimeoutError as error:
            self._stats.add(pages_dropped_late=len(batch))
            self._problems.report("lock", f"{self.path}: {error}")
        except (OSError, lmdb.Error) as error:
            self._stats.add(write_errors=done.count(False))
            self._failed("write", str(error), error)
        return done

    def abandon(self, written: Written | None) -> None:
        """Remove a nameless file that nobody waits for."""
        if written is not None:
            self._ask(lambda folder: remove_temporary(folder, written.temporary), None)

    def touch(self, name: Name) -> None:
        """Note that a page was used; the index learns it later."""
        with self._touch_lock:
            self._touched[name] = None
            enough = len(self._touched) >= _TOUCHES_AT_MOST
        if enough:
            self.save_recency()

    def _take_touched(self) -> dict[Name, None]:
        with self._touch_lock:
            touched, self._touched = self._touched, {}
        return touched

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the pages of a namespace (those of one writer); returns how many."""

        def work(folder: Folder) -> int:
            dropped = 0
            doomed = [
                (entry.namespace, entry.key, entry.record.share)
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
            self._failed("sync", str(error))
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
        self._closed = True
        self.save_recency()
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        self.detach()

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
            self._failed("index", str(error), error)
        except OSError as error:
            self._failed("use", str(error))
        return otherwise

    def _failed(self, what: str, reason: str, error: Exception | None = None) -> None:
        self._problems.report(f"{what} {self.path}", f"{self.path}: {what} failed: {reason}")
        if isinstance(error, lmdb.Error):
            self._stats.add(index_errors=1)
            broken = (lmdb.CorruptedError, lmdb.PanicError, lmdb.PageNotFoundError)
            if isinstance(error, broken):
                self._index_is_broken = True
        self._errors_in_a_row += 1
        if self._errors_in_a_row >= _ERRORS_IN_A_ROW:
            self._errors_in_a_row = 0
            self._rest_until = time.monotonic() + _REST_SECONDS
            self._problems.report(
                f"rest {self.path}",
                f"{self.path} keeps failing; it rests for {_REST_SECONDS:.0f} s",
            )

    def _commit(self, folder: Folder, batch: Sequence[Written], done: list[bool]) -> None:
        fresh = []
        for number, written in enumerate(batch):
            entry = written.entry
            [records] = folder.index.lookup(entry.namespace, [entry.key])
            name = (entry.namespace, entry.key, entry.record.share)
            known = any(record.share == entry.record.share for record in records)
            if known and _file_exists(folder, name):
                # Another process was faster.
                remove_temporary(folder, written.temporary)
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
                entry = batch[number].entry
                name = (entry.namespace, entry.key, entry.record.share)
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

    def _discard(self, folder: Folder, entry: Entry, reading: Reading) -> None:
        """Take a damaged or missing page out, unless another one stands there by now."""
        shard, file = file_name(entry.namespace, entry.key, entry.record.share)
        try:
            with folder.lock.held(_LOCK_SECONDS), folder.shard(shard) as shard_fd:
                [records] = folder.index.lookup(entry.namespace, [entry.key])
                if not any(_same_file(record, entry.record) for record in records):
                    return
                try:
                    if Identity.of(folder.ops.stat(file, shard_fd)) != reading.identity:
                        return
                    folder.ops.unlink(file, shard_fd)
                except FileNotFoundError:
                    pass
                folder.index.remove([(entry.namespace, entry.key, entry.record.share)])
        except lmdb.Error as error:
            self._failed("index", str(error), error)
        except OSError as error:
            self._failed("delete", str(error))

    def _delete(self, folder: Folder, name: Name) -> bool:
        shard, file = file_name(*name)
        try:
            with folder.shard(shard) as shard_fd:
                folder.ops.unlink(file, shard_fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._stats.add(evict_errors=1)
            self._failed("delete", str(error))
            return False
        return True


def _same_file(one: Record, other: Record) -> bool:
    return one._replace(stamp=0) == other._replace(stamp=0)


def _file_exists(folder: Folder, name: Name) -> bool:
    shard, file = file_name(*name)
    try:
        with folder.shard(shard) as shard_fd:
            folder.ops.stat(file, shard_fd)
    except FileNotFoundError:
        return False
    return True


def _give_name(folder: Folder, written: Written) -> None:
    entry = written.entry
    shard, file = file_name(entry.namespace, entry.key, entry.record.share)
    with folder.shard(shard, make=True) as shard_fd:
        folder.ops.rename(written.temporary, folder.session_fd, file, shard_fd)
