"""One store folder on disk, opened.

::

    <folder>/hcache-store.json   marker: this folder is ours, format, identity
    <folder>/lock                held to change index or names
    <folder>/index/              SQLite
    <folder>/pages/<2 digits>/   buckets of page files
    <folder>/server.json         a sidecar: the report of the last server
    <folder>/sessions/<token>/lock           held by an open store: leftovers of the dead are known
    <folder>/sessions/<token>/lane<number>/  files that it is writing
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import secrets
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from hcache_backend.store.file_ops import (
    FOLDER,
    FileOps,
    FolderLock,
    PageIO,
    kept_open,
    opened,
    probe_alignment,
    reading_alignment,
    try_lock,
)
from hcache_backend.store.index import INDEX_FILE, INDEX_FORMAT, Index, is_damaged

MARKER = "hcache-store.json"
SERVER_REPORT = "server.json"
FOLDER_FORMAT = 1
BUCKETS = frozenset(f"{number:02x}" for number in range(256))
BUFFER_BYTES = 4 << 20  # of each thread, for memory that direct I/O cannot use
_LOCK = "lock"
_INDEX = "index"
_PAGES = "pages"
_SESSIONS = "sessions"
LANES = 64
_LANE = "lane"
_OTHER_FILES = 256
"""Descriptors that a server has open besides those of its stores."""
_OPEN_SECONDS = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")
_HARMLESS = (
    "lost+found", ".snapshot", ".snapshots", "#snapshot", ".zfs", ".ckpt", "@eaDir", ".nfs*",
    "aquota.*", "quota.user", "quota.group", ".quota*", ".Trash", ".Trash-*", ".Trashes",
    ".fseventsd", ".Spotlight-*", ".DS_Store", "System Volume Information", "..data", "..20*",
    ".hcache-doctor-*",
)  # fmt: skip
"""Names of file systems, snapshots, quotas, desktops and volumes of Kubernetes in folders."""

logger = logging.getLogger("hcache.store")


class NotOurFolderError(OSError):
    """The folder has files that are not a page store's; nothing in it was touched."""


