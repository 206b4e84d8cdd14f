"""The index of one folder: which page files it has, who wrote them, when they were last used.

It is an lmdb environment that any number of processes open at once; readers never wait. All changes
are made by the holder of the folder's lock. It can be rebuilt from the page files at any time.

- ``pages``: namespace + key -> one record of 32 bytes for every share in this folder.
- ``recency``: last use (big-endian nanoseconds) + namespace + key + share -> nothing; the order in
  which pages are evicted.
- ``meta``: totals (pages, bytes), format, the machine's boot, whether the index is complete.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import lmdb

from hcache_backend.page import KEY_BYTES, NAMESPACE_BYTES
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.format import BLOCK, PageName, round_up
from hcache_backend.units import ALL_EIGHTHS, Share

INDEX_FORMAT = b"1"
INDEX_FILE = "data.mdb"
LOCK_FILE = "lock.mdb"
MAP_BYTES = 64 << 30
"""Address space, not disk: room for some 300 million pages."""

_RECORD = struct.Struct("<BBHI8sQQ")
_STAMP = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQ")
_NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES
_WHOLE_COUNT = 1  # position of the share count in a record


class Entry(NamedTuple):
    """One page file.

    Attributes:
        writer: The server run that made it, 8 bytes.
        stamp: Nanoseconds since 1970 of the last use.
    """

    name: PageName
    header_bytes: int
    payload_bytes: int
    writer: bytes
    stamp: int

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)


class Totals(NamedTuple):
    """What a folder holds: page files, and their bytes."""

    pages: int
    bytes: int


class Index:
    """The index in ``folder`` (which exists).

    Reading needs no lock, changing that of the folder. A change that raises lmdb.Error has changed
    nothing.

    Args:
        readonly: Nothing is to be changed, and the folder need not be writable.

    Raises:
        lmdb.Error: It cannot be opened; it may be rebuilt.
    """

    def __init__(self, folder: Path, ops: FileOps, *, readonly: bool = False) -> None:
        self._ops = ops
        self._env, self._identity = _open_environment(folder, readonly)
        try:
            # Where the tables exist this changes nothing and syncs nothing.
            with nullcontext() if readonly else self._env.begin(write=True) as txn:
                self._pages, self._recency, self._meta = (
                    self._env.open_db(name, txn=txn, create=not readonly)
                    for name in (b"pages", b"recency", b"meta")
                )
            if not readonly:
                self._env.reader_check()
        except BaseException:
            self.close()
            raise

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """Bit mask of the eighths of every page that stand in this folder."""
        with self._env.begin(db=self._pages) as txn:
            found = map(txn.get, [namespace + key for key in keys])
            # Most pages have one file, of the whole page: no function is called for those.
            return [
                ALL_EIGHTHS if records and records[_WHOLE_COUNT] == 1 else _eighths(records)
                for records in found
            ]

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The files of every page."""
        with self._env.begin(db=self._pages) as txn:
            get = txn.get
            return [_unpack(page := namespace + key, get(page, b"")) for key in keys]

    def find(self, name: PageName) -> Entry | None:
        """The entry of a file; None where there is none."""
        with self._env.begin() as txn:
            return self._find(txn, name)

    def known(self, names: Iterable[PageName]) -> set[PageName]:
        """Those of the files that have entries."""
        with self._env.begin() as txn:
            return {name for name in names if self._find(txn, name)}

    def entries(self, namespace: bytes = b"") -> Iterator[Entry]:
        """All entries of a namespace (of all namespaces), as they were when the iteration began."""
        with self._env.begin(db=self._pages) as txn, txn.cursor() as cursor:
            present = cursor.set_range(namespace) if namespace else cursor.first()
            while present:
                page = cursor.key()
                if not page.startswith(namespace):
                    return
                yield from _unpack(page, cursor.value())
                present = cursor.next()

    def oldest(self, after: Entry | None = None) -> list[Entry]:
        """Up to 64 entries, least recently used first; those ``after`` one, also a removed one."""
        found: list[Entry] = []
        last = _mark(after) if after is not None else b""
        with self._env.begin() as txn, txn.cursor(db=self._recency) as cursor:
            present = cursor.set_range(last) if last else cursor.first()
            if present and cursor.key() == last:
                present = cursor.next()
            while present and len(found) < 64:
                entry = self._find(txn, _marked(cursor.key()))
                if entry is not None:
                    found.append(entry)
                present = cursor.next()
        return found

    def oldest_stamp(self) -> int | None:
        """The stamp of the least recently used entry; None where there is none."""
        with self._env.begin() as txn, txn.cursor(db=self._recency) as cursor:
            return _STAMP.unpack_from(cursor.key())[0] if cursor.first() else None

    def totals(self) -> Totals:
        """Page files and bytes in this folder."""
        with self._env.begin(db=self._meta) as txn:
            return self._totals(txn)

    def meta(self, name: bytes) -> bytes | None:
        """A named fact about the index."""
        with self._env.begin(db=self._meta) as txn:
            value: bytes | None = txn.get(name)
            return value

    def insert(self, entries: Iterable[Entry]) -> None:
        """Add entries; one for a share that is there replaces it. All or nothing."""
        with self._change() as txn:
            pages = size = 0
            for entry in entries:
                known = self._files(txn, entry.name.page)
                others = [other for other in known if other.name != entry.name]
                for old in known:
                    if old.name == entry.name:
                        txn.delete(_mark(old), db=self._recency)
                        pages, size = pages - 1, size - old.file_bytes
                # A whole page stands first: coverage looks at the first record only.
                is_whole = entry.name.share.of == 1
                self._put(txn, [entry, *others] if is_whole else [*others, entry])
                txn.put(_mark(entry), b"", db=self._recency)
                pages, size = pages + 1, size + entry.file_bytes
            self._add(txn, pages, size)

    def remove(self, names: Iterable[PageName]) -> int:
        """Take entries out; those that are not there are ignored. Returns the bytes of the rest."""
        with self._change() as txn:
            sizes = [size for name in names if (size := self._remove(txn, name))]
            self._add(txn, -len(sizes), -sum(sizes))
            return sum(sizes)

    def touch(self, stamps: Mapping[PageName, int]) -> None:
        """Set the last use of entries; those that are not there are ignored."""
        with self._change() as txn:
            for name, stamp in stamps.items():
                old = self._find(txn, name)
                if old is not None and old.stamp < stamp:
                    new = old._replace(stamp=stamp)
                    files = self._files(txn, name.page)
                    self._put(txn, [new if entry == old else entry for entry in files])
                    txn.delete(_mark(old), db=self._recency)
                    txn.put(_mark(new), b"", db=self._recency)

    def set_meta(self, **facts: bytes) -> None:
        """State facts about the index."""
        with self._change() as txn:
            for name, value in facts.items():
                txn.put(name.encode(), value, db=self._meta)

    def check(self) -> list[str]:
        """What is inconsistent inside the index; empty when it is sound."""
        problems = []
        pages = size = 0
        with self._env.begin() as txn:
            for page, value in txn.cursor(db=self._pages):
                if len(page) != _NAME_BYTES or len(value) % _RECORD.size or not value:
                    problems.append(f"entry {page.hex()} is malformed")
                    continue
                for entry in _unpack(page, value):
                    pages, size = pages + 1, size + entry.file_bytes
                    if txn.get(_mark(entry), db=self._recency) is None:
                        problems.append(f"entry {page.hex()} has no recency")
            if txn.stat(self._recency)["entries"] != pages:
                problems.append("recency has entries of pages that are not there")
            if self._totals(txn) != (pages, size):
                problems.append(f"totals are {self._totals(txn)}, entries {pages}, {size} bytes")
        return problems

    def close(self) -> None:
        _close_environment(self._identity)

    @contextmanager
    def _change(self) -> Iterator[lmdb.Transaction]:
        txn = self._env.begin(write=True)
        try:
            yield txn
        except BaseException:
            txn.abort()
            raise
        try:
            self._ops.commit(txn)
        except BaseException:
            txn.abort()
            raise

    def _files(self, txn: lmdb.Transaction, page: bytes) -> list[Entry]:
        return _unpack(page, txn.get(page, b"", db=self._pages))

    def _find(self, txn: lmdb.Transaction, name: PageName) -> Entry | None:
        return next((entry for entry in self._files(txn, name.page) if entry.name == name), None)

    def _put(self, txn: lmdb.Transaction, files: Sequence[Entry]) -> None:
        """Set the files of a page, of which there is at least one."""
        txn.put(files[0].name.page, b"".join(map(_pack, files)), db=self._pages)

    def _remove(self, txn: lmdb.Transaction, name: PageName) -> int:
        """Take out the entry of a file; returns its bytes, 0 where there is none.

        The totals are the caller's.
        """
        gone = self._find(txn, name)
        if gone is None:
            return 0
        others = [entry for entry in self._files(txn, name.page) if entry != gone]
        if others:
            self._put(txn, others)
        else:
            txn.delete(name.page, db=self._pages)
        txn.delete(_mark(gone), db=self._recency)
        return gone.file_bytes

    def _add(self, txn: lmdb.Transaction, pages: int, size: int) -> None:
        totals = self._totals(txn)
        packed = _TOTALS.pack(totals.pages + pages, totals.bytes + size)
        txn.put(b"totals", packed, db=self._meta)

    def _totals(self, txn: lmdb.Transaction) -> Totals:
        value = txn.get(b"totals", db=self._meta)
        return Totals(*_TOTALS.unpack(value)) if value else Totals(0, 0)


