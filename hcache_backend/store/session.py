"""Where one open store writes files before they get their names.

::

    sessions/<token>/lock            held while the store lives: leftovers of the dead are known
    sessions/<token>/lane<number>/   files being written

Files are made in lanes in turn, which are in places apart. In one folder, ext4 without a journal
passes every file deleted in the last minutes: after an eviction that takes longer than a page.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from contextlib import ExitStack, suppress
from itertools import count

from hcache_backend.store.file_ops import FOLDER, FileOps, kept_open, opened
from hcache_backend.store.lock import try_lock

SESSIONS = "sessions"
LANES = 64
_LANE = "lane"
_LOCK = "lock"


class Session:
    """The files that an open store is writing.

    Args:
        ops: The file operations.
        root_fd: The open store folder, whose lock is held.

    Attributes:
        token: Name of the folder of the files.
        fd: That folder.

    Raises:
        OSError: It could not be started.
    """

    def __init__(self, ops: FileOps, root_fd: int) -> None:
        self.token = secrets.token_hex(8)
        self._ops = ops
        self._root_fd = root_fd
        self._serial = count()
        self._lanes: dict[int, int] = {}
        self._lanes_lock = threading.Lock()
        with ExitStack() as stack:
            with opened(ops, SESSIONS, FOLDER, root_fd) as sessions_fd:
                ops.make_folder(self.token, sessions_fd)
                self.fd = kept_open(ops.open(self.token, FOLDER, sessions_fd), stack)
            if not try_lock(kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, self.fd), stack)):
                raise BlockingIOError(errno.EAGAIN, "a fresh session is locked", self.token)
            with suppress(OSError):  # most file systems cannot be asked
                ops.spread_folders(self.fd)
            self._open_files = stack.pop_all()

    def new_file(self) -> int:
        """The number of a file to be written."""
        return next(self._serial)

    def place(self, number: int) -> tuple[int, str]:
        """The open folder of file ``number``, and its name there.

        Raises:
            OSError: The folder cannot be made or opened.
        """
        lane = f"{_LANE}{number % LANES}"
        with self._lanes_lock:
            fd = self._lanes.get(number % LANES)
            if fd is None:
                with suppress(FileExistsError):
                    self._ops.make_folder(lane, self.fd)
                fd = kept_open(self._ops.open(lane, FOLDER, self.fd), self._open_files)
                self._lanes[number % LANES] = fd
        return fd, str(number)

    def close(self) -> None:
        """Remove what is unfinished; what cannot be removed goes at the next opening."""
        with suppress(OSError), opened(self._ops, SESSIONS, FOLDER, self._root_fd) as sessions_fd:
            _remove_session(self._ops, sessions_fd, self.token)
        self._open_files.close()


def remove_dead_sessions(ops: FileOps, root_fd: int) -> None:
    """Remove what stores left that were killed; the folder's lock is held.

    Raises:
        OSError: The sessions cannot be listed.
    """
    with opened(ops, SESSIONS, FOLDER, root_fd) as sessions_fd:
        for token in ops.list(sessions_fd):
            # One that cannot be removed is tried again at the next opening.
            with suppress(OSError):
                if _is_dead(ops, sessions_fd, token):
                    _remove_session(ops, sessions_fd, token)


def _is_dead(ops: FileOps, sessions_fd: int, token: str) -> bool:
    with opened(ops, token, FOLDER, sessions_fd) as session_fd:
        try:
            with opened(ops, _LOCK, os.O_RDWR, session_fd) as fd:
                return try_lock(fd)
        except FileNotFoundError:
            return True  # sessions start under the folder's lock, so nobody is about to make it


def _remove_session(ops: FileOps, sessions_fd: int, token: str) -> None:
    with opened(ops, token, FOLDER, sessions_fd) as session_fd:
        # The lock file goes last: what is left is then still recognised.
        for name in sorted(ops.list(session_fd), key=lambda name: name == _LOCK):
            if name.startswith(_LANE):
                with opened(ops, name, FOLDER, session_fd) as lane_fd:
                    for file in ops.list(lane_fd):
                        ops.unlink(file, lane_fd)
                ops.remove_folder(name, session_fd)
            else:
                ops.unlink(name, session_fd)
        ops.remove_folder(token, sessions_fd)
