"""One store folder on disk, opened.

::

    <folder>/hcache-store.json   marker: this folder is ours, format, identity
    <folder>/lock                held by whoever changes index or names
    <folder>/index/              lmdb
    <folder>/pages/<2 digits>/   page files
    <folder>/server.json         what the last server said about itself
    <folder>/sessions/<token>/   files being written by one open store
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from hcache_backend.store.file_ops import FOLDER, FileOps, kept_open, opened
from hcache_backend.store.index import INDEX_FILE, INDEX_FORMAT, Index
from hcache_backend.store.lock import FolderLock
from hcache_backend.store.page_io import PageIO, probe_alignment
from hcache_backend.store.session import SESSIONS, Session, remove_dead_sessions

MARKER = "hcache-store.json"
SERVER_REPORT = "server.json"
FOLDER_FORMAT = 1
SHARDS = frozenset(f"{number:02x}" for number in range(256))
_LOCK = "lock"
_INDEX = "index"
_PAGES = "pages"
_OPEN_SECONDS = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class NotOurFolderError(OSError):
    """The folder has files that are not a page store's; nothing in it was touched."""


class Folder:
    """An open store folder; what its disk refuses is an OSError.

    Args:
        path: The folder.
        ops: The file operations.
        buffer_bytes: Size of the aligned buffer of every thread that reads or writes pages.
        create: Make the folder, or make an empty one a store's.

    Attributes:
        root_fd: The folder.
        pages_fd: Its ``pages``.
        session: Where this store writes files before they get their names.
        lock: The folder's lock.
        index: The index.
        io: Reads and writes page files.
        index_is_partial: Page files may be there that the index does not know.
        users: How many hold it open; counted by :class:`~hcache_backend.store.presence.Presence`.

    Raises:
        NotOurFolderError: It is not empty and not a store's.
        OSError: It cannot be used.
    """

    def __init__(self, path: Path, ops: FileOps, buffer_bytes: int, *, create: bool) -> None:
        self.path = path
        self.ops = ops
        self.users = 0
        if create:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            self.root_fd = kept_open(os.open(path, FOLDER), stack)
            _check_marker(path, ops, self.root_fd, create)
            self.lock = FolderLock(
                kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, self.root_fd), stack)
            )
            with self.lock.held(_OPEN_SECONDS):
                for name in (_INDEX, _PAGES, SESSIONS):
                    _ensure_folder(ops, name, self.root_fd)
                self.pages_fd = kept_open(ops.open(_PAGES, FOLDER, self.root_fd), stack)
                remove_dead_sessions(ops, self.root_fd)
                self.session = Session(ops, self.root_fd)
                stack.callback(self.session.close)
                self.index = _open_index(path, ops, self.root_fd)
                stack.callback(self.index.close)
                alignment = probe_alignment(ops, self.session.fd, "probe")
                self.io = PageIO(ops, alignment, buffer_bytes)
                known = (self.index.meta(b"complete"), self.index.meta(b"boot"))
                self.index_is_partial = known != (INDEX_FORMAT, _boot_id())
                if self.index_is_partial and self._holds_no_pages():
                    self.index.set_meta(complete=INDEX_FORMAT, boot=_boot_id())
                    self.index_is_partial = False
            self._index_inode = (path / _INDEX).stat().st_ino
            self._index_file_inode = (path / _INDEX / INDEX_FILE).stat().st_ino
            self._open_files = stack.pop_all()

    @contextmanager
    def shard(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The open folder of page files whose keys begin with ``name``.

        Args:
            make: Make it when it is missing.
        """
        try:
            fd = self.ops.open(name, FOLDER, self.pages_fd)
        except FileNotFoundError:
            if not make:
                raise
            self.ops.make_folder(name, self.pages_fd)
            fd = self.ops.open(name, FOLDER, self.pages_fd)
        try:
            yield fd
        finally:
            # Nothing was written through it, so a failure to close it means nothing.
            with contextlib.suppress(OSError):
                self.ops.close(fd)

    def shards(self) -> list[str]:
        """The shard folders that are there."""
        return sorted(SHARDS.intersection(self.ops.list(self.pages_fd)))

    def is_in_place(self) -> bool:
        """Whether path and index still lead to what was opened."""
        try:
            here = self.path.stat()
            index = (self.path / _INDEX).stat()
            opened = os.fstat(self.root_fd)
        except OSError:
            return False
        return os.path.samestat(here, opened) and index.st_ino == self._index_inode

    def index_file_is_gone(self) -> bool:
        """Whether the index that is open has lost its file: nobody else would find its entries."""
        try:
            return (self.path / _INDEX / INDEX_FILE).stat().st_ino != self._index_file_inode
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def mark_index_complete(self) -> None:
        """State that the index knows every page file."""
        with self.lock.held(_OPEN_SECONDS):
            self.index.set_meta(complete=INDEX_FORMAT, boot=_boot_id())
        self.index_is_partial = False

    def set_index_aside(self) -> None:
        """Take a broken index away; the next opening makes a new one from the page files."""
        with self.lock.held(_OPEN_SECONDS):
            if self.is_in_place():  # else another process was faster
                _set_aside(self.ops, self.root_fd)

    def close(self) -> None:
        """Remove what is unfinished and let go of everything."""
        self._open_files.close()

    def _holds_no_pages(self) -> bool:
        for name in self.shards():
            with self.shard(name) as fd:
                if self.ops.list(fd):
                    return False
        return True


def is_store_folder(path: Path) -> bool:
    """Whether ``path`` bears a store's marker."""
    return (path / MARKER).is_file() and not (path / MARKER).is_symlink()


def _check_marker(path: Path, ops: FileOps, root_fd: int, create: bool) -> None:
    names = ops.list(root_fd)
    if MARKER in names and _marker_is_whole(path, ops, root_fd):
        return
    # A marker that a power cut tore, or a first opening that was interrupted, is no reason to
    # refuse; anything that no store makes is.
    own = {MARKER, _LOCK, _INDEX, _PAGES, SESSIONS, SERVER_REPORT} if MARKER in names else set()
    unfinished = (f".{MARKER}.", f".{SERVER_REPORT}.")
    strangers = [name for name in names if name not in own and not name.startswith(unfinished)]
    if strangers:
        what = f"its {MARKER} is damaged" if own else f"it has no {MARKER}"
        reason = f"it is not empty and not a page store's ({what})"
        raise NotOurFolderError(errno.ENOTEMPTY, reason, str(path))
    if not create:
        raise FileNotFoundError(errno.ENOENT, f"there is no {MARKER}", str(path))
    os.fchmod(root_fd, 0o700)
    temporary = f".{MARKER}.{secrets.token_hex(4)}"
    text = json.dumps({"format": FOLDER_FORMAT, "id": secrets.token_hex(16)}).encode() + b"\n"
    with opened(ops, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root_fd) as fd:
        if ops.write(fd, [text], 0) != len(text):
            raise OSError(errno.EIO, "short write", str(path / temporary))
        os.fsync(fd)
    ops.rename(temporary, root_fd, MARKER, root_fd)
    # Nothing else may come to stand in a folder without marker.
    ops.stat(MARKER, root_fd)
    os.fsync(root_fd)


def _marker_is_whole(path: Path, ops: FileOps, root_fd: int) -> bool:
    with opened(ops, MARKER, os.O_RDONLY, root_fd) as fd:
        text = os.pread(fd, 4096, 0)
    try:
        found = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        return False
    if found != FOLDER_FORMAT:
        reason = f"it has format {found}, this is format {FOLDER_FORMAT}"
        raise NotOurFolderError(errno.EINVAL, reason, str(path))
    return True


def _ensure_folder(ops: FileOps, name: str, dir_fd: int) -> None:
    with contextlib.suppress(FileExistsError):
        ops.make_folder(name, dir_fd)
    if not stat.S_ISDIR(ops.stat(name, dir_fd).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it must be a folder, not a link or file", name)


def _open_index(path: Path, ops: FileOps, root_fd: int) -> Index:
    try:
        return Index(path / _INDEX, ops)
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PanicError):
        _set_aside(ops, root_fd)
        _ensure_folder(ops, _INDEX, root_fd)
    try:
        return Index(path / _INDEX, ops)
    except lmdb.Error as error:
        raise OSError(errno.EIO, f"its index cannot be opened: {error}", str(path)) from None


def _set_aside(ops: FileOps, root_fd: int) -> None:
    ops.rename(_INDEX, root_fd, f"index-broken-{secrets.token_hex(4)}", root_fd)


def _boot_id() -> bytes:
    """Changes when the machine starts: what was not synced before may be lost."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"