class Subfolders:
    """The folders in an open folder, of which ``most`` stay open until ``stack`` is closed.

    To open and close one each time would be a third of a page's system calls.
    """

    def __init__(self, ops: FileOps, parent_fd: int, most: int, stack: ExitStack) -> None:
        self._ops = ops
        self._parent_fd = parent_fd
        self._most = most
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self._kept = ExitStack()
        stack.callback(self._kept.close)

    @contextmanager
    def opened(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The folder ``name``; ``make`` a missing one, or another if it finds it deleted."""
        fd = self._known.get(name)
        if fd is not None and (not make or os.fstat(fd).st_nlink):
            yield fd
            return
        with ExitStack() as stack:
            yield self._open(name, fd, make, stack)

    def _open(self, name: str, known: int | None, make: bool, stack: ExitStack) -> int:
        """Open it anew, instead of a ``known`` one, to be kept or closed with ``stack``."""
        with self._lock:
            if (meanwhile := self._known.get(name)) is not None and meanwhile != known:
                return meanwhile
            try:
                fd = self._ops.open(name, FOLDER, self._parent_fd)
            except FileNotFoundError:
                if not make:
                    raise
                self._ops.make_folder(name, self._parent_fd)
                fd = self._ops.open(name, FOLDER, self._parent_fd)
            if known is None and len(self._known) >= self._most:
                return kept_open(fd, stack)
            self._known[name] = kept_open(fd, self._kept)
            return fd

    def kept(self, name: str) -> int:
        """The folder ``name``, made if it is missing; it stays open."""
        return self._known.get(name) or self._open(name, None, True, self._kept)

    def names(self) -> list[str]:
        return self._ops.list(self._parent_fd)


class Session:
    """The folder in which one open store writes files before they get their names.

    Files go to lanes in turn, which are in places apart. In one folder, ext4 without a journal
    passes every file deleted in the last minutes: after an eviction that takes longer than a page.
    It is made below ``root_fd``, the open store folder, whose lock is held.
    """

    def __init__(self, ops: FileOps, root_fd: int, lanes: int) -> None:
        self.token = secrets.token_hex(8)
        self._ops = ops
        self._root_fd = root_fd
        self._files = count()
        self._number = lanes
        with ExitStack() as stack:
            with opened(ops, _SESSIONS, FOLDER, root_fd) as sessions_fd:
                ops.make_folder(self.token, sessions_fd)
                self.fd = kept_open(ops.open(self.token, FOLDER, sessions_fd), stack)
            # No other process knows this file yet, so it is free.
            try_lock(kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, self.fd), stack))
            with suppress(OSError):  # most file systems cannot be asked
                ops.spread_folders(self.fd)
            self._lanes = Subfolders(ops, self.fd, lanes, stack)
            self._open_files = stack.pop_all()

    def new_file(self) -> int:
        return next(self._files)

    def place(self, number: int) -> tuple[int, str]:
        """The open folder of file ``number``, and its name there."""
        return self._lanes.kept(f"{_LANE}{number % self._number}"), str(number)

    def close(self) -> None:
        """Remove unfinished files; the next opening removes the rest."""
        with suppress(OSError), opened(self._ops, _SESSIONS, FOLDER, self._root_fd) as sessions_fd:
            _remove_session(self._ops, sessions_fd, self.token)
        self._open_files.close()


class Folder:
    """An open store folder. An error of its disk is an OSError.

    Args:
        create: Make the folder, or make an empty one a store's.
        readonly: Nothing in it changes, and it need not be writable: there is no session.
        descriptors: Number that it may keep open from one page to the next; at least 1.

    Attributes:
        users: Number of those that hold it open; :class:`~hcache_backend.store.disk.Disk` counts.
        lock: Protects a change from those of others.
        buckets: Folders of page files whose keys begin alike: :data:`BUCKETS`.
        index_is_partial: Page files may be there that the index does not know.

    Raises:
        NotOurFolderError: It is not empty and not a store's.
        OSError: It cannot be used.
    """

    session: Session

    def __init__(
        self,
        path: Path,
        ops: FileOps,
        *,
        create: bool = False,
        readonly: bool = False,
        descriptors: int = LANES,
    ) -> None:
        self.path = path
        self.ops = ops
        self.users = 0
        lanes = max(1, min(LANES, descriptors // 4))
        if create:
            if (problem := why_not(path, ops)) is not None:
                raise problem
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with ExitStack() as stack:
            self.root_fd = kept_open(os.open(path, FOLDER), stack)
            _check_marker(path, ops, self.root_fd, create)
            if readonly:
                self._open_to_read()
            else:
                self._open_to_write(stack, lanes)
            stack.callback(self.index.close)
            self._inodes = [path.stat().st_ino for path in self._index_paths]
            pages_fd = kept_open(ops.open(_PAGES, FOLDER, self.root_fd), stack)
            self.buckets = Subfolders(ops, pages_fd, descriptors - lanes, stack)
            stated = self.index.meta("complete"), self.index.meta("boot")
            self.index_is_partial = stated != (INDEX_FORMAT, _boot_id())
            if self.index_is_partial and not readonly and self._holds_no_pages():
                self.mark_index_complete()
            self._open_files = stack.pop_all()

    def _open_to_read(self) -> None:
        self.lock = FolderLock(None)
        self.io = PageIO(self.ops, reading_alignment(self.ops, self.root_fd, MARKER), BUFFER_BYTES)
        try:
            self.index = Index(self.path / _INDEX, self.ops, readonly=True)
        except sqlite3.Error as error:
            problem = (
                f"its index cannot be opened: {error}; hcache verify --rebuild makes a new one"
            )
            raise OSError(errno.EIO, problem, str(self.path)) from None

    def _open_to_write(self, stack: ExitStack, lanes: int) -> None:
        ops, root_fd = self.ops, self.root_fd
        _warn_of_others(self.path, root_fd)
        self.lock = FolderLock(kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, root_fd), stack))
        with self.lock.held(_OPEN_SECONDS):
            for name in (_INDEX, _PAGES, _SESSIONS):
                _ensure_folder(ops, name, root_fd)
            _remove_dead_sessions(ops, root_fd)
            self.session = Session(ops, root_fd, lanes)
            stack.callback(self.session.close)
            self.io = PageIO(ops, probe_alignment(ops, self.session.fd, "probe"), BUFFER_BYTES)
            self.index = _open_index(self.path, ops, root_fd)

    def close(self) -> None:
        self._open_files.close()

    def is_in_place(self) -> bool:
        """Whether path and index still lead to what was opened."""
        try:
            here, index = self.path.stat(), self._index_paths[0].stat()
            return os.path.samestat(here, os.fstat(self.root_fd)) and (
                index.st_ino == self._inodes[0]
            )
        except OSError:
            return False

    def index_file_is_gone(self) -> bool:
        """Whether the open index has lost its file: no other process would find its entries."""
        try:
            return self._index_paths[1].stat().st_ino != self._inodes[1]
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    @property
    def _index_paths(self) -> tuple[Path, Path]:
        return self.path / _INDEX, self.path / _INDEX / INDEX_FILE

    def mark_index_complete(self) -> None:
        """State that the index knows every page file."""
        with self.lock.held(_OPEN_SECONDS):
            self.index.set_meta(complete=INDEX_FORMAT, boot=_boot_id())
        self.index_is_partial = False

    def set_index_aside(self) -> None:
        """Take a broken index away; the next opening makes a new one from the page files."""
        with self.lock.held(_OPEN_SECONDS):
            if self.is_in_place():  # otherwise another process was faster
                _set_aside(self.ops, self.root_fd)

    def _holds_no_pages(self) -> bool:
        for name in BUCKETS.intersection(self.buckets.names()):
            with self.buckets.opened(name) as fd:
                if self.ops.list(fd):
                    return False
        return True


def descriptors_of_each(folders: int) -> int:
    """Descriptors that a store of ``folders`` folders may keep open in each."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LANES + len(BUCKETS)
    if allowed == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, (allowed - _OTHER_FILES) // (2 * folders)))


def is_store_folder(path: Path) -> bool:
    """Whether ``path`` bears a store's marker."""
    return (path / MARKER).is_file() and not (path / MARKER).is_symlink()


def why_not(path: Path, ops: FileOps) -> OSError | None:
    """Why no store can be opened in ``path`` now; None if one can. Changes nothing."""
    try:
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is a link to nothing", str(path))
        place = existing_part(path)
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if (kind := file_system_of(place)) in _NETWORK_FILE_SYSTEMS:
            problem = f"its file system is {kind}; the index needs a local one"
            raise OSError(errno.ENOTSUP, problem, str(path))
        if place == path:
            root_fd = os.open(path, FOLDER)
            try:
                _has_marker(path, ops, root_fd)
            finally:
                os.close(root_fd)
        used = (
            path / name for name in (_LOCK, _INDEX, f"{_INDEX}/{INDEX_FILE}", _PAGES, _SESSIONS)
        )
        for each in (place, *filter(Path.exists, used)):
            if not os.access(each, os.W_OK | os.R_OK | (os.X_OK if each.is_dir() else 0)):
                frozen = os.statvfs(each).f_flag & os.ST_RDONLY
                code = errno.EROFS if frozen else errno.EACCES
                raise OSError(code, os.strerror(code), str(each))
    except OSError as error:
        return error
    return None


def existing_part(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    while not os.path.exists(path):  # noqa: PTH110  raises nothing
        path = path.parent
    return path


def file_system_of(place: Path) -> str:
    """The kind of file system that a folder is on, such as ``ext4``; ``unknown`` without /proc."""
    best, kind = "", "unknown"
    resolved = str(place.resolve())
    mounts = _MOUNTS.read_text() if _MOUNTS.exists() else ""
    for line in mounts.splitlines():
        _, where, found, *_ = line.split(" ")
        where = where.replace("\\040", " ")
        inside = resolved == where or resolved.startswith(where.rstrip("/") + "/")
        if inside and len(where) >= len(best):
            best, kind = where, found
    return kind


def _has_marker(path: Path, ops: FileOps, root_fd: int) -> bool:
    """Whether it is a store; False: it may become one. A NotOurFolderError if it may not."""
    names = ops.list(root_fd)
    if MARKER in names:
        with opened(ops, MARKER, os.O_RDONLY, root_fd) as fd:
            text = os.pread(fd, 4096, 0)
        with suppress(ValueError, KeyError, TypeError):
            if (found := json.loads(text)["format"]) == FOLDER_FORMAT:
                return True
            reason = f"it has format {found}, this is format {FOLDER_FORMAT}"
            raise NotOurFolderError(errno.EINVAL, reason, str(path))
    # A marker that a power cut tore, or a first opening that was interrupted, is no reason to
    # refuse. Anything that neither a store nor an administrator's tools make is one.
    own = {MARKER, _LOCK, _INDEX, _PAGES, _SESSIONS, SERVER_REPORT} if MARKER in names else set()
    harmless = (f".{MARKER}.*", f".{SERVER_REPORT}.*", *_HARMLESS)
    strangers = sorted(
        name
        for name in names
        if name not in own and not any(fnmatch(name, pattern) for pattern in harmless)
    )
    if strangers:
        what = f"its {MARKER} is damaged" if own else f"it has no {MARKER}"
        listed = ", ".join(map(repr, strangers[:3])) + ", ..." * (len(strangers) > 3)
        reason = (
            f"it is not empty and not a page store's ({what}, and it holds {listed}); name a "
            "folder inside it"
        )
        raise NotOurFolderError(errno.ENOTEMPTY, reason, str(path))
    return False


def _check_marker(path: Path, ops: FileOps, root_fd: int, create: bool) -> None:
    """Refuse a folder that is no store; with ``create``, make it one if it can become one."""
    if _has_marker(path, ops, root_fd):
        return
    if not create:
        raise FileNotFoundError(errno.ENOENT, f"there is no {MARKER}", str(path))
    with suppress(PermissionError):  # of another user; logged at each opening
        os.fchmod(root_fd, 0o700)
    temporary = f".{MARKER}.{secrets.token_hex(4)}"
    text = json.dumps({"format": FOLDER_FORMAT, "id": secrets.token_hex(16)}).encode() + b"\n"
    with opened(ops, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root_fd) as fd:
        if ops.write(fd, [text], 0) != len(text):
            raise OSError(errno.EIO, "short write", str(path / temporary))
        os.fsync(fd)
    ops.rename(temporary, root_fd, MARKER, root_fd)
    # No page may come to a folder without marker.
    ops.stat(MARKER, root_fd)
    os.fsync(root_fd)


def _warn_of_others(path: Path, root_fd: int) -> None:
    status = os.fstat(root_fd)
    if status.st_mode & 0o022:
        logger.warning(
            "hcache: %s has mode %o and belongs to user %d: other users may replace its pages, "
            "and so change the replies of servers. Give it to this user, with mode 700",
            path,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
        )


def _ensure_folder(ops: FileOps, name: str, dir_fd: int) -> None:
    with suppress(FileExistsError):
        ops.make_folder(name, dir_fd)
    if not stat.S_ISDIR(ops.stat(name, dir_fd).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it must be a folder, not a link or file", name)


def _open_index(path: Path, ops: FileOps, root_fd: int) -> Index:
    try:
        try:
            return Index(path / _INDEX, ops)
        except sqlite3.Error as error:
            if not is_damaged(error):
                raise
        _set_aside(ops, root_fd)
        _ensure_folder(ops, _INDEX, root_fd)
        return Index(path / _INDEX, ops)
    except sqlite3.Error as error:
        problem = f"its index cannot be opened: {error}"
        raise OSError(errno.EIO, problem, str(path)) from None


def _set_aside(ops: FileOps, root_fd: int) -> None:
    ops.rename(_INDEX, root_fd, f"index-broken-{secrets.token_hex(4)}", root_fd)


def _boot_id() -> bytes:
    """Changes when the machine starts: what was not synced before may be lost."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"


def _remove_dead_sessions(ops: FileOps, root_fd: int) -> None:
    """Remove what killed stores left; the folder's lock is held."""
    with opened(ops, _SESSIONS, FOLDER, root_fd) as sessions_fd:
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
            return True  # sessions start under the folder's lock: none is about to make it


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


def write_sidecar(folder: Path, name: str, text: str, *, replace: bool = True) -> None:
    """Write a file beside the pages that only the owner may read. Readers see all of it or none.

    Without ``replace``, a file of this ``name`` stays. An OSError if it cannot be written.
    """
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text)
        if replace:
            temporary.replace(folder / name)
        else:
            with suppress(FileExistsError):
                os.link(temporary, folder / name)
    finally:
        with suppress(OSError):
            temporary.unlink()
