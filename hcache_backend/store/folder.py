"""One store folder on disk, opened, and the page files in it.

::

    <folder>/hcache-store.json   marker: this folder is ours, format, identity
    <folder>/lock                held to change index or names
    <folder>/index/              SQLite
    <folder>/pages/<2 digits>/   buckets of page files
    <folder>/server.json         a sidecar: the report of the last server
    <folder>/sessions/<token>/lock           held by an open store: leftovers of the dead are known
    <folder>/sessions/<token>/lane<number>/  files that it is writing
"""

import errno
import json
import os
import re
import resource
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import NamedTuple

from hcache_backend.format import file as page_file
from hcache_backend.format.envelope import BLOCK, PageName
from hcache_backend.format.units import Eighths, PageMemory, Unit
from hcache_backend.store.direct_io import Alignment, PageIO, find_alignment, reading_alignment
from hcache_backend.store.file_ops import (
    FOLDER,
    FileOps,
    FolderLock,
    is_no_space,
    kept_open,
    opened,
    try_lock,
)
from hcache_backend.store.index import INDEX_FILE, INDEX_FORMAT, Entry, Index, is_damaged
from hcache_backend.store.stats import logger

MARKER = "hcache-store.json"
SERVER_REPORT = "server.json"
FOLDER_FORMAT = 1
BUCKETS = frozenset(f"{number:02x}" for number in range(256))
BUFFER_BYTES = 4 << 20  # of each thread, for memory that direct I/O cannot use
_LOCK, _INDEX, _PAGES, _SESSIONS, _LANE = "lock", "index", "pages", "sessions", "lane"
_BROKEN = "index-broken-"
_OURS = (MARKER, _LOCK, SERVER_REPORT, f"{_BROKEN}*", "partition-*.json", "profile-*.json")
_INSIDE = {  # names in our folders
    _PAGES: "[0-9a-f][0-9a-f]",
    _INDEX: f"{INDEX_FILE}*",
    _SESSIONS: 16 * "[0-9a-f]",
}
LANES = 64
_OTHER_FILES = 256  # descriptors that a server has open besides those of its stores
_OPEN_SECONDS = 30.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")
_NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs")
_OTHERS_NAMES = (  # names of file systems, snapshots, quotas, desktops and volumes of Kubernetes
    "lost+found", ".snapshot", ".snapshots", "#snapshot", ".zfs", ".ckpt", "@eaDir", ".nfs*",
    "aquota.*", "quota.user", "quota.group", ".quota*", ".Trash", ".Trash-*", ".Trashes",
    ".fseventsd", ".Spotlight-*", ".DS_Store", "System Volume Information", "..data", "..20*",
    ".hcache-doctor-*",
)  # fmt: skip


class NotOurFolderError(OSError):
    """The folder has files that are not a page store's; nothing in it was touched."""


class SessionFile(NamedTuple):
    dir_fd: int  # of its lane: it has no name among the pages yet
    name: str


class PageRead(NamedTuple):
    """A file of page ``number`` of the caller's lists, and the ``part`` that it fills of the memory
    of the same or another shard."""

    number: int
    entry: Entry
    part: Eighths
    memory: PageMemory


@dataclass(eq=False)
class PageWrite:
    """The shard of page ``number`` of the caller's lists, on its way to the disk."""

    number: int
    entry: Entry
    memory: PageMemory
    layout: page_file.FileLayout
    file: SessionFile | None = None  # from when it is written until it is a page
    copied: int = 0  # bytes that went through aligned memory
    stored: bool = False  # it is a page now


