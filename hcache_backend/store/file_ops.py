"""File operations and locks of the store, in one small interface, so that faults can be injected.

All names are single path components below an open folder (``dir_fd``), and links are never
followed: nothing inside a store folder can lead out of it. Every method raises OSError.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

Buffer = memoryview | bytearray | bytes

FOLDER = os.O_RDONLY | os.O_DIRECTORY
"""The flags that open a folder."""

_libc = ctypes.CDLL(None, use_errno=True)
MAX_VECTORS = 1024
"""The pieces of memory that one system call takes; the rest is for the next."""

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
        """``preadv``; may read less than asked for."""
        return os.preadv(fd, buffers[:MAX_VECTORS], offset)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """``pwritev``; may write less than asked for."""
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
        """Ask for the folders in this one to be put in places apart (``chattr +T``)."""
        flags = bytearray(struct.calcsize("l"))
        fcntl.ioctl(fd, _GET_FLAGS, flags)
        [known] = struct.unpack_from("i", flags)
        struct.pack_into("i", flags, 0, known | _TOP_OF_HIERARCHIES)
        fcntl.ioctl(fd, _SET_FLAGS, flags)

    def remove_folder(self, name: str, dir_fd: int) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def stat(self, name: str, dir_fd: int) -> os.stat_result:
        """``lstat``."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def list(self, fd: int) -> list[str]:
        """The names in a folder."""
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
    """A file or folder, open for as long as the block lasts."""
    fd = ops.open(name, flags, dir_fd)
    try:
        yield fd
    finally:
        ops.close(fd)


def kept_open(fd: int, stack: ExitStack) -> int:
    """``fd``, to be closed with ``stack``; that it cannot be closed means nothing by then."""

    def close() -> None:
        with suppress(OSError):
            os.close(fd)

    stack.callback(close)
    return fd


class FolderLock:
    """The lock of one store folder, across threads and processes; not reentrant.

    Whoever changes the index or the names of page files holds it. A process that is killed lets go
    of it; one that hangs makes the others give up after their time limit instead of hanging too.
    ``fd`` is the lock file, opened for this object alone.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread_lock = threading.Lock()

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Hold the lock; a TimeoutError if it was not free within ``seconds``."""
        deadline = time.monotonic() + seconds
        if not self._thread_lock.acquire(timeout=max(seconds, 0)):
            raise _late()
        try:
            wait = _SHORTEST_WAIT
            while not try_lock(self._fd):
                if time.monotonic() + wait > deadline:
                    raise _late()
                time.sleep(wait)
                wait = min(wait * 1.5, _LONGEST_WAIT)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()


class NoLock:
    """What those who only look hold instead of the folder's lock."""

    def held(self, seconds: float) -> AbstractContextManager[None]:
        return nullcontext()


def try_lock(fd: int) -> bool:
    """Take the lock of an open file for this open file alone, if it is free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _late() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "another user of the folder keeps its lock")
