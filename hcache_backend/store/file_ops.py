"""File operations of the store in one small interface, so that faults can be injected.

All names are single path components below an open folder (``dir_fd``), and links are never
followed: nothing inside a store folder can lead out of it. Every method raises OSError.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK, round_up
from hcache_backend.format.units import PageMemory
from hcache_backend.store.stats import logger

MODULES = Path("/proc/modules")
GDS_DRIVER = Path("/proc/driver/nvidia-fs/devcount")
UDEV = Path("/run/udev")

_Item = TypeVar("_Item")


class KvikioState(NamedTuple):
    """``GDS`` reads past host memory, ``compat`` through it, ``nothing`` does not read at all."""

    mode: Literal["GDS", "compat", "nothing"]
    why: str


def kvikio_state() -> KvikioState:
    """Find the state by a read with KvikIO."""
    if find_spec("kvikio") is None:
        return KvikioState("nothing", "it is not installed")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        why = "there is no GPU driver (libcuda), which KvikIO asks about every address it reads to"
        return KvikioState("nothing", why)
    try:
        import kvikio
        import kvikio.defaults as options

        compat = options.is_compat_mode_preferred()
        if not compat and not MODULES.exists():
            # cuFile looks for its driver in that file. If it cannot open it, libcufile.so.0 (1.20)
            # calls getline for ever, and opening the first file does not return.
            why = f"cuFile would hang: there is no {MODULES} here; set KVIKIO_COMPAT_MODE=ON"
            return KvikioState("nothing", why)
        # cuFile would write a log to the working directory.
        by_kvikio_alone = options.set({"compat_mode": kvikio.CompatMode.ON})
        with by_kvikio_alone, kvikio.CuFile(__file__, "r") as file:
            file.read(bytearray(1))
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return KvikioState("nothing", f"it fails: {error}")
    if not compat and GDS_DRIVER.exists():
        return KvikioState("GDS", "where cuFile and its driver nvidia-fs support the file system")
    if not compat:
        return KvikioState("compat", "cuFile's driver nvidia-fs is not loaded")
    if options.get("compat_mode") == kvikio.CompatMode.ON:
        return KvikioState("compat", "compatibility mode is on (KVIKIO_COMPAT_MODE)")
    if not UDEV.is_dir():
        return KvikioState("compat", f"cuFile needs {UDEV}; containers must mount it")
    return KvikioState("compat", "cuFile (libcufile.so.0) does not load, or this is WSL")


_Move = Callable[[int, Sequence[memoryview], int], int]

FOLDER = os.O_RDONLY | os.O_DIRECTORY  # opens a folder
MAX_VECTORS = 1024  # pieces of memory that one system call takes at most

_libc = ctypes.CDLL(None, use_errno=True)
_LONG = struct.calcsize("l")
_GET_FLAGS, _SET_FLAGS = (2 << 30 | _LONG << 16 | 0x6601, 1 << 30 | _LONG << 16 | 0x6602)
_TOP_OF_HIERARCHIES = 0x20000
_SHORTEST_WAIT, _LONGEST_WAIT, _PAUSE = 0.0002, 0.002, 0.003
_HELD_SECONDS = 0.02  # that a lock is held for one batch, as far as batches can be made smaller
_SMALLEST_BATCH, _FIRST_BATCH, _LARGEST_BATCH = 8, 128, 256


class FileOps:
    """The operations, as Linux does them; reads and writes may move less. What they make is the
    owner's only, and what root makes the owner's of the folder that it is in, whose server goes on
    with it."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        # The opening of a FIFO would wait for its other end.
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, 0o600, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            _give_to_owner(name, dir_fd)
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers[:MAX_VECTORS], offset)

    def write(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
        return os.pwritev(fd, buffers[:MAX_VECTORS], offset)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def make_folder(self, name: str, dir_fd: int) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)
        _give_to_owner(name, dir_fd)

    def spread_folders(self, fd: int) -> None:
        """Ask the file system to put the folders in this one apart (``chattr +T``)."""
        flags = bytearray(_LONG)
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        [known] = struct.unpack_from("i", flags)
        struct.pack_into("i", flags, 0, known | _TOP_OF_HIERARCHIES)
        fcntl.ioctl(fd, _SET_FLAGS, flags)

    def remove_folder(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def list(self, fd: int) -> list[str]:
        return os.listdir(fd)

    def free_bytes(self, fd: int) -> int:
        """Bytes that this user may still write on the file system."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def sync(self, fd: int) -> None:
        """Bring the whole file system to the disk: data, renames, folders, index (``syncfs``)."""
        if _libc.syncfs(fd):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def commit(self, connection: sqlite3.Connection) -> None:
        """Commit an index transaction; a sqlite3.Error means that it was rolled back."""
        connection.execute("COMMIT")


def _give_to_owner(name: str, dir_fd: int) -> None:
    if os.geteuid() == 0 and (owner := os.fstat(dir_fd)).st_uid != 0:
        with suppress(PermissionError):  # root of a container may not
            os.chown(name, owner.st_uid, owner.st_gid, dir_fd=dir_fd, follow_symlinks=False)


def is_no_space(error: Exception) -> bool:
    """Whether the disk refused for want of bytes, inodes or a user's quota."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def opened(ops: FileOps, name: str, flags: int, dir_fd: int) -> Iterator[int]:
    fd = ops.open(name, flags, dir_fd)
    try:
        yield fd
    finally:
        ops.close(fd)


def kept_open(fd: int, stack: ExitStack) -> int:
    """``fd``, closed with ``stack``, which ignores an error of closing it."""

    def close() -> None:
        with suppress(OSError):
            os.close(fd)

    stack.callback(close)
    return fd


class KvikioFileOps(FileOps):
    """Reads through at least ``threads`` threads of KvikIO into host memory, so not by GPUDirect
    Storage (GDS). These threads start when KvikIO is imported and do not survive a fork."""

    def __init__(self, threads: int = 1) -> None:
        import kvikio
        import kvikio.defaults as options

        self._open: Any = kvikio.CuFile
        options.set("compat_mode", kvikio.CompatMode.ON)
        # Otherwise KvikIO reads through the page cache, for 1.5 to 4 times the CPU time.
        options.set("auto_direct_io_read", True)
        if options.get("num_threads") < threads:
            options.set("num_threads", threads)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read all of ``buffers``; a file that ends before is an OSError too."""
        place = offset
        try:
            # The path leads to the open file itself, whatever its name is now. To open it takes 10
            # us, and a page is one reading or two: not worth keeping it open.
            with self._open(f"/proc/self/fd/{fd}", "r") as file, ExitStack() as reads:
                for buffer in buffers:
                    # One task each: before 26.10 KvikIO reports the first task that fails while
                    # others still write. Until all are done, the memory is not the caller's.
                    size = task_size = buffer.nbytes
                    reads.callback(file.pread(buffer, size, place, task_size).get)
                    place += size
        except RuntimeError as error:
            raise OSError(errno.EIO, f"kvikio: {error}") from None
        return place - offset


def best_file_ops(config: HCacheConfig) -> FileOps:
    """The file operations for option ``reader``, or those for ``posix``, with a line in the log."""
    if config.reader == "kvikio":
        mode, why = kvikio_state()
        if mode != "nothing":
            return KvikioFileOps(config.io_threads * len(config.dirs))
        logger.warning("hcache: posix reads pages, although 'reader' is 'kvikio': %s", why)
    return FileOps()


class LockedError(TimeoutError):
    """Another user of a folder keeps its lock."""


class FolderLock:
    """The lock of one store folder, across threads and processes. Not reentrant. It is held to
    change the index or names of page files. A killed process lets go of it. ``fd`` is the lock
    file, opened for this object alone; None locks nothing, in a folder that is only read.

    ``batch``: how many pages to change while it is held once. It follows the time that the last
    batches took, so that others wait for some 20 ms, or for a commit of the smallest batch.
    Between two batches others get it."""

    def __init__(self, fd: int | None) -> None:
        self._fd, self.batch, self._pause_until = fd, _FIRST_BATCH, 0.0
        self._thread_lock = threading.Lock()

    def batches(self, items: Iterable[_Item]) -> Iterator[list[_Item]]:
        """Batches of pages to change, each while the lock is held once."""
        left = iter(items)
        while some := list(islice(left, self.batch)):
            yield some

    @contextmanager
    def held(self, seconds: float, *, batch: int = 0) -> Iterator[None]:
        """Hold the lock; a LockedError if it was not free within ``seconds``. Meanwhile a ``batch``
        of so many pages is changed."""
        if self._fd is None:
            yield
            return
        late = LockedError(errno.ETIMEDOUT, "another user of the folder keeps its lock")
        deadline = time.monotonic() + seconds
        if batch and (pause := self._pause_until - time.monotonic()) > 0:
            time.sleep(pause)
        with ExitStack() as held:
            if not self._thread_lock.acquire(timeout=max(seconds, 0)):
                raise late
            held.callback(self._thread_lock.release)
            wait = _SHORTEST_WAIT
            while not try_lock(self._fd):
                if time.monotonic() + wait > deadline:
                    raise late
                time.sleep(wait)
                wait = min(wait * 1.5, _LONGEST_WAIT)
            held.callback(fcntl.flock, self._fd, fcntl.LOCK_UN)
            began = time.monotonic()
            yield
            took = time.monotonic() - began
            self._pause_until = began + took + _PAUSE
            if took > _HELD_SECONDS and batch:
                self.batch = max(_SMALLEST_BATCH, self.batch // 2)
            elif took < _HELD_SECONDS / 2 and batch >= self.batch:
                self.batch = min(_LARGEST_BATCH, 2 * self.batch)


def try_lock(fd: int) -> bool:
    """Take the lock of an open file for this open file alone, if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Alignment(NamedTuple):
    """The demands of a file system on direct I/O."""

    flags: int  # os.O_DIRECT, or 0 if it has none
    memory: int  # addresses must be multiples of this
    length: int  # offsets and lengths must be multiples of this


BUFFERED = Alignment(0, 1, 1)
_ZEROS = memoryview(mmap.mmap(-1, BLOCK)).toreadonly()


class Scratch(threading.local):
    """Aligned memory of the calling thread: ``size`` bytes to bounce through, room for headers."""

    def __init__(self, size: int) -> None:
        self.bounce = memoryview(mmap.mmap(-1, size))
        self._header = memoryview(mmap.mmap(-1, 4 * BLOCK))
        self.end = memoryview(mmap.mmap(-1, BLOCK))

    def header(self, length: int) -> memoryview:
        if length > len(self._header):
            self._header = memoryview(mmap.mmap(-1, length))
        return self._header[:length]


class PageIO:
    """Reads and writes stretches of the files of one file system, directly if it can. Memory that
    direct I/O (O_DIRECT) does not take goes through an aligned buffer of the calling thread, of
    ``buffer_bytes``; its bytes are counted as copied."""

    def __init__(self, ops: FileOps, alignment: Alignment, buffer_bytes: int) -> None:
        self._ops, self.alignment, self.scratch = ops, alignment, Scratch(buffer_bytes)

    def write(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write ``pieces`` as the file ``fd``, padded to 4096 bytes; returns the bytes copied."""
        length = sum(piece.nbytes for piece in pieces)
        whole = round_up(length)
        if (divided := _divided(pieces, 0, self.alignment)) is not None:
            body, tail = divided
            end = self.scratch.end[: whole - length + len(tail)]
            end[: len(tail)], end[len(tail) :] = tail, bytes(whole - length)
            move_all(self._ops.write, fd, [*body, end] if end else body, 0, whole)
            return len(tail)
        file, bounce = PageMemory([*pieces, _ZEROS[: whole - length]]), self.scratch.bounce
        for start in range(0, whole, len(bounce)):
            size = min(len(bounce), whole - start)
            for piece, room in _beside(file.pieces(start, size), bounce):
                np.copyto(room, piece)
            move_all(self._ops.write, fd, [bounce[:size]], start, size)
        return length

    def read(self, fd: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill ``pieces`` from ``offset`` of a long enough file on; returns the bytes copied."""
        length = sum(piece.nbytes for piece in pieces)
        if (divided := _divided(pieces, offset, self.alignment)) is not None:
            body, tail = divided
            # No further than the block in which a file may end: KvikIO reads nothing past it.
            cut = offset + length - len(tail)
            end = self.scratch.end[: round_up(cut + len(tail)) - cut if tail else 0]
            move_all(self._ops.read, fd, [*body, end] if end else body, offset, length)
            tail[:] = end[: len(tail)]
            return len(tail)
        target, bounce, done = PageMemory(pieces), self.scratch.bounce, 0
        while done < length:
            skipped = (offset + done) % BLOCK
            size = min(length - done, len(bounce) - skipped)
            blocks = [bounce[: round_up(skipped + size)]]
            move_all(self._ops.read, fd, blocks, offset + done - skipped, skipped + size)
            for piece, room in _beside(target.pieces(done, size), bounce[skipped:]):
                np.copyto(piece, room)
            done += size
        return length


def move_all(move: _Move, fd: int, pieces: Sequence[memoryview], offset: int, least: int) -> None:
    """Read or write (``move``) the first ``least`` bytes of ``pieces`` at least: there, a file may
    end. It had its right length a moment ago, so that less is an OSError."""
    while (done := move(fd, pieces, offset)) < least:
        if done <= 0:
            raise OSError(errno.EIO, "the file system moved too little, as of a cut file")
        offset += done
        least -= done
        pieces = PageMemory(pieces).pieces(done, sum(piece.nbytes for piece in pieces) - done)


def probe_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """The demands of direct I/O in a folder, found by trying a file ``name`` there."""
    room = memoryview(mmap.mmap(-1, 4 * BLOCK))
    with _unless_refused():
        fd = ops.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, dir_fd)
        try:
            # Small demands first: every step asks for more than the one before.
            for start, first in ((64, 512), (512, 512), (64, BLOCK), (512, BLOCK), (BLOCK, BLOCK)):
                parts = [room[start:][:first], room[2 * BLOCK + start :][: BLOCK - first]]
                parts = [part for part in parts if part]
                with _unless_refused():
                    if ops.write(fd, parts, 0) == BLOCK and ops.read(fd, parts, 0) == BLOCK:
                        return Alignment(os.O_DIRECT, start, first)
        finally:
            ops.close(fd)
            ops.unlink(name, dir_fd)
    return BUFFERED


def reading_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """The demands of direct reads in a folder: whole blocks, if its file ``name`` is read so."""
    room = memoryview(mmap.mmap(-1, BLOCK))
    with _unless_refused(), opened(ops, name, os.O_RDONLY | os.O_DIRECT, dir_fd) as fd:
        ops.read(fd, [room], 0)
        return Alignment(os.O_DIRECT, BLOCK, BLOCK)
    return BUFFERED


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Ignore that a file system refuses direct I/O."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _divided(
    pieces: Sequence[memoryview], offset: int, alignment: Alignment
) -> tuple[Sequence[memoryview], memoryview] | None:
    """The part of the pieces that direct I/O takes as it lies, and the end of the last one, which
    is shorter than a block. None: it does not take them."""
    _, memory, length = alignment
    body, rest = [*pieces], pieces[-1].nbytes % length
    cut = pieces[-1].nbytes - rest
    body[-1:], tail = [pieces[-1][:cut]] if cut else [], pieces[-1][cut:]
    unaligned = any(p.nbytes % length or (memory > 1 and _address(p) % memory) for p in body)
    return None if unaligned or offset % length else (body, tail)


def _address(piece: memoryview) -> int:
    if piece.readonly:
        return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def _beside(
    pieces: Sequence[memoryview], flat: memoryview
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Every piece, and its part of ``flat``: numpy copies without holding the interpreter lock."""
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        yield np.frombuffer(piece, np.uint8), np.frombuffer(flat[begin:end], np.uint8)