def _pack(entry: Entry) -> bytes:
    blocks = entry.header_bytes // BLOCK
    sizes = (entry.payload_bytes, entry.stamp)
    return _RECORD.pack(*entry.name.share, 0, blocks, entry.writer, *sizes)


def _unpack(page: bytes, records: bytes | memoryview) -> list[Entry]:
    namespace, key = page[:NAMESPACE_BYTES], page[NAMESPACE_BYTES:]
    return [
        Entry(PageName(namespace, key, Share(number, of)), blocks * BLOCK, payload, writer, stamp)
        for number, of, _, blocks, writer, payload, stamp in _RECORD.iter_unpack(records)
    ]


def _eighths(records: bytes | None) -> int:
    mask = 0
    for number, of, *_ in _RECORD.iter_unpack(records or b""):
        mask |= Share(number, of).eighths
    return mask


def _mark(entry: Entry) -> bytes:
    """The key of an entry in ``recency``."""
    return _STAMP.pack(entry.stamp) + entry.name.page + bytes(entry.name.share)


def _marked(mark: bytes) -> PageName:
    namespace, key = mark[8 : 8 + NAMESPACE_BYTES], mark[8 + NAMESPACE_BYTES : -2]
    return PageName(namespace, key, Share(*mark[-2:]))


# lmdb forbids opening an environment twice in a process: here is how many indexes use each.
_environments: dict[tuple[int, int], tuple[lmdb.Environment, int]] = {}
_environments_lock = threading.Lock()


def _open_environment(folder: Path, readonly: bool) -> tuple[lmdb.Environment, tuple[int, int]]:
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    with _environments_lock:
        env, users = _environments.get(identity, (None, 0))
        if env is None:
            # Readers enter themselves in the lock file. Where it cannot be written, a writer under
            # another user would not know of them, and they may see what it is changing.
            enters = not readonly or os.access(folder / LOCK_FILE, os.W_OK)
            # metasync off: a power cut may undo the last commit, never damage the index.
            env = lmdb.open(
                str(folder),
                map_size=MAP_BYTES,
                max_dbs=3,
                max_readers=1024,
                metasync=False,
                readahead=False,
                meminit=False,
                readonly=readonly,
                lock=enters,
                mode=0o600,
            )
        _environments[identity] = (env, users + 1)
    return env, identity


def _close_environment(identity: tuple[int, int]) -> None:
    with _environments_lock:
        env, users = _environments.pop(identity)
        if users > 1:
            _environments[identity] = (env, users - 1)
        else:
            env.close()
