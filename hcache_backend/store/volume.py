"""The pages of one folder of the store while the server runs.

The order of things keeps every crash harmless. Writing: file, then index, then the file's name. So
a crash leaves a nameless file (removed when the folder is opened next) or an entry without file
(removed when it is read next), never a page file that nobody counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import lmdb

from hcache_backend.config import HCacheConfig
from hcache_backend.store.base import SegmentTable, Share, StoreStats
from hcache_backend.store.bounds import Bounds, evict
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import file_name
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_files import (
    Identity,
    Outcome,
    Reading,
    Wanted,
    Written,
    read_page,
    remove_nameless,
    write_page,
)
from hcache_backend.store.page_io import PageIO, PageMemory
from hcache_backend.store.presence import OfflineError, Presence
from hcache_backend.store.problems import ProblemLog

_LOCK_SECONDS = 5.0
_TOUCHES_AT_MOST = 65536

Name = tuple[bytes, bytes, Share]
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
        self._touched: dict[Name, None] = {}
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
        wanted: Wanted,
    ) -> bool:
        """Read what is wanted of a page file into ``memory``; False is a miss."""
        entry = Entry(namespace, key, record)
        try:
            with self.use() as folder:
                reading = read_page(folder, self.io, entry, memory, wanted)
                if reading.outcome in (Outcome.DAMAGED, Outcome.GONE):
                    self._discard(folder, entry, reading)
        except OSError:
            return False
        self._stats.add(bytes_copied=reading.copied)
        if reading.outcome is Outcome.HIT:
            self.worked()
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
            self.failed("read", reading.reason)
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

    def abandon(self, written: Written | None) -> None:
        """Remove a nameless file that nobody waits for."""
        if written is not None:
            number = written.number
            self._ask(lambda folder: remove_nameless(folder, number), None)

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
            name = (entry.namespace, entry.key, entry.record.share)
            known = any(record.share == entry.record.share for record in records)
            if known and _file_exists(folder, name):
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
            self.failed("index", str(error), error)
        except OSError as error:
            self.failed("delete", str(error))

    def _delete(self, folder: Folder, name: Name) -> bool:
        shard, file = file_name(*name)
        try:
            with folder.shard(shard) as shard_fd:
                folder.ops.unlink(file, shard_fd)
        except FileNotFoundError:
            return True
        except OSError as error:
            self._stats.add(evict_errors=1)
            self.failed("delete", str(error))
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
        source_fd, source = folder.session.place(written.number)
        folder.ops.rename(source, source_fd, file, shard_fd)
