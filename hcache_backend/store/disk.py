"""The pages of one folder of the store while the server runs: the folder may fail, vanish, return.

The order of steps keeps the folder right after every crash. A write makes the file, then its entry
in the index, then its name. So a crash leaves a nameless file, which the next opening of the folder
removes, or an entry without file, which the next read removes. No page file is ever uncounted.
"""

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK, PageName, round_up
from hcache_backend.format.file import DamagedFileError
from hcache_backend.format.units import Eighths
from hcache_backend.store import folder as store_folder
from hcache_backend.store.eviction import Recency, Room, evict, margin, pressure, room_for
from hcache_backend.store.file_ops import FileOps, LockedError, is_no_space
from hcache_backend.store.folder import Folder, PageRead, PageWrite
from hcache_backend.store.index import LAST_RANK, Entry, is_damaged
from hcache_backend.store.stats import ProblemLog, StoreStats, logger

_LOCK_SECONDS = 5.0
_ERRORS_IN_A_ROW = 8
_REST_SECONDS = 5.0
_EVICTIONS_IN_VAIN = 3  # in a row; then there are no more, for others may take the space

_COUNTERS = {what: f"{what}_errors" for what in ("read", "write", "sync", "evict")}

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Work = Callable[[Folder], _Result]


class OfflineError(OSError):
    """The folder is not there at the moment."""


class Writing(NamedTuple):
    shards: int  # that threads write
    tried: list[PageWrite]  # those that were written or failed; threads add to it
    threads: list[Future[None]]