class Subfolders:
    """The folders in an open folder, of which ``most`` stay open until ``stack`` is closed: to open
    and close one each time would be a third of a page's system calls."""

    def __init__(self, ops: FileOps, parent_fd: int, most: int, stack: ExitStack) -> None:
        self._ops, self._parent_fd, self._most = ops, parent_fd, most
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stack = stack.enter_context(ExitStack())

    @contextmanager
    def opened(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The open folder ``name``; ``make`` it if it is missing, or was deleted since."""
        fd = self._known.get(name)
        if fd is not None and (not make or os.fstat(fd).st_nlink):
            yield fd
            return
        with ExitStack() as stack:  # closes it again if ``most`` others stay open
            yield self._open(name, fd, make, stack)

    def keep_open(self, name: str) -> int:
        """The folder ``name``, made if it is missing; it stays open."""
        return self._known.get(name) or self._open(name, None, True, self._stack)

    def _open(self, name: str, stale: int | None, make: bool, stack: ExitStack) -> int:
        """Open a folder, instead of a ``stale`` (deleted) one; kept, or closed with ``stack``."""
        with self._lock:
            if (known := self._known.get(name)) is not None and known != stale:
                return known  # another thread was faster
            try:
                fd = self._ops.open(name, FOLDER, self._parent_fd)
            except FileNotFoundError:
                if not make:
                    raise
                self._ops.make_folder(name, self._parent_fd)
                fd = self._ops.open(name, FOLDER, self._parent_fd)
            if stale is None and len(self._known) >= self._most:
                return kept_open(fd, stack)
            self._known[name] = kept_open(fd, self._stack)
            return fd


class Session:
    """The folder in which one open store writes files before they get their names.

    Files go to lanes in turn, which are in places apart. In one folder, ext4 without a journal
    passes every file deleted in the last minutes: after an eviction that takes longer than a page.
    It is made below the open store folder ``root_fd``, whose lock is held.
    """

    def __init__(self, ops: FileOps, root_fd: int, lanes: int, stack: ExitStack) -> None:
        self.token = secrets.token_hex(8)  # name of the folder below ``sessions``
        self._ops, self._root_fd, self._lane_count = ops, root_fd, lanes
        self._files = count()
        with opened(ops, _SESSIONS, FOLDER, root_fd) as sessions_fd:
            ops.make_folder(self.token, sessions_fd)
            self.fd = kept_open(ops.open(self.token, FOLDER, sessions_fd), stack)
        # Held until the store is closed: a session with a free lock file is one of a dead process.
        try_lock(kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, self.fd), stack))
        with suppress(OSError):  # most file systems do not know the flag
            ops.spread_folders(self.fd)
        self._lanes = Subfolders(ops, self.fd, lanes, stack)
        stack.callback(self._remove)

    def new_file(self) -> SessionFile:
        """A further file, which is to be made."""
        number = next(self._files)
        dir_fd = self._lanes.keep_open(f"{_LANE}{number % self._lane_count}")
        return SessionFile(dir_fd, str(number))

    def _remove(self) -> None:
        """Remove unfinished files; the next opening removes the rest."""
        with suppress(OSError), opened(self._ops, _SESSIONS, FOLDER, self._root_fd) as sessions_fd:
            _remove_with_files(self._ops, self.token, sessions_fd)


class Folder:
    """An open store folder. An error of its disk is an OSError, a NotOurFolderError if it has files
    that are not a store's. Its ``lock`` is held for a change of the index or of names.

    ``index_is_partial``: page files may be there that the index does not know. ``users`` hold it
    open, the first one is who opened it; the :class:`.disk.Disk` counts them.

    Args:
        create: Make the folder, or make an empty one a store's.
        readonly: Nothing in it changes, and it need not be writable: there is no session.
        descriptors: Number that it may keep open from one page to the next; at least 1.
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
        self.path, self.ops, self.users = path, ops, 1
        if create:
            if (problem := problem_with(path, ops)) is not None:
                raise problem
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with ExitStack() as stack:
                self.root_fd = kept_open(os.open(path, FOLDER), stack)
                _check_marker(path, ops, self.root_fd, create)
                self._open_parts(stack, readonly, descriptors)
                index_paths = path / _INDEX, path / _INDEX / INDEX_FILE
                self._index_inodes = [file.stat().st_ino for file in index_paths]
                recorded = self.index.meta("complete"), self.index.meta("boot")
                self.index_is_partial = recorded != (INDEX_FORMAT, _boot_id())
                files = map(self.files_in, self.bucket_names())
                if self.index_is_partial and not readonly and not any(files):
                    self.mark_index_complete()
                self._open_files = stack.pop_all()
        except sqlite3.Error as error:
            hint = "; hcache verify --rebuild makes a new one" if is_damaged(error) else ""
            what = f"its index cannot be opened: {error}{hint}"
            raise OSError(errno.EIO, what, str(path)) from None

    def _open_parts(self, stack: ExitStack, readonly: bool, descriptors: int) -> None:
        ops, root_fd = self.ops, self.root_fd
        lanes = max(1, min(LANES, descriptors // 4))
        self.lock = FolderLock(None)
        if not readonly:
            lock_fd = kept_open(ops.open(_LOCK, os.O_RDWR | os.O_CREAT, root_fd), stack)
            self.lock = FolderLock(lock_fd)
        with self.lock.hold(_OPEN_SECONDS):
            if not readonly:
                for name in _INSIDE:
                    _ensure_folder(ops, name, root_fd)
                _warn_of_others(self.path, ops, root_fd)
                _remove_dead_sessions(ops, root_fd)
            pages_fd = kept_open(ops.open(_PAGES, FOLDER, root_fd), stack)
            self.buckets = Subfolders(ops, pages_fd, descriptors - lanes, stack)
            self.index = self._open_index(readonly)
            stack.callback(self.index.close)
            if readonly:
                alignment = reading_alignment(ops, root_fd, MARKER)
            else:
                alignment = self._open_session(stack, lanes)
        self.io = PageIO(ops, alignment, BUFFER_BYTES)

    def _open_session(self, stack: ExitStack, lanes: int) -> Alignment:
        """Open the session, and try direct I/O there. A full disk loses its oldest pages."""
        while True:
            try:
                with ExitStack() as opened:
                    self.session = Session(self.ops, self.root_fd, lanes, opened)
                    alignment = find_alignment(self.ops, self.session.fd, "probe")
                    stack.push(opened.pop_all())
                    return alignment
            except OSError as error:
                oldest = self.index.oldest(8) if is_no_space(error) else []
                if not oldest:
                    raise
                logger.warning("hcache: %s is full; its oldest pages go: %s", self.path, error)
                for entry in oldest:
                    self.delete_page(entry.name)
                self.index.remove(entry.name for entry in oldest)

    def _open_index(self, readonly: bool) -> Index:
        """Open or make the index; a damaged one is replaced by a new one, unless ``readonly``."""
        tries_left = 2  # first the index may be damaged, then the disk too full for a new one
        while True:
            try:
                if not readonly:
                    _ensure_folder(self.ops, _INDEX, self.root_fd)
                return Index(self.path / _INDEX, self.ops, readonly=readonly)
            except (OSError, sqlite3.Error) as error:
                damaged = is_damaged(error)
                if readonly or not tries_left or not (damaged or is_no_space(error)):
                    raise
                if damaged:
                    logger.warning("hcache: %s gets a new index: %s", self.path, error)
                    _set_aside(self.ops, self.root_fd)
                else:
                    _remove_old_indexes(self.ops, self.root_fd)
                tries_left -= 1

    def close(self) -> None:
        self._open_files.close()

    def is_in_place(self) -> bool:
        """Whether the path still leads to the opened folder, and that has the opened index."""
        try:
            same = os.path.samestat(self.path.stat(), os.fstat(self.root_fd))
            return same and (self.path / _INDEX).stat().st_ino == self._index_inodes[0]
        except OSError:
            return False

    def index_file_is_gone(self) -> bool:
        """Whether the file of the open index was deleted: other processes would find no entries."""
        try:
            return (self.path / _INDEX / INDEX_FILE).stat().st_ino != self._index_inodes[1]
        except OSError as error:
            return isinstance(error, FileNotFoundError)

    def mark_index_complete(self) -> None:
        with self.lock.hold(_OPEN_SECONDS):
            self.index.set_meta(complete=INDEX_FORMAT, boot=_boot_id())
        self.index_is_partial = False

    def set_index_aside(self) -> None:
        """Rename the folder of a broken index: the next opening makes a new index."""
        with self.lock.hold(_OPEN_SECONDS):
            if self.is_in_place():  # otherwise another process was faster
                _set_aside(self.ops, self.root_fd)

    def bucket_names(self) -> list[str]:
        with opened(self.ops, _PAGES, FOLDER, self.root_fd) as fd:
            return sorted(BUCKETS.intersection(self.ops.list(fd)))

    def files_in(self, bucket: str) -> list[str]:
        with self.buckets.opened(bucket) as fd:
            return self.ops.list(fd)

    def write_page(self, write: PageWrite) -> None:
        """Write the shard of a page to a new file of the session; an OSError leaves no file."""
        memory, layout = write.memory, write.layout
        header = self.io.scratch.header(layout.header_bytes)
        digests = memory.digests or memory.digests_of(layout.units)
        page_file.pack_header(header, write.entry.name, write.entry.writer, layout, digests)
        file = self.session.new_file()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.io.alignment.flags
        try:
            with opened(self.ops, file.name, flags, file.dir_fd) as fd:
                write.copied = self.io.write(fd, [header, *memory.parts])
        except OSError:
            self.remove_nameless(file)
            raise
        write.file = file

    def give_name(self, write: PageWrite) -> None:
        """Move the file that :meth:`write_page` wrote to its name among the pages."""
        assert write.file is not None
        name = write.entry.name
        with self.buckets.opened(name.bucket, make=True) as bucket_fd:
            self.ops.rename(write.file.name, write.file.dir_fd, name.file, bucket_fd)
        write.file, write.stored = None, True

    def remove_nameless(self, file: SessionFile | None) -> None:
        """Remove a file of the session, if there is one; if it stays, the next opening does it."""
        if file is not None:
            with suppress(OSError):
                self.ops.unlink(file.name, file.dir_fd)

    def has_file(self, name: PageName) -> bool:
        """Whether a page file is really there."""
        try:
            with self.buckets.opened(name.bucket) as bucket_fd:
                return stat.S_ISREG(self.ops.stat(name.file, bucket_fd).st_mode)
        except FileNotFoundError:
            return False

    def delete_page(self, name: PageName, only: os.stat_result | None = None) -> bool:
        """Delete a page file, if it is there; the lock is held, and the caller removes its entry.
        ``only``: delete the file of this status; False: another file has the name by now."""
        with suppress(FileNotFoundError), self.buckets.opened(name.bucket) as bucket_fd:
            if only is not None:
                now = self.ops.stat(name.file, bucket_fd)
                if not os.path.samestat(now, only) or now.st_mtime_ns != only.st_mtime_ns:
                    return False
            try:
                self.ops.unlink(name.file, bucket_fd)
            except IsADirectoryError:  # nobody reads a page there; it goes if it is empty
                with suppress(OSError):
                    self.ops.remove_folder(name.file, bucket_fd)
        return True

    def read_page(self, read: PageRead) -> tuple[int, int]:
        """Read a part of a page into its memory, and verify it. Returns its bytes, and how many of
        them were copied from aligned memory. Raises a DamagedFileError if the file does not agree
        with its entry or checksums, and a ValueError if the memory has another length."""
        _, entry, part, memory = read
        shard = entry.name.shard
        with self._opened(entry.name) as fd:
            try:
                _check_size(fd, entry.file_bytes)
                if shard == memory.shard and part == shard.eighths:
                    return _read_whole(self.io, fd, entry, memory)
                return _read_units(self.io, fd, entry, memory, part)
            except page_file.DamagedFileError as error:
                error.status = os.fstat(fd)
                raise

    def entry_of(self, name: PageName) -> Entry:
        """The entry that a page file with a sound header should have; its time of writing is its
        last use. Raises as :meth:`read_page`."""
        with self._opened(name) as fd:
            header = _read_header(self.io, fd)
            if name != header.name:
                raise page_file.DamagedFileError("its name is not the one in its header")
            layout = header.layout
            _check_size(fd, layout.file_bytes)
            # Anybody may have set another time; a last use is neither before 1970 nor ahead.
            used = min(max(os.fstat(fd).st_mtime_ns, 0), time.time_ns())
            return Entry(name, layout.header_bytes, layout.payload_bytes, header.writer, used)

    @contextmanager
    def _opened(self, name: PageName) -> Iterator[int]:
        """The open file of a page; a DamagedFileError if it is no regular file."""
        flags = os.O_RDONLY | self.io.alignment.flags
        with self.buckets.opened(name.bucket) as bucket_fd, ExitStack() as stack:
            try:
                fd = stack.enter_context(opened(self.ops, name.file, flags, bucket_fd))
            except OSError:  # of a link, say: then a DamagedFileError instead
                _check_is_file(self.ops.stat(name.file, bucket_fd))
                raise
            _check_is_file(os.fstat(fd))
            yield fd


def _check_is_file(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        error = page_file.DamagedFileError("it is a link, a folder, a FIFO or a device")
        error.status = status
        raise error


def _check_size(fd: int, file_bytes: int) -> None:
    if (size := os.fstat(fd).st_size) != file_bytes:
        raise page_file.DamagedFileError(f"it has {size} bytes, not {file_bytes}")


def _read_header(io: PageIO, fd: int) -> page_file.Header:
    first, size = io.scratch.header(BLOCK), os.fstat(fd).st_size
    if size < BLOCK:
        raise page_file.DamagedFileError(f"it has {size} bytes")
    io.read(fd, 0, [first])
    if (length := page_file.header_length(first)) > size:
        raise page_file.DamagedFileError(f"a header of {length} bytes in a file of {size}")
    header = io.scratch.header(length)
    if length > BLOCK:
        io.read(fd, 0, [header])
    return page_file.parse_header(header)


def _read_whole(io: PageIO, fd: int, entry: Entry, memory: PageMemory) -> tuple[int, int]:
    """Read a file that has exactly the shard of ``memory``; returns as :meth:`Folder.read_page`."""
    _check_memory(entry.payload_bytes, memory)
    data = io.scratch.header(entry.header_bytes)
    copied = io.read(fd, 0, [data, *memory.parts])
    header = page_file.parse_header(data)
    _check_names(header, entry)
    _verify(memory, header.layout.units, header.digests)
    return memory.length, copied


def _read_units(
    io: PageIO, fd: int, entry: Entry, memory: PageMemory, part: Eighths
) -> tuple[int, int]:
    """Read the units of ``part`` to their places in the memory, which may be another shard's."""
    header = _read_header(io, fd)
    _check_names(header, entry)
    table = header.layout.table
    _check_memory(page_file.file_layout(table, memory.shard).payload_bytes, memory)
    copied = 0
    length, runs = page_file.runs_between(table, header.name.shard, memory.shard, part)
    for offset, stretches, numbers, units in runs:
        pieces = [piece for stretch in stretches for piece in memory.pieces(*stretch)]
        copied += io.read(fd, offset, pieces)
        _verify(memory, units, tuple(header.digests[number] for number in numbers))
    return length, copied


def _check_names(header: page_file.Header, entry: Entry) -> None:
    layout = header.layout
    if (header.name, layout.header_bytes, layout.payload_bytes) != entry[:3]:
        raise page_file.DamagedFileError("it is the file of something else")


def _check_memory(payload_bytes: int, memory: PageMemory) -> None:
    if payload_bytes != memory.length:
        raise ValueError(f"{memory.shard} has {payload_bytes} bytes, the memory {memory.length}")


def _verify(memory: PageMemory, units: Sequence[Unit], digests: tuple[int, ...]) -> None:
    actual = memory.digests_of(units)
    if actual != digests:
        triples = zip(units, actual, digests, strict=True)
        wrong = next(unit for unit, digest, expected in triples if digest != expected)
        raise page_file.DamagedFileError(f"checksum of segment {wrong.segment}")


def descriptors_of_each(folders: int) -> int:
    """Descriptors that a store of ``folders`` folders may keep open in each."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LANES + len(BUCKETS)
    if allowed == resource.RLIM_INFINITY:
        return most
    return max(1, min(most, (allowed - _OTHER_FILES) // (2 * folders)))


def is_store_folder(path: Path) -> bool:
    return (path / MARKER).is_file() and not (path / MARKER).is_symlink()


def problem_with(path: Path, ops: FileOps) -> OSError | None:
    """The error with which opening a store in ``path`` would fail; or None. Changes nothing."""
    try:
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(errno.ENOENT, "it is a link to nothing", str(path))
        existing = existing_part(path)
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        if (kind := file_system_of(existing)) in _NETWORK_FILE_SYSTEMS:
            problem = f"its file system is {kind}; the index needs a local one"
            raise OSError(errno.ENOTSUP, problem, str(path))
        with ExitStack() as stack:
            if existing == path:
                _has_marker(path, ops, kept_open(os.open(path, FOLDER), stack))  # may raise
        parts = (_LOCK, _INDEX, f"{_INDEX}/{INDEX_FILE}", _PAGES, _SESSIONS)
        for part in (existing, *filter(Path.exists, map(path.joinpath, parts))):
            if not os.access(part, os.W_OK | os.R_OK | (os.X_OK if part.is_dir() else 0)):
                frozen = os.statvfs(part).f_flag & os.ST_RDONLY
                code = errno.EROFS if frozen else errno.EACCES
                raise OSError(code, os.strerror(code), str(part))
    except OSError as error:
        return error
    return None


def existing_part(path: Path) -> Path:
    """``path``, or the nearest folder above it that is there."""
    while not os.path.exists(path):  # noqa: PTH110  raises nothing
        path = path.parent
    return path


def device_of_root() -> int:
    return Path("/").stat().st_dev


def file_system_of(place: Path) -> str:
    """The kind of file system that a folder is on, such as ``ext4``; ``unknown`` without /proc."""
    mounts = _MOUNTS.read_bytes() if _MOUNTS.exists() else b""
    longest, kind = 0, "unknown"
    for line in mounts.splitlines():
        _, name, kind_here, *_ = line.split(b" ")
        # The kernel writes a blank, a tab, a line's end and a backslash as three octal digits.
        point = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), name)
        if len(point) >= longest and place.resolve().is_relative_to(os.fsdecode(point)):
            longest, kind = len(point), kind_here.decode()
    return kind


def _has_marker(path: Path, ops: FileOps, root_fd: int) -> bool:
    """Whether the folder is a store. False: it may become one; otherwise a NotOurFolderError."""
    names = ops.list(root_fd)
    if MARKER in names and stat.S_ISREG(ops.stat(MARKER, root_fd).st_mode):
        with opened(ops, MARKER, os.O_RDONLY, root_fd) as fd:
            text = os.pread(fd, 4096, 0)
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            if (version := json.loads(text)["format"]) == FOLDER_FORMAT:
                return True
            reason = f"it has format {version}, this is format {FOLDER_FORMAT}"
            raise NotOurFolderError(errno.EINVAL, reason, str(path))
    # Allowed are a torn marker, an interrupted first opening, the rest of a deleted store, and
    # files of an administrator's tools. Any other file is a reason to refuse.
    allowed = (f".{MARKER}.*", f".{SERVER_REPORT}.*", *_OTHERS_NAMES)
    others = sorted(name for name in names if not _is_ours(name, ops, root_fd))
    if others := [name for name in others if not any(fnmatch(name, kind) for kind in allowed)]:
        what = f"its {MARKER} is damaged" if MARKER in names else f"it has no {MARKER}"
        listed = ", ".join(map(repr, others[:3])) + ", ..." * (len(others) > 3)
        reason = f"it is not empty and not a page store's ({what}, and it holds {listed})"
        raise NotOurFolderError(errno.ENOTEMPTY, f"{reason}; name a folder inside it", str(path))
    return False


def _is_ours(name: str, ops: FileOps, root_fd: int) -> bool:
    """Whether a store makes a file or folder ``name``, and if it is a folder, all that is in it."""
    inside = _INSIDE.get(name)
    if inside is None:
        return any(fnmatch(name, kind) for kind in _OURS)
    with suppress(NotADirectoryError), opened(ops, name, FOLDER, root_fd) as fd:
        return all(fnmatch(file, inside) for file in ops.list(fd))
    return False


def _check_marker(path: Path, ops: FileOps, root_fd: int, create: bool) -> None:
    """Raise an OSError if the folder is no store; ``create``: write a marker, if it may be one."""
    if _has_marker(path, ops, root_fd):
        return
    if not create:
        raise FileNotFoundError(errno.ENOENT, f"there is no {MARKER}", str(path))
    with suppress(PermissionError):  # another user's folder; _warn_of_others logs that
        os.fchmod(root_fd, 0o700)
    temporary = f".{MARKER}.{secrets.token_hex(4)}"
    text = json.dumps({"format": FOLDER_FORMAT, "id": secrets.token_hex(16)}).encode() + b"\n"
    with opened(ops, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, root_fd) as fd:
        if ops.write(fd, [text], 0) != len(text):
            raise OSError(errno.EIO, "short write", str(path / temporary))
        os.fsync(fd)
    ops.rename(temporary, root_fd, MARKER, root_fd)
    ops.stat(MARKER, root_fd)  # raises if it is not there: then no page may be written
    os.fsync(root_fd)


def _warn_of_others(path: Path, ops: FileOps, root_fd: int) -> None:
    """Log the first folder of the store that other users may write, or another user owns."""
    parts = [(path, os.fstat(root_fd))]
    parts += [(path / name, ops.stat(name, root_fd)) for name in _INSIDE]
    for part, status in parts:
        if status.st_mode & 0o022 or status.st_uid not in (0, os.geteuid()):
            whose = f"mode {stat.S_IMODE(status.st_mode):o} and belongs to user {status.st_uid}"
            logger.warning(
                f"hcache: {part} has {whose}: other users may replace pages, and so change the "
                f"replies of servers. Give it to user {os.geteuid()}, with mode 700"
            )
            return


def _ensure_folder(ops: FileOps, name: str, dir_fd: int) -> None:
    with suppress(FileExistsError):
        ops.make_folder(name, dir_fd)
    if not stat.S_ISDIR(ops.stat(name, dir_fd).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "it must be a folder, not a link or file", name)


def _set_aside(ops: FileOps, root_fd: int) -> None:
    """Keep the index, and no older one, for those who ask what was wrong with it."""
    _remove_old_indexes(ops, root_fd)
    ops.rename(_INDEX, root_fd, f"{_BROKEN}{secrets.token_hex(4)}", root_fd)


def _remove_old_indexes(ops: FileOps, root_fd: int) -> None:
    for old in [name for name in ops.list(root_fd) if name.startswith(_BROKEN)]:
        with suppress(OSError):
            _remove_with_files(ops, old, root_fd)


def _remove_with_files(ops: FileOps, name: str, dir_fd: int) -> None:
    """Remove a folder of an index, or of a session, which has lanes."""
    with opened(ops, name, FOLDER, dir_fd) as fd:
        # The lock file goes last: what is left of a session is then still recognised.
        for file in sorted(ops.list(fd), key=lambda file: file == _LOCK):
            if file.startswith(_LANE):
                _remove_with_files(ops, file, fd)
            else:
                ops.unlink(file, fd)
        ops.remove_folder(name, dir_fd)


def _boot_id() -> bytes:
    """Changes when the machine starts: what was not synced before may be lost."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown"


def _remove_dead_sessions(ops: FileOps, root_fd: int) -> None:
    """Remove sessions of dead processes, with their files; the folder's lock is held."""
    with opened(ops, _SESSIONS, FOLDER, root_fd) as sessions_fd:
        for token in ops.list(sessions_fd):
            # One that cannot be removed is tried again at the next opening.
            with suppress(OSError):
                with opened(ops, token, FOLDER, sessions_fd) as session_fd:
                    try:
                        with opened(ops, _LOCK, os.O_RDWR, session_fd) as fd:
                            dead = try_lock(fd)
                    except FileNotFoundError:
                        dead = True  # a session that starts holds the folder's lock until it has it
                if dead:
                    _remove_with_files(ops, token, sessions_fd)


def write_sidecar(folder: Path, name: str, text: str, *, replace: bool = True) -> None:
    """Write ``text`` to the file ``name`` beside the pages; only its owner may read it. Readers see
    all of it or none. ``replace`` False: an old file of this name stays. May raise OSError."""
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    try:
        temporary.touch(mode=0o600)
        temporary.write_text(text)
        with suppress(FileExistsError):
            (os.replace if replace else os.link)(temporary, folder / name)
    finally:
        with suppress(OSError):
            temporary.unlink()
