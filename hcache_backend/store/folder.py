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
from dataclasses import dataclass
from pathlib import Path

import lmdb

from hcache_backend.store.file_ops import FileOps, opened, opened_folder
from hcache_backend.store.index import INDEX_FILE, INDEX_FORMAT, Index
from hcache_backend.store.lock import FolderLock
from hcache_backend.store.page_io import Alignment, probe_alignment
from hcache_backend.store.session import SESSIONS, Session, remove_dead_sessions, start_session

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


@dataclass
class Folder:
    """An open store folder; made by :func:`open_folder`.

    Attributes:
        path: Where it was opened.
        ops: The file operations.
        root_fd: The folder.
        pages_fd: Its ``pages``.
        session: Where this store writes files before they get their names.
        lock: The folder's lock.
        index: The index.
        alignment: What direct I/O wants here.
        index_is_partial: Page files may be there that the index does not know.
        users: How many hold it open; counted by :class:`~hcache_backend.store.presence.Presence`.
    """

    path: Path
    ops: FileOps
    root_fd: int
    pages_fd: int
    session: Session
    lock: FolderLock
    index: Index
    alignment: Alignment
    index_is_partial: bool
    _lock_fd: int
    _index_inode: int
    _index_file_inode: int
    users: int = 0

    @contextmanager
    def shard(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The open folder of page files whose keys begin with ``name``.

        Args:
            make: Make it when it is missing.

        Raises:
            OSError: It cannot be opened, or it is a link.
        """
        try:
            fd = self.ops.open_folder(name, self.pages_fd)
        except FileNotFoundError:
            if not make:
                raise
            self.ops.make_folder(name, self.pages_fd)
            fd = self.ops.open_folder(name, self.pages_fd)
        try:
            yield fd
        finally:
            # Nothing was written through it, so a failure to close it means nothing.
            with contextlib.suppress(OSError):
                self.ops.close(fd)

    def shards(self) -> list[str]:
        """The shard folders that are there.

        Raises:
            OSError: They cannot be listed.
        """
        return _shards(self.ops, self.pages_fd)

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
        """State that the index knows every page file.

        Raises:
            OSError, lmdb.Error: It could not be stated.
        """
        with self.lock.held(_OPEN_SECONDS):
            self.index.set_meta(complete=INDEX_FORMAT, boot=boot_id())
        self.index_is_partial = False

    def set_index_aside(self) -> None:
        """Take a broken index away; the next opening makes a new one from the page files.

        Raises:
            OSError: It could not be moved.
        """
        with self.lock.held(_OPEN_SECONDS):
            if self.is_in_place():  # else another process was faster
                _set_aside(self.ops, self.root_fd)

    def close(self) -> None:
        """Remove what is unfinished and let go of everything."""
        self.session.close(self.root_fd)
        self.index.close()
        for fd in (self._lock_fd, self.pages_fd, self.root_fd):
            with contextlib.suppress(OSError):
                os.close(fd)


def boot_id() -> bytes:
    """Changes when the machine starts: what was not synced before may be lost."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"


def open_folder(path: Path, ops: FileOps, *, create: bool) -> Folder:
    """Open a store folder.

    Args:
        create: Make the folder, or make an empty one a store's.

    Raises:
        NotOurFolderError: It is not empty and not a store's.
        OSError: It cannot be used.
    """
    if create:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        root_fd = _opened(undo, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        _check_marker(path, ops, root_fd, create)
        lock_fd = _opened(undo, ops.open(_LOCK, os.O_RDWR | os.O_CREAT, root_fd))
        lock = FolderLock(lock_fd)
        with lock.held(_OPEN_SECONDS):
            for name in (_INDEX, _PAGES, SESSIONS):
                _ensure_folder(ops, name, root_fd)
            pages_fd = _opened(undo, ops.open_folder(_PAGES, root_fd))
            remove_dead_sessions(ops, root_fd)
            session = start_session(ops, root_fd)
            undo.callback(session.let_go)
            index = _open_index(path, ops, root_fd)
            undo.callback(index.close)
            alignment = probe_alignment(ops, session.fd, "probe")
            partial = index.meta(b"complete") != INDEX_FORMAT or index.meta(b"boot") != boot_id()
            if partial and _holds_no_pages(ops, pages_fd):
                index.set_meta(complete=INDEX_FORMAT, boot=boot_id())
                partial = False
        inodes = [place.stat().st_ino for place in (path / _INDEX, path / _INDEX / INDEX_FILE)]
        undo.pop_all()
    return Folder(
        path,
        ops,
        root_fd,
        pages_fd,
        session,
        lock,
        index,
        alignment,
        partial,
        lock_fd,
        *inodes,
    )


def is_store_folder(path: Path) -> bool:
    """Whether ``path`` bears a store's marker."""
    return (path / MARKER).is_file() and not (path / MARKER).is_symlink()


def _opened(undo: contextlib.ExitStack, fd: int) -> int:
    undo.callback(os.close, fd)
    return fd


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


def _shards(ops: FileOps, pages_fd: int) -> list[str]:
    return sorted(SHARDS.intersection(ops.list(pages_fd)))


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


def _holds_no_pages(ops: FileOps, pages_fd: int) -> bool:
    for name in _shards(ops, pages_fd):
        with opened_folder(ops, name, pages_fd) as fd:
            if ops.list(fd):
                return False
    return True
