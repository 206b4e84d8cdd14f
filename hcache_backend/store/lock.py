"""The lock of one store folder, across threads and processes.

Whoever changes the index or the names of page files holds it. A process that is killed lets go of
it; one that hangs makes the others give up after their time limit instead of hanging too.
"""

from __future__ import annotations

import errno
import fcntl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHORTEST_WAIT = 0.0002
_LONGEST_WAIT = 0.005


class FolderLock:
    """Lock on an open file; not reentrant.

    Args:
        fd: The lock file, opened for this object alone.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._thread_lock = threading.Lock()

    @contextmanager
    def held(self, seconds: float) -> Iterator[None]:
        """Hold the lock.

        Raises:
            TimeoutError: It was not free within ``seconds``.
        """
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


def try_lock(fd: int) -> bool:
    """Take the lock of an open file for this open file alone, if it is free.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _late() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "another user of the folder keeps its lock")
