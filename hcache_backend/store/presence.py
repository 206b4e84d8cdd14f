"""Whether a store folder is there: it may fail, vanish and come back while the server runs."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hcache_backend.store.folder import Folder, descriptors_of_each, is_store_folder
from hcache_backend.store.index import is_damaged
from hcache_backend.store.stats import StoreContext

logger = logging.getLogger("hcache.store")

_ERRORS_IN_A_ROW = 8
_REST_SECONDS = 5.0


class OfflineError(OSError):
    """The folder is not there at the moment."""


class Presence:
    """A folder that comes and goes.

    A folder whose reads fail again and again rests for some seconds, so that a dying disk does not
    hold up every request. If its writes fail, only writing rests: a disk that is full, or was made
    read-only, can be read. A folder that vanishes is let go of, and opened again when it is back.
    """

    def __init__(self, path: Path, store: StoreContext) -> None:
        self.path = path
        self._config, self._ops, self._writer, self._stats, self._problems = store
        self._state = threading.Lock()
        self._folder: Folder | None = None
        self._errors_in_a_row = [0, 0]  # of reading and of writing; likewise:
        self._rest_until = [0.0, 0.0]
        self._index_is_broken = False
        self._had_own_device = False
        self._closed = False

    def attach(self, *, create: bool) -> None:
        """Open the folder; an OSError if it cannot be used."""
        try:
            descriptors = descriptors_of_each(len(self._config.dirs))
            size = self._config.buffer_bytes
            folder = Folder(self.path, self._ops, size, create=create, descriptors=descriptors)
        except sqlite3.Error as error:
            raise OSError(errno.EIO, f"its index: {error}", str(self.path)) from None
        with self._state:
            self._folder = folder
            folder.users = 1
            self._errors_in_a_row = [0, 0]
            self._rest_until = [0.0, 0.0]
            self._index_is_broken = False
        self._had_own_device = self.path.is_mount()
        if not folder.io.alignment.flags:
            logger.debug("hcache: %s has no direct I/O; reads and writes are buffered", self.path)

    def is_online(self, *, writing: bool = False) -> bool:
        """Whether it can be read, or written, now."""
        return self._folder is not None and not self._rests(writing)

    @contextmanager
    def use(self, *, writing: bool = False) -> Iterator[Folder]:
        """The open folder, which stays open while in use; OfflineError if it is not there."""
        with self._state:
            folder = self._folder
            if folder is None or self._rests(writing):
                raise OfflineError(errno.ENODEV, "the folder is offline", str(self.path))
            folder.users += 1
        try:
            yield folder
        finally:
            self._let_go(folder)

    def look_after(self) -> None:
        """Notice that the folder vanished or came back. Called now and then; never raises."""
        folder = self._folder
        if folder is not None and folder.is_in_place() and folder.index_file_is_gone():
            self._index_is_broken = True
        if folder is not None and self._index_is_broken:
            self._problems.report(
                "index", f"{self.path}: the index is damaged or gone; it is made anew"
            )
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
            folder, self._folder = self._folder, None
        if folder is not None:
            self._let_go(folder)

    def close(self) -> None:
        """Let go for good."""
        self._closed = True
        self.detach()

    def worked(self, *, writing: bool = False) -> None:
        """Note that reading, or writing, the folder succeeded."""
        self._errors_in_a_row[writing] = 0

    def failed(self, what: str, error: Exception, *, writing: bool = False) -> None:
        """Log and count that the operation ``what`` failed, which read or wrote the folder."""
        self._problems.report(f"{what} {self.path}", f"{self.path}: {what} failed: {error}")
        if isinstance(error, sqlite3.Error):
            self._stats.add(index_errors=1)
        if is_damaged(error):
            self._index_is_broken = True
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            return  # the process has too many files open: no fault of the disk
        self._errors_in_a_row[writing] += 1
        if self._errors_in_a_row[writing] >= _ERRORS_IN_A_ROW:
            self._errors_in_a_row[writing] = 0
            self._rest_until[writing] = time.monotonic() + _REST_SECONDS
            use = "written" if writing else "used"
            self._problems.report(
                f"rest {writing} {self.path}",
                f"{self.path} failed {_ERRORS_IN_A_ROW} times in a row; not {use} for "
                f"{_REST_SECONDS:.0f} s",
            )

    def _rests(self, writing: bool) -> bool:
        """Whether it is left alone for now. A disk that cannot be read is not written, either."""
        until = self._rest_until
        return time.monotonic() < (max(until[False], until[True]) if writing else until[False])

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
        logger.info("hcache: %s works again", self.path)

    def _let_go(self, folder: Folder) -> None:
        with self._state:
            folder.users -= 1
            is_last = folder.users == 0
        if is_last:
            folder.close()