class Disk:
    """One folder and its pages. Any thread.

    If its reads fail again and again, it rests for some seconds, so that a dying disk does not hold
    up every request. If its writes fail, only writing rests: a disk that is full, or was made
    read-only, can be read. A folder that vanishes is let go of, and opened again when it is back.
    It is ``dirty`` from a write to the next sync.
    """

    def __init__(
        self, path: Path, config: HCacheConfig, ops: FileOps, stats: StoreStats, recency: Recency
    ) -> None:
        self.path = path
        self._config, self._ops, self._stats, self._recency = config, ops, stats, recency
        self._problems = ProblemLog()
        self._state = threading.Lock()
        self._folder: Folder | None = None
        self._errors_in_a_row = [0, 0]  # of reading and of writing
        self._rest_until = [0.0, 0.0]  # of reading and of writing, in monotonic seconds
        self._index_is_broken = False
        self._device: int | None = None  # of the folder that was opened
        self._closed = False
        self.readers = ThreadPoolExecutor(config.io_threads, f"hcache-read-{path.name}")
        self.writers = ThreadPoolExecutor(config.io_threads, f"hcache-write-{path.name}")
        self.dirty = False
        self._evicting = threading.Lock()
        self._evictions = 0  # after writes for which the disk had no space
        self._in_vain = 0  # number of the last evictions in a row that were no help

    def attach(self, *, create: bool) -> None:
        """Open the folder, or ``create`` it if it is missing; an OSError if it cannot be used."""
        is_new = not os.path.exists(self.path / store_folder.MARKER)  # noqa: PTH110  raises nothing
        descriptors = store_folder.descriptors_of_each(len(self._config.dirs))
        folder = Folder(self.path, self._ops, create=create, descriptors=descriptors)
        with self._state:
            self._folder, self._index_is_broken = folder, False
            self._errors_in_a_row, self._rest_until = [0, 0], [0.0, 0.0]
        self._device = os.fstat(folder.root_fd).st_dev
        is_named = "dirs" in self._config.model_fields_set
        if is_new and is_named and self._device == store_folder.device_of_root():
            logger.warning(
                "hcache: %s is new, and on the file system of /. If its disk is not mounted, end "
                "this server, delete the folder, and mount the disk",
                self.path,
            )
        if not folder.io.alignment.flags:
            logger.debug("hcache: %s has no direct I/O; reads and writes are buffered", self.path)

    def is_online(self, *, writing: bool = False) -> bool:
        """Whether the folder is open, and reading (``writing``: also writing) does not rest now."""
        until = max(self._rest_until) if writing else self._rest_until[False]
        return self._folder is not None and time.monotonic() >= until

    @contextmanager
    def use(self, *, writing: bool = False) -> Iterator[Folder]:
        """The open folder, which stays open while in use; OfflineError if it is not there."""
        with self._state:
            folder = self._folder
            if folder is None or not self.is_online(writing=writing):
                raise OfflineError(errno.ENODEV, "the folder is offline", str(self.path))
            folder.users += 1
        try:
            yield folder
        finally:
            self._let_go(folder)

    def look_after(self) -> None:
        """Let go of a folder that vanished or has a broken index; open it again. Never raises."""
        if (folder := self._folder) is not None:
            if folder.is_in_place() and folder.index_file_is_gone():
                self._index_is_broken = True
            if self._index_is_broken:
                self.note_problem("index", "has no sound index; it is made anew")
                try:
                    folder.set_index_aside()  # then it is not in place any more
                except OSError as error:
                    self.note_problem("index", f"keeps its index: {error}")
            if not folder.is_in_place():
                gone = "is gone; its pages are misses until it is back"
                self.note_problem("vanished", gone, folders_lost=1)
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
        """Stop the threads, and close the folder when nobody uses it any more."""
        self.readers.shutdown(wait=False)
        self.writers.shutdown(wait=False)
        self._closed = True
        self.detach()

    def note_failure(
        self, what: str, error: Exception, *, writing: bool = False, pages: int = 0
    ) -> None:
        """Count and log that the operation ``what``, on ``pages`` if it is one on pages, failed.
        Many failures in a row, other than a folder away, locked or full, let the disk rest."""
        if isinstance(error, OfflineError):
            self._stats.add(pages_dropped_offline=pages)
        elif isinstance(error, LockedError):
            self.note_problem("lock", f"is locked: {error}", pages_dropped_late=pages)
        elif pages and is_no_space(error):  # a full disk works
            full = f"is full: {error}; new pages are not stored"
            self.note_problem("full", full, pages_dropped_full=pages)
        else:
            counts = {_COUNTERS[what]: max(pages, 1)} if what in _COUNTERS else {}
            counts["index_errors"] = isinstance(error, sqlite3.Error)
            self.note_problem(what, f"failed ({what}): {error}", **counts)
            self._index_is_broken = self._index_is_broken or is_damaged(error)
            # If the process has too many files open, that is no fault of the disk.
            if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE):
                self._errors_in_a_row[writing] += 1
            if self._errors_in_a_row[writing] >= _ERRORS_IN_A_ROW:
                self._errors_in_a_row[writing] = 0
                self._rest_until[writing] = time.monotonic() + _REST_SECONDS
                rests = f"is not {'written' if writing else 'used'} for {_REST_SECONDS:.0f} s"
                self.note_problem(rests, f"{rests}: {_ERRORS_IN_A_ROW} failures in a row")

    def note_problem(self, kind: str, message: str, **counts: int) -> None:
        self._stats.add(**counts)
        self._problems.report(kind, f"{self.path} {message}")

    def _come_back(self) -> None:
        """Open the folder again, or make a new one, if its disk is mounted: if the device is the
        same as before, or if a store is there on a device that is not that of /."""
        try:
            device = store_folder.existing_part(self.path).stat().st_dev
            is_store = store_folder.is_store_folder(self.path)
            known = self._device if self._device is not None or not is_store else device
            if device != known and (not is_store or device == store_folder.device_of_root()):
                self.note_problem(
                    "offline", "is not used: its disk is not mounted, or another one is"
                )
                return
            self.attach(create=not is_store)
        except OSError as error:
            self.note_problem("offline", f"cannot be used: {error}")
        else:
            logger.info("hcache: %s works again", self.path)

    def _let_go(self, folder: Folder) -> None:
        with self._state:
            folder.users -= 1
            if folder.users:
                return
        folder.close()

    def _try(
        self, work: _Work[_Result], otherwise: _Result, what: str = "use", *, writing: bool = False
    ) -> _Result:
        """The result of ``work`` with the folder; ``otherwise`` if that is away or work fails."""
        try:
            with self.use(writing=writing) as folder:
                return work(folder)
        except (OSError, sqlite3.Error) as error:
            self.note_failure(what, error, writing=writing)
            return otherwise

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[Eighths]:
        return self._try(lambda folder: folder.index.coverage(namespace, keys), [0] * len(keys))

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        nothing: list[list[Entry]] = [[] for _ in keys]
        return self._try(lambda folder: folder.index.lookup(namespace, keys), nothing)

    def rank_range(self) -> tuple[int, int] | None:
        return self._try(lambda folder: folder.index.rank_range(), None)

    def raise_ranks(self, ranks: Mapping[PageName, int]) -> None:
        def work(folder: Folder) -> None:
            for batch in folder.lock.batches(ranks.items()):
                with folder.lock.hold(_LOCK_SECONDS, batch=len(batch)):
                    folder.index.raise_ranks(dict(batch))

        self._try(work, None, writing=True)

    def holds_file(self, name: PageName) -> bool:
        return self._try(lambda folder: folder.has_file(name), False)

    def start_reading(self, reads: Sequence[PageRead], deadline: float) -> list[Future[list[int]]]:
        """Have threads read page files by ``deadline``; results: numbers of the pages that came."""
        return self._start(self.readers, partial(self._read_all, deadline), reads)

    def _start(
        self, pool: Executor, work: Callable[[Iterator[_Item]], _Result], items: Sequence[_Item]
    ) -> list[Future[_Result]]:
        """Have all threads do ``work``: each takes the next of ``items`` when it has done one."""
        remaining = iter(items)
        threads: list[Future[_Result]] = []
        for _ in items[: self._config.io_threads]:
            try:
                threads.append(pool.submit(work, remaining))
            except RuntimeError:  # the store was closed: the work finds that out, and counts it
                threads.append(Future())
                threads[-1].set_result(work(remaining))
        return threads

    def _read_all(self, deadline: float, reads: Iterator[PageRead]) -> list[int]:
        """The work of a reading thread, which shares ``reads`` with others; see start_reading."""
        arrived: list[int] = []
        payload = copied = 0  # bytes
        with suppress(OfflineError), self.use() as folder:
            for read in reads:
                if time.monotonic() > deadline or not self.is_online():
                    break
                try:
                    size, copied_now = folder.read_page(read)
                except FileNotFoundError:  # its entry goes, so that the page can be written again
                    self._discard(read.entry, None)
                except DamagedFileError as error:
                    self._discard(read.entry, error.status)
                    self.note_problem("damaged", f"has a damaged page: {error}", bad_pages=1)
                except ValueError as error:
                    self.note_problem("size", f"has a page of another size: {error}")
                except OSError as error:
                    self.note_failure("read", error)
                else:
                    self._errors_in_a_row[False] = 0
                    arrived.append(read.number)
                    payload, copied = payload + size, copied + copied_now
        self._stats.add(bytes_read=payload, bytes_copied=copied)
        return arrived

    def _discard(self, entry: Entry, damaged: os.stat_result | None) -> None:
        """Delete a page file and its entry, unless another process has replaced them: the status of
        the file is still ``damaged``; None: the file is still missing."""
        name = entry.name

        def work(folder: Folder) -> None:
            with folder.lock.hold(_LOCK_SECONDS):
                [files] = folder.index.lookup(name.namespace, [name.key])
                is_same = entry in [known._replace(rank=entry.rank) for known in files]  # any rank
                if is_same and (
                    folder.delete_page(name, damaged) if damaged else not folder.has_file(name)
                ):
                    folder.index.remove([name])

        self._try(work, None, writing=True)

    def start_writing(self, writes: Sequence[PageWrite], deadline: float) -> Writing:
        """Have threads write shards of pages to nameless files; :meth:`finish_writing` names them.
        If there is no room for all, the first ones that fit. None is begun after ``deadline``."""
        incoming = sum(write.entry.file_bytes for write in writes)
        below = min(write.entry.rank for write in writes)  # only older pages may go for them
        room = self.make_room(incoming, deadline - time.monotonic(), below)
        writes = self._first_that_fit(writes, room)
        tried: list[PageWrite] = []
        work = partial(self._write_all, deadline, tried)
        return Writing(len(writes), tried, self._start(self.writers, work, writes))

    def finish_writing(self, writing: Writing, deadline: float) -> None:
        """Make pages of the files written by ``deadline``; later ones go when their thread ends."""
        shards, tried, threads = writing
        wait(threads, max(deadline - time.monotonic(), 0.0))
        late = [thread for thread in threads if not (thread.done() or thread.cancel())]
        in_time = tried[:]

        def remove_later_ones(_: Future[None]) -> None:
            for write in tried[len(in_time) :]:
                self._try(partial(Folder.remove_nameless, file=write.file), None, writing=True)

        for thread in threads:
            if thread in late:
                thread.add_done_callback(remove_later_ones)
            elif not thread.cancelled():
                result_of(thread)  # None; logs an error of the thread
        if ready := [write for write in in_time if write.file is not None]:
            self._commit(ready, deadline)
        if lost := shards - len(in_time):
            self.note_problem(
                "late", f"is too slow; it has {lost} pages less", pages_dropped_late=lost
            )

    def flush(self) -> bool:
        """Bring everything to the disk; False if it refused."""
        self.dirty = False
        sync = self._ops.sync  # returns nothing
        synced = self._try(lambda folder: not sync(folder.root_fd), False, "sync", writing=True)
        self._stats.add(syncs=synced)
        self.dirty = self.dirty or not synced
        return synced

    def _write_all(
        self, deadline: float, tried: list[PageWrite], writes: Iterator[PageWrite]
    ) -> None:
        """The work of a writing thread, which shares ``writes`` and ``tried`` with others."""
        try:
            with self.use(writing=True) as folder:
                for write in writes:
                    if time.monotonic() > deadline:
                        return
                    self._write(folder, write, deadline)
                    tried.append(write)
        except OfflineError as error:
            dropped = list(writes)  # all that no thread has taken
            self.note_failure("write", error, writing=True, pages=len(dropped))
            tried += dropped

    def _write(self, folder: Folder, write: PageWrite, deadline: float) -> None:
        """Write a page to a nameless file, ``write.file``, or count why not. It is named later."""
        try:
            if not self.is_online(writing=True):
                raise OfflineError
            work = partial(folder.write_page, write)
            self._with_room(folder, write.layout.file_bytes, work, deadline)
            self._in_vain = self._errors_in_a_row[True] = 0
        except OSError as error:
            self.note_failure("write", error, writing=True, pages=1)

    def _with_room(
        self, folder: Folder, size: int, work: Callable[[], None], deadline: float
    ) -> None:
        """Do ``work``. If the disk has no space for it, evict ``size`` bytes, and try again."""
        for tries_left in (2, 1, 0):  # another thread may take the room that was made
            evictions = self._evictions
            try:
                work()
                return
            except (OSError, sqlite3.Error) as error:
                if tries_left and is_no_space(error):
                    try:
                        if self._evict_after(folder, size, evictions, deadline):
                            continue
                    except (OSError, sqlite3.Error) as evict_error:
                        self.note_failure("evict", evict_error, writing=True)
                raise

    def _commit(self, writes: Sequence[PageWrite], deadline: float) -> None:
        """Make pages of written nameless files; files that do not become pages are removed."""
        try:
            with self.use(writing=True) as folder:
                try:
                    for batch in folder.lock.batches(writes):
                        self._enter(folder, batch, deadline)
                finally:
                    self.dirty = True
                    self._stats.add(bytes_copied=sum(write.copied for write in writes))
                    for write in writes:
                        folder.remove_nameless(write.file)  # None if it has its name
        except (OSError, sqlite3.Error) as error:
            lost = sum(not write.stored for write in writes)
            self.note_failure("write", error, writing=True, pages=lost)

    def _enter(self, folder: Folder, batch: Sequence[PageWrite], deadline: float) -> None:
        """Evict older pages until there is room for a batch; then name the first files that fit."""
        size = sum(write.entry.file_bytes for write in batch)
        below = min(write.entry.rank for write in batch)

        def work() -> None:
            for tries_left in (2, 1, 0):  # another process may take the room that was made
                with folder.lock.hold(deadline - time.monotonic(), batch=len(batch)):
                    # The files are on the disk already: only room in the quota is missing.
                    room = room_for(folder, self._config, size, on_disk=size)
                    if room.bound is None or not tries_left:  # at last: as many as fit
                        self._name(folder, batch)
                        return
                self._evict_for(folder, size, deadline - time.monotonic(), below, on_disk=size)

        self._with_room(folder, size, work, deadline)

    def _name(self, folder: Folder, writes: Sequence[PageWrite]) -> None:
        """Enter files in the index and name them, except pages that are there already, and the last
        ones if not all fit. Raises OSError if one could not be named. The folder's lock is held."""
        batch = [write for write in writes if not write.stored]
        known = folder.index.known_names(write.entry.name for write in batch)
        for write in batch:  # another process may have stored the page meanwhile
            write.stored = write.entry.name in known and folder.has_file(write.entry.name)
        fresh = [write for write in batch if not write.stored]
        self._stats.add(pages_already_stored=len(batch) - len(fresh))
        size = sum(write.entry.file_bytes for write in fresh)
        fits = room_for(folder, self._config, size, on_disk=size).fits
        if not (batch := self._first_that_fit(fresh, fits)):
            return
        folder.index.insert(write.entry for write in batch)
        failed: OSError | None = None
        for write in batch:
            try:
                folder.give_name(write)
            except OSError as error:
                failed = error
                self._delete(folder, write.entry.name)
        named = [write.memory.length for write in batch if write.stored]
        self._stats.add(pages_written=len(named), bytes_written=sum(named))
        if failed is not None:
            folder.index.remove(write.entry.name for write in batch if not write.stored)
            raise failed

    def _first_that_fit(self, writes: Sequence[PageWrite], room: int) -> list[PageWrite]:
        """The first ones that fit into ``room`` bytes: later pages are of no use without them."""
        for number, write in enumerate(writes):
            room -= write.entry.file_bytes
            if room < 0:
                self._stats.add(pages_dropped_full=len(writes) - number)
                return list(writes[:number])
        return list(writes)

    def pressure(self) -> tuple[int, int]:
        """Grows with the worth of the pages that a further one would drive out."""
        return self._try(lambda folder: pressure(folder, self._config), (0, 0))

    def make_room(self, incoming: int, seconds: float, below: int = LAST_RANK) -> int:
        """Evict pages of ranks lower than ``below`` to make room for ``incoming`` bytes. Returns
        how many of these there is room for now."""

        def work(folder: Folder) -> int:
            return self._evict_for(folder, incoming, seconds, below).fits

        # After an error all of them are tried: it comes again, and counts, at the write.
        return self._try(work, incoming, writing=True)

    def report_room(self) -> None:
        """Pass on to ``StoreStats.on_room`` how full the folder is; nothing if it is away."""
        with suppress(OSError, sqlite3.Error), self.use() as folder:
            stored, free = folder.index.totals().bytes, folder.ops.free_bytes(folder.root_fd)
            room = {"pages": stored, "quota": self._config.quota_bytes or 0, "free": free}
            self._stats.on_room(str(self.path), room)

    def check_room(self, page_bytes: int) -> None:
        """Say in the log if the folder could hold no page of this size, were it empty."""
        size, config = BLOCK + round_up(page_bytes), self._config
        bound = self._try(lambda folder: room_for(folder, config, size, empty=True).bound, None)
        if bound is not None:
            logger.warning("hcache: %s can hold no page: %s", self.path, bound)

    def drop(self, namespace: bytes, writer: bytes | None = None) -> int:
        """Delete the page files of ``namespace`` (b"": of all) that the server run ``writer`` wrote
        (None: any run). Returns how many; 0 after an error, even if some were deleted before it."""

        def work(folder: Folder) -> int:
            entries = folder.index.entries(namespace)
            doomed = (entry.name for entry in entries if writer in (None, entry.writer))
            dropped = 0
            for batch in folder.lock.batches(doomed):
                with folder.lock.hold(_LOCK_SECONDS, batch=len(batch)):
                    gone = [name for name in batch if self._delete(folder, name)]
                    folder.index.remove(gone)
                dropped += len(gone)
                self.dirty = True
            return dropped

        dropped = self._try(work, 0, writing=True)
        if self.dirty:
            self.flush()  # otherwise a power cut could bring deleted pages back
        return dropped

    def _evict_after(self, folder: Folder, wanted: int, evictions: int, deadline: float) -> bool:
        """A write failed because the disk was full: evict ``wanted`` bytes. ``evictions``: value of
        ``_evictions`` before that write; if it has changed, another thread has evicted since.
        Returns whether the caller should write again: False after evictions in vain."""
        with self._evicting:
            if self._evictions == evictions:
                if self._in_vain >= _EVICTIONS_IN_VAIN:
                    return False
                self._in_vain += 1  # a write that succeeds sets it to 0
                self._evictions += 1
                wanted = max(wanted, margin(folder.index.totals().bytes))
                seconds = deadline - time.monotonic()
                evict(folder, wanted, LAST_RANK, seconds, self._stats, self._problems)
        return True

    def _evict_for(
        self, folder: Folder, incoming: int, seconds: float, below: int, on_disk: int = 0
    ) -> Room:
        """If there is too little room for ``incoming`` bytes, of which ``on_disk`` are written
        already, evict pages of ranks lower than ``below``. Returns the room afterwards."""
        room = room_for(folder, self._config, incoming, on_disk)
        if room.excess and (not room.disk_is_full or self._in_vain < _EVICTIONS_IN_VAIN):
            self._recency.save()
            evicted = evict(folder, room.excess, below, seconds, self._stats, self._problems)
            room = room_for(folder, self._config, incoming, on_disk)
            # Other programs may have taken the space, or the file system keeps it for root.
            if evicted and room.disk_is_full and not room.fits:
                self._in_vain += 1
        if room.bound is not None:
            self.note_problem("full", f"is full: {room.bound}; new pages are not stored")
        return room

    def _delete(self, folder: Folder, name: PageName) -> bool:
        try:
            folder.delete_page(name)
        except OSError as error:
            self.note_failure("evict", error, writing=True)
            return False
        return True


def result_of(future: Future[_Result]) -> _Result | None:
    """The result of work that is done or soon will be; None if it raised."""
    try:
        return future.result()
    except Exception:
        # The caller goes on: the pages of this work are misses, or not stored.
        logger.exception("hcache: a job of the page store failed")
        return None
