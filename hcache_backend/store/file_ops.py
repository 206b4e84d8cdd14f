"""File operations of the store in one small interface, so that faults can be injected.

All names are single path components below an open folder (``dir_fd``), and links are never
followed: nothing inside a store folder can lead out of it. Every method raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from hcache_backend.config import HCacheConfig
from hcache_backend.format.envelope import BLOCK, round_up
from hcache_backend.format.units import PageMemory
from hcache_backend.store.kvikio_state import kvikio_state

logger = logging.getLogger("hcache.store")

Buffer = memoryview | bytearray | bytes

FOLDER = os.O_RDONLY | os.O_DIRECTORY
"""The flags that open a folder."""
MAX_VECTORS = 1024
"""Pieces of memory that one system call takes at most."""

_libc = ctypes.CDLL(None, use_errno=True)
_GET_FLAGS, _SET_FLAGS = (
    direction << 30 | struct.calcsize("l") << 16 | ord("f") << 8 | number
    for direction, number in ((2, 1), (1, 2))
)
_TOP_OF_HIERARCHIES = 0x20000
_SHORTEST_WAIT = 0.0002
_LONGEST_WAIT = 0.005


class FileOps:
    """The operations, as Linux does them."""

    def open(self, name: str, flags: int, dir_fd: int) -> int:
        """Open a file or folder; new files are readable by the owner only."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """``preadv``; may read less."""
        return os.preadv(fd, buffers[:MAX_VECTORS], offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """``pwritev``; may write less."""
        return os.pwritev(fd, buffers[:MAX_VECTORS], offset)

    def rename(self, source: str, source_fd: int, target: str, target_fd: int) -> None:
        """Rename, replacing what stands there."""
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def unlink(self, name: str, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def make_folder(self, name: str, dir_fd: int) -> None:
        """Make a folder that only the owner may use."""
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def spread_folders(self, fd: int) -> None:
        """Ask the file system to put the folders in this one apart (``chattr +T``)."""
        flags = bytearray(struct.calcsize("l"))
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
    """Reads through KvikIO's threads into host memory; the rest as usual.

    GPUDirect Storage (GDS) serves reads to the device only, so files are opened in KvikIO's
    compatibility mode. KvikIO's threads start when it is imported and do not survive a fork.
    It gets ``threads`` at least.
    """

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
        places = list(accumulate((buffer.nbytes for buffer in buffers), initial=offset))
        problems: list[RuntimeError] = []
        try:
            # The path leads to the open file itself, whatever its name is now. To open it takes 10
            # us, and a page is one reading or two: not worth keeping it open.
            with self._open(f"/proc/self/fd/{fd}", "r") as file:
                reads = []
                try:
                    for buffer, place in zip(buffers, places[:-1], strict=True):
                        # One task each: before 26.10 KvikIO reports the first task that fails
                        # while others still write.
                        size = task_size = buffer.nbytes
                        reads.append(file.pread(buffer, size, place, task_size))
                finally:
                    for read in reads:
                        # Until the last one is done, the memory is not the caller's.
                        try:
                            read.get()
                        except RuntimeError as error:
                            problems.append(error)
        except RuntimeError as error:
            problems.append(error)
        if problems:
            raise OSError(errno.EIO, f"kvikio: {problems[0]}")
        return places[-1] - offset


def best_file_ops(config: HCacheConfig) -> FileOps:
    """The file operations for the option ``reader``; logs what was chosen when it differs."""
    if config.reader == "posix":
        return FileOps()
    mode, why = kvikio_state()
    if mode == "nothing":
        logger.warning(
            "hcache: pages are read by 'posix', although option 'reader' is 'kvikio': %s", why
        )
        return FileOps()
    logger.debug("hcache: reading through kvikio")
    return KvikioFileOps(config.io_threads * len(config.dirs))


class FolderLock:
    """The lock of one store folder, across threads and processes; not reentrant.

    Who changes the index or the names of page files holds it. A process that is killed lets go of
    it. If one hangs, the others give up after their time limit. ``fd`` is the lock file, opened for
    this object alone; readers have None, which locks nothing.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._thread_lock = threading.Lock()

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Hold the lock; a TimeoutError if it was not free within ``seconds``."""
        if self._fd is None:
            yield
            return
        late = TimeoutError(errno.ETIMEDOUT, "another user of the folder keeps its lock")
        deadline = time.monotonic() + seconds
        if not self._thread_lock.acquire(timeout=max(seconds, 0)):
            raise late
        try:
            wait = _SHORTEST_WAIT
            while not try_lock(self._fd):
                if time.monotonic() + wait > deadline:
                    raise late
                time.sleep(wait)
                wait = min(wait * 1.5, _LONGEST_WAIT)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()


def try_lock(fd: int) -> bool:
    """Take the lock of an open file for this open file alone, if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Alignment(NamedTuple):
    """The demands of a file system on direct I/O.

    Attributes:
        flags: ``os.O_DIRECT``, or 0 when it has none.
        memory: Addresses must be multiples of this.
        length: Offsets and lengths must be multiples of this.
    """

    flags: int
    memory: int
    length: int


