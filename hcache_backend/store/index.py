"""The index of one folder: which page files it has, who wrote them, when they were last used.

It is an lmdb environment that any number of processes open at once; readers never wait. All changes
are made by the holder of the folder's lock (:mod:`hcache_backend.store.lock`). It can be rebuilt
from the page files at any time.

- ``pages``: namespace + key -> one record of 32 bytes for every share in this folder.
- ``recency``: last use (big-endian nanoseconds) + namespace + key + share -> nothing; the order in
  which pages are evicted.
- ``meta``: totals (pages, bytes), format, the machine's boot, whether the index is complete.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import lmdb

from hcache_backend.page import KEY_BYTES, NAMESPACE_BYTES
from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.format import BLOCK, PageName, round_up
from hcache_backend.store.shares import ALL_EIGHTHS, Share

INDEX_FORMAT = b"1"
INDEX_FILE = "data.mdb"
MAP_BYTES = 64 << 30
"""Address space, not disk: room for some 300 million pages."""

_RECORD = struct.Struct("<BBHI8sQQ")
_STAMP = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQ")
_NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES
_WHOLE_COUNT = 1  # position of the share count in a record


class Record(NamedTuple):
    """One page file.

    Attributes:
        share: Which tokens of the page.
        header_bytes: Length of the file's header.
        payload_bytes: Length of its payload.
        writer: The server run that made it, 8 bytes.
        stamp: Nanoseconds since 1970 of the last use.
    """

    share: Share
    header_bytes: int
    payload_bytes: int
    writer: bytes
    stamp: int

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)


class Entry(NamedTuple):
    """A page file with its names."""

    namespace: bytes
    key: bytes
    record: Record

    @property
    def name(self) -> PageName:
        return PageName(self.namespace, self.key, self.record.share)


class Totals(NamedTuple):
    """What a folder holds: page files, and their bytes."""

    pages: int
    bytes: int


class Index:
    """The index in ``folder`` (which exists).

    Args:
        ops: Commits transactions.

    Raises:
        lmdb.Error: It cannot be opened; it may be rebuilt.
    """

    def __init__(self, folder: Path, ops: FileOps) -> None:
        self._ops = ops
        self._handle = _open_environment(folder)
        self._env = self._handle.env
        try:
            # Where the tables exist this changes nothing and syncs nothing.
            with self._env.begin(write=True) as txn:
                self._pages = self._env.open_db(b"pages", txn=txn)
                self._recency = self._env.open_db(b"recency", txn=txn)
                self._meta = self._env.open_db(b"meta", txn=txn)
            self._env.reader_check()
        except BaseException:
            self._handle.release()
            raise

    # ---- reading: any thread of any process, no lock ----

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """Bit mask of the eighths of every page that stand in this folder."""
        found = []
        with self._env.begin(db=self._pages) as txn:
            get = txn.get
            for key in keys:
                value = get(namespace + key)
                if value is None:
                    found.append(0)
                elif value[_WHOLE_COUNT] == 1:
                    found.append(ALL_EIGHTHS)
                else:
                    mask = 0
                    for record in _unpack(value):
                        mask |= record.share.eighths
                    found.append(mask)
        return found

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Record]]:
        """The records of every page."""
        with self._env.begin(db=self._pages) as txn:
            return [_unpack(txn.get(namespace + key, b"")) for key in keys]

    def entries(self, namespace: bytes = b"") -> Iterator[Entry]:
        """All entries of a namespace (of all namespaces), as they were when the iteration began."""
        with self._env.begin(db=self._pages) as txn, txn.cursor() as cursor:
            present = cursor.set_range(namespace) if namespace else cursor.first()
            while present:
                name = cursor.key()
                if not name.startswith(namespace):
                    return
                for record in _unpack(cursor.value()):
                    yield Entry(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:], record)
                present = cursor.next()

    def oldest(self, after: bytes = b"") -> list[tuple[bytes, Entry]]:
        """Up to 64 entries, least recently used first.

        Args:
            after: Continue behind the entry of this cursor (the first element of a result).
        """
        found: list[tuple[bytes, Entry]] = []
        with self._env.begin() as txn, txn.cursor(db=self._recency) as cursor:
            present = cursor.set_range(after) if after else cursor.first()
            if present and cursor.key() == after:
                present = cursor.next()
            while present and len(found) < 64:
                mark = cursor.key()
                name, share = _parse_mark(mark)
                records = _unpack(txn.get(name, b"", db=self._pages))
                record = next((record for record in records if record.share == share), None)
                if record is not None:
                    entry = Entry(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:], record)
                    found.append((mark, entry))
                present = cursor.next()
        return found

    def totals(self) -> Totals:
        """Page files and bytes in this folder."""
        with self._env.begin(db=self._meta) as txn:
            return self._totals(txn)

    def meta(self, name: bytes) -> bytes | None:
        """A named fact about the index."""
        with self._env.begin(db=self._meta) as txn:
            value: bytes | None = txn.get(name)
            return value

    # ---- changing: under the folder's lock ----

    def insert(self, entries: Iterable[Entry]) -> None:
        """Add entries; one for a share that is there replaces it. All or nothing.

        Raises:
            lmdb.Error: Nothing was changed.
        """
        with self._change() as txn:
            for entry in entries:
                self._remove(txn, entry.namespace, entry.key, entry.record.share)
                name = entry.namespace + entry.key
                old = bytes(txn.get(name, b"", db=self._pages))
                # A whole page stands first: exists looks at the first record only.
                new = _pack(entry.record)
                value = new + old if entry.record.share.of == 1 else old + new
                txn.put(name, value, db=self._pages)
                txn.put(_mark(entry), b"", db=self._recency)
                self._add(txn, 1, entry.record.file_bytes)

    def remove(self, names: Iterable[PageName]) -> int:
        """Take entries out; those that are not there are ignored. Returns the bytes of the rest.

        Raises:
            lmdb.Error: Nothing was changed.
        """
        with self._change() as txn:
            return sum(self._remove(txn, *name) for name in names)

    def touch(self, names: Iterable[PageName], stamp: int) -> None:
        """Set the last use of entries; those that are not there are ignored.

        Raises:
            lmdb.Error: Nothing was changed.
        """
        with self._change() as txn:
            for namespace, key, share in names:
                name = namespace + key
                records = _unpack(txn.get(name, b"", db=self._pages))
                for number, record in enumerate(records):
                    if record.share == share and record.stamp < stamp:
                        txn.delete(_mark(Entry(namespace, key, record)), db=self._recency)
                        records[number] = record._replace(stamp=stamp)
                        txn.put(name, b"".join(map(_pack, records)), db=self._pages)
                        new = Entry(namespace, key, records[number])
                        txn.put(_mark(new), b"", db=self._recency)

    def set_meta(self, **facts: bytes) -> None:
        """State facts about the index.

        Raises:
            lmdb.Error: Nothing was changed.
        """
        with self._change() as txn:
            for name, value in facts.items():
                txn.put(name.encode(), value, db=self._meta)

    def check(self) -> list[str]:
        """What is inconsistent inside the index; empty when it is sound."""
        problems = []
        pages = size = 0
        with self._env.begin() as txn:
            for name, value in txn.cursor(db=self._pages):
                if len(name) != _NAME_BYTES or len(value) % _RECORD.size or not value:
                    problems.append(f"entry {name.hex()} is malformed")
                    continue
                for record in _unpack(value):
                    entry = Entry(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:], record)
                    pages, size = pages + 1, size + record.file_bytes
                    if txn.get(_mark(entry), db=self._recency) is None:
                        problems.append(f"entry {name.hex()} has no recency")
            if txn.stat(self._recency)["entries"] != pages:
                problems.append("recency has entries of pages that are not there")
            if self._totals(txn) != (pages, size):
                problems.append(f"totals are {self._totals(txn)}, entries {pages}, {size} bytes")
        return problems

    def close(self) -> None:
        """Let go of the environment."""
        self._handle.release()

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

    def _remove(self, txn: lmdb.Transaction, namespace: bytes, key: bytes, share: Share) -> int:
        name = namespace + key
        records = _unpack(txn.get(name, b"", db=self._pages))
        rest = [record for record in records if record.share != share]
        freed = 0
        for record in records:
            if record.share == share:
                txn.delete(_mark(Entry(namespace, key, record)), db=self._recency)
                freed += record.file_bytes
                self._add(txn, -1, -record.file_bytes)
        if rest and len(rest) != len(records):
            txn.put(name, b"".join(map(_pack, rest)), db=self._pages)
        elif records and not rest:
            txn.delete(name, db=self._pages)
        return freed

    def _add(self, txn: lmdb.Transaction, pages: int, size: int) -> None:
        totals = self._totals(txn)
        packed = _TOTALS.pack(totals.pages + pages, totals.bytes + size)
        txn.put(b"totals", packed, db=self._meta)

    def _totals(self, txn: lmdb.Transaction) -> Totals:
        value = txn.get(b"totals", db=self._meta)
        return Totals(*_TOTALS.unpack(value)) if value else Totals(0, 0)


def _pack(record: Record) -> bytes:
    return _RECORD.pack(
        record.share.number,
        record.share.of,
        0,
        record.header_bytes // BLOCK,
        record.writer,
        record.payload_bytes,
        record.stamp,
    )


def _unpack(value: bytes | memoryview) -> list[Record]:
    return [
        Record(Share(index, count), blocks * BLOCK, payload, writer, stamp)
        for index, count, _, blocks, writer, payload, stamp in _RECORD.iter_unpack(value)
    ]


def _mark(entry: Entry) -> bytes:
    share = entry.record.share
    return b"".join((_STAMP.pack(entry.record.stamp), entry.namespace, entry.key, bytes((*share,))))


def _parse_mark(mark: bytes) -> tuple[bytes, Share]:
    return mark[_STAMP.size : -2], Share(mark[-2], mark[-1])


# lmdb forbids opening an environment twice in a process; stores in one process share it.
_handles: dict[tuple[int, int], _Handle] = {}
_handles_lock = threading.Lock()


class _Handle:
    """An open environment and how many indexes of this process use it."""

    def __init__(self, env: lmdb.Environment, identity: tuple[int, int]) -> None:
        self.env = env
        self.users = 0
        self._identity = identity

    def release(self) -> None:
        with _handles_lock:
            self.users -= 1
            if self.users == 0:
                del _handles[self._identity]
                self.env.close()


def _open_environment(folder: Path) -> _Handle:
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    with _handles_lock:
        handle = _handles.get(identity)
        if handle is None:
            # metasync off: a power cut may undo the last commit, never damage the index.
            env = lmdb.open(
                str(folder),
                map_size=MAP_BYTES,
                max_dbs=3,
                max_readers=1024,
                metasync=False,
                readahead=False,
                meminit=False,
                mode=0o600,
            )
            handle = _handles[identity] = _Handle(env, identity)
        handle.users += 1
        return handle
