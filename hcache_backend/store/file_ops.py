"""File operations of the store in one small interface, so that faults can be injected.

All names are single path components below an open folder (``dir_fd``), and links are never
followed: nothing inside a store folder can lead out of it. Every method raises OSError.
"""

import ctypes
import errno
import fcntl
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")

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
        """Set the flag of folder ``fd`` by which ext4 puts its subfolders apart (``chattr +T``)."""
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
    """Close ``fd`` when ``stack`` ends, and ignore an error of that. Returns ``fd``."""

    def close() -> None:
        with suppress(OSError):
            os.close(fd)

    stack.callback(close)
    return fd


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
        remaining = iter(items)
        while batch := list(islice(remaining, self.batch)):
            yield batch

    @contextmanager
    def hold(self, seconds: float, *, batch: int = 0) -> Iterator[None]:
        """Hold the lock; a LockedError if it was not free within ``seconds``. ``batch``: number of
        pages that the block changes. Its time decides the next one's, which pauses for others."""
        if self._fd is None:
            yield
            return
        too_late = LockedError(errno.ETIMEDOUT, "another user of the folder keeps its lock")
        deadline = time.monotonic() + seconds
        if batch and (pause := self._pause_until - time.monotonic()) > 0:
            time.sleep(pause)
        with ExitStack() as stack:
            if not self._thread_lock.acquire(timeout=max(seconds, 0)):
                raise too_late
            stack.callback(self._thread_lock.release)
            wait = _SHORTEST_WAIT
            while not try_lock(self._fd):
                if time.monotonic() + wait > deadline:
                    raise too_late
                time.sleep(wait)
                wait = min(wait * 1.5, _LONGEST_WAIT)
            stack.callback(fcntl.flock, self._fd, fcntl.LOCK_UN)
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
