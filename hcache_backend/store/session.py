"""Where one open store writes files before they get their names.

::

    sessions/<token>/lock            held while the store lives: leftovers of the dead are known
    sessions/<token>/lane<number>/   files being written

Files are made in lanes in turn. ext4 makes the files of a folder in one place of the disk, one
after the other, and where it has no journal it passes every file there that was deleted in the last
minutes: after an eviction that takes longer than writing a page. Lanes are in places apart. (XFS
puts every folder in another place anyhow.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from itertools import count

from hcache_backend.store.file_ops import FileOps, opened, opened_folder
from hcache_backend.store.lock import try_lock

SESSIONS = "sessions"
LANES = 64
_LANE = "lane"
_LOCK = "lock"


class Session:
    """The files that an open store is writing; made by :func:`start_session`.

    Attributes:
        token: Name of its folder.
        fd: Its folder.
    """

    def __init__(self, ops: FileOps, token: str, fd: int, lock_fd: int) -> None:
        self.token = token
        self.fd = fd
        self._ops = ops
        self._lock_fd = lock_fd
        self._serial = count()
        self._lanes: dict[int, int] = {}
        self._lanes_lock = threading.Lock()

    def new_file(self) -> int:
        """The number of a file to be written."""
        return next(self._serial)

    def place(self, number: int) -> tuple[int, str]:
        """The open folder of file ``number``, and its name there.

        Raises:
            OSError: The folder cannot be made or opened.
        """
        lane = number % LANES
        with self._lanes_lock:
            fd = self._lanes.get(lane)
            if fd is None:
                with contextlib.suppress(FileExistsError):
                    self._ops.make_folder(f"{_LANE}{lane}", self.fd)
                fd = self._lanes[lane] = self._ops.open_folder(f"{_LANE}{lane}", self.fd)
        return fd, str(number)

    def let_go(self) -> None:
        """Close everything; what is left is removed by whoever opens the store next."""
        for fd in (*self._lanes.values(), self.fd, self._lock_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._lanes.clear()

    def close(self, root_fd: int) -> None:
        """Remove what is unfinished and close everything."""
        with (
            contextlib.suppress(OSError),
            opened_folder(self._ops, SESSIONS, root_fd) as sessions_fd,
        ):
            _remove_session(self._ops, sessions_fd, self.token)
        self.let_go()


def start_session(ops: FileOps, root_fd: int) -> Session:
    """Start a session in an open store folder, whose lock is held.

    Raises:
        OSError: It could not be started.
    """
    token = secrets.token_hex(8)
    with contextlib.ExitStack() as undo:
        with opened_folder(ops, SESSIONS, root_fd) as sessions_fd:
            ops.make_folder(token, sessions_fd)
            fd = ops.open_folder(token, sessions_fd)
            undo.callback(os.close, fd)
        lock_fd = ops.open(_LOCK, os.O_RDWR | os.O_CREAT, fd)
        undo.callback(os.close, lock_fd)
        if not try_lock(lock_fd):
            raise BlockingIOError(errno.EAGAIN, "a fresh session is locked", token)
        with contextlib.suppress(OSError):  # most file systems cannot be asked
            ops.spread_folders(fd)
        undo.pop_all()
    return Session(ops, token, fd, lock_fd)


def remove_dead_sessions(ops: FileOps, root_fd: int) -> None:
    """Remove what stores left that were killed; the folder's lock is held.

    Raises:
        OSError: The sessions cannot be listed.
    """
    with opened_folder(ops, SESSIONS, root_fd) as sessions_fd:
        for token in ops.list(sessions_fd):
            # One that cannot be removed is tried again at the next opening.
            with contextlib.suppress(OSError):
                if _is_dead(ops, sessions_fd, token):
                    _remove_session(ops, sessions_fd, token)


def _is_dead(ops: FileOps, sessions_fd: int, token: str) -> bool:
    with opened_folder(ops, token, sessions_fd) as session_fd:
        try:
            with opened(ops, _LOCK, os.O_RDWR, session_fd) as fd:
                return try_lock(fd)
        except FileNotFoundError:
            return True  # sessions start under the folder's lock, so nobody is about to make it


def _remove_session(ops: FileOps, sessions_fd: int, token: str) -> None:
    with opened_folder(ops, token, sessions_fd) as session_fd:
        # The lock file goes last: what is left is then still recognised.
        for name in sorted(ops.list(session_fd), key=lambda name: name == _LOCK):
            if name.startswith(_LANE):
                with opened_folder(ops, name, session_fd) as lane_fd:
                    for file in ops.list(lane_fd):
                        ops.unlink(file, lane_fd)
                ops.remove_folder(name, session_fd)
            else:
                ops.unlink(name, session_fd)
        ops.remove_folder(token, sessions_fd)