BUFFERED = Alignment(0, 1, 1)
_ZEROS = memoryview(mmap.mmap(-1, BLOCK)).toreadonly()


class Scratch(threading.local):
    """Aligned memory of the calling thread: ``size`` bytes to bounce through, room for headers."""

    def __init__(self, size: int) -> None:
        self.bounce = memoryview(mmap.mmap(-1, size))
        self._header = memoryview(mmap.mmap(-1, 4 * BLOCK))
        self.tail = memoryview(mmap.mmap(-1, BLOCK))

    def header(self, length: int) -> memoryview:
        if length > len(self._header):
            self._header = memoryview(mmap.mmap(-1, length))
        return self._header[:length]


class PageIO:
    """Reads and writes stretches of the files of one file system, directly if it can.

    Direct I/O (O_DIRECT) wants addresses, lengths and offsets that are multiples of a number. Other
    memory goes through the aligned buffer of the calling thread (``buffer_bytes``), and its bytes
    are counted as copied.
    """

    def __init__(self, ops: FileOps, alignment: Alignment, buffer_bytes: int) -> None:
        self._ops = ops
        self.alignment = alignment
        self.scratch = Scratch(buffer_bytes)

    def write(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write ``pieces`` as the file ``fd`` from its beginning, padded to 4096 bytes.

        Returns the bytes that were copied. An OSError also if the file system took only a part.
        """
        length = sum(piece.nbytes for piece in pieces)
        if padding := round_up(length) - length:
            pieces = [*pieces, _ZEROS[:padding]]
        if _aligned(pieces, 0, self.alignment):
            self._write_all(fd, pieces, 0)
            return 0
        file = PageMemory(pieces)
        bounce = self.scratch.bounce
        for start in range(0, file.length, len(bounce)):
            size = min(len(bounce), file.length - start)
            end = 0
            for piece in file.pieces(start, size):
                begin, end = end, end + piece.nbytes
                _copy(bounce[begin:end], piece)
            self._write_all(fd, [bounce[:size]], start)
        return length

    def read(self, fd: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill ``pieces`` from ``offset`` of a file on, which is known to be long enough.

        Returns the bytes that were copied. An OSError also if only a part could be read.
        """
        if _aligned(pieces, offset, self.alignment):
            self._read_all(fd, pieces, offset, sum(piece.nbytes for piece in pieces))
            return 0
        target = PageMemory(pieces)
        bounce = self.scratch.bounce
        done = 0
        while done < target.length:
            skipped = (offset + done) % BLOCK
            size = min(target.length - done, len(bounce) - skipped)
            room = bounce[: round_up(skipped + size)]
            self._read_all(fd, [room], offset + done - skipped, skipped + size)
            end = skipped
            for piece in target.pieces(done, size):
                begin, end = end, end + piece.nbytes
                _copy(piece, bounce[begin:end])
            done += size
        return target.length

    def _write_all(self, fd: int, pieces: Sequence[memoryview], offset: int) -> None:
        while pieces:
            written = self._ops.write(fd, pieces, offset)
            if written <= 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            offset += written
            pieces = _behind(pieces, written)

    def _read_all(self, fd: int, pieces: Sequence[memoryview], offset: int, least: int) -> None:
        """Fill the first ``least`` bytes of ``pieces`` at least: the file may end behind them."""
        while (got := self._ops.read(fd, pieces, offset)) < least:
            if got <= 0:
                # The file had its right length a moment ago, so it is the reading that fell short.
                raise OSError(errno.EIO, "the file system returned too little, as of a cut file")
            offset += got
            least -= got
            pieces = _behind(pieces, got)


def probe_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """The demands of direct I/O in a folder, found by trying a file ``name`` there."""
    room = memoryview(mmap.mmap(-1, 4 * BLOCK))
    with _unless_refused():
        fd = ops.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, dir_fd)
        try:
            # Small demands first: every step asks for more than the one before.
            for start, first in ((64, 512), (512, 512), (64, BLOCK), (512, BLOCK), (BLOCK, BLOCK)):
                vectors = [room[start : start + first]]
                if first < BLOCK:
                    second = 2 * BLOCK + start
                    vectors.append(room[second : second + BLOCK - first])
                with _unless_refused():
                    if ops.write(fd, vectors, 0) == BLOCK and ops.read(fd, vectors, 0) == BLOCK:
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


def _aligned(pieces: Sequence[memoryview], offset: int, alignment: Alignment) -> bool:
    _, memory, length = alignment
    if memory == 1:
        return True
    unaligned = [piece for piece in pieces if piece.nbytes % length or _address(piece) % memory]
    return not unaligned and offset % length == 0


def _behind(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """``pieces`` without their first ``done`` bytes."""
    for number, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[number + 1 :]]
        done -= piece.nbytes
    return []


def _address(piece: memoryview) -> int:
    if piece.readonly:
        return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy copies without holding the interpreter lock
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
