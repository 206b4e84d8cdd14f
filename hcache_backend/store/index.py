"""The index of one folder: its page files, their writers, and the order in which they are evicted.

It is an SQLite database in WAL mode that any number of processes open at once; a look-up waits for
no writer. SQLite's locks belong to open files, so they hold between containers, too. All changes
are made by the holder of the folder's lock. It can be rebuilt from the page files at any time.

- ``pages``: namespace + key -> one record of 32 bytes for every shard in this folder.
- ``recency``: eviction rank (8 bytes, big-endian) + namespace + key + shard.
- ``meta``: totals (pages, bytes), format, the machine's boot, whether the index is complete.

Each row that a statement returns costs a switch of Python's threads. So a look-up of any number of
pages is one statement with one row.
"""

import os
import sqlite3
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import quote

from hcache_backend.format.envelope import BLOCK, KEY_BYTES, NAMESPACE_BYTES, PageName, round_up
from hcache_backend.format.units import ALL_EIGHTHS, Eighths, Shard
from hcache_backend.store.file_ops import FileOps

INDEX_FORMAT = b"2"
INDEX_FILE = "index.sqlite"

_RECORD = struct.Struct("<BBHI8sQQ")
_RANK = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQ")
_NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES
_SHARE_COUNT = 1  # its position in a record

_TABLES = """
CREATE TABLE IF NOT EXISTS pages (page BLOB PRIMARY KEY, files BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS recency (mark BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_WAL_BYTES = 16 << 20
_CACHE_KIB = 16 << 10
_WAIT_SECONDS = 5.0
_READERS = 4  # threads that look up at once; another one waits
_AT_A_TIME = 512  # entries of one statement
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_READ_ONLY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
_FIND = f"""
WITH RECURSIVE numbers (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM numbers WHERE i + 1 < ?1)
SELECT group_concat(hex(page || files)) FROM numbers
CROSS JOIN pages ON page = substr(?2, 1 + i * {_NAME_BYTES}, {_NAME_BYTES})
"""
_NEXT = """
SELECT group_concat(hex(page || files)) FROM (
SELECT page, files FROM pages WHERE page > ? ORDER BY page LIMIT ?)
"""
_OLDEST = """
SELECT group_concat(hex(mark)) FROM (
SELECT mark FROM recency WHERE mark > ? ORDER BY mark LIMIT 64)
"""
# Apart, so that each is one step in the tree.
_ENDS = "SELECT (SELECT min(mark) FROM recency), (SELECT max(mark) FROM recency)"
_META = "SELECT value FROM meta WHERE name = ?"


class Entry(NamedTuple):
    name: PageName
    header_bytes: int
    payload_bytes: int
    writer: bytes  # the server run that made it, 8 bytes
    rank: int  # the eviction rank, see :mod:`.eviction`: the lowest goes first

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)


class Totals(NamedTuple):
    pages: int
    bytes: int  # of their files


Files = dict[bytes, list[Entry]]  # of each page, by namespace + key


class Index:
    """The index in ``folder``, which exists, and need not be writable if ``readonly``. Reading
    needs no lock, a change needs that of the folder. A change that raises sqlite3.Error has changed
    nothing. An index that cannot be opened is one, too, and may be :func:`is_damaged`."""

    def __init__(self, folder: Path, ops: FileOps, *, readonly: bool = False) -> None:
        self._ops, self._path, self._readonly = ops, folder / INDEX_FILE, readonly
        self._connections: list[sqlite3.Connection] = []
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        try:
            self._writer = None if readonly else self._open_to_write()
            # All at once: SQLite keeps the descriptors of those that are closed meanwhile.
            for _ in range(1 if readonly else _READERS):
                self._idle.put(self._open_to_read())
        except BaseException:
            self.close()
            raise

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[Eighths]:
        """The part of every page that is in this folder."""
        found = self._records([namespace + key for key in keys])
        # Most pages have one file, of the whole page: no function is called for those.
        return [
            ALL_EIGHTHS if records and records[_SHARE_COUNT] == 1 else _eighths(records)
            for records in [found.get(namespace + key) for key in keys]
        ]

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        found = self._files([namespace + key for key in keys])
        return [found.get(namespace + key, []) for key in keys]

    def known(self, names: Iterable[PageName]) -> set[PageName]:
        wanted = set(names)
        files = self._files({name.page for name in wanted})
        return {entry.name for entries in files.values() for entry in entries} & wanted

    def entries(self, namespace: bytes = b"") -> Iterator[Entry]:
        """All entries of a namespace (of all namespaces), perhaps without those that come now."""
        page = namespace
        while True:
            [(found,)] = self._rows(_NEXT, page, _AT_A_TIME)
            for record in _from_hex(found):
                page = record[:_NAME_BYTES]
                if not page.startswith(namespace):
                    return
                yield from _unpack(page, record[_NAME_BYTES:])
            if found is None:
                return

    def oldest(self, after: Entry | None = None) -> list[Entry]:
        """Up to 64 entries, lowest rank first; those ``after`` an entry, which may be gone."""
        [(found,)] = self._rows(_OLDEST, _mark(after) if after is not None else b"")
        marks = sorted(_from_hex(found))
        files = self._files([mark[8:-2] for mark in marks])
        entries = {_mark(entry): entry for some in files.values() for entry in some}
        return [entries[mark] for mark in marks if mark in entries]

    def rank_range(self) -> tuple[int, int] | None:
        """The lowest and the highest eviction rank; None if there is no entry."""
        [(first, last)] = self._rows(_ENDS)
        return first and (_RANK.unpack_from(first)[0], _RANK.unpack_from(last)[0])

    def totals(self) -> Totals:
        return _totals(self._rows(_META, "totals"))

    def meta(self, name: str) -> bytes | None:
        return next((value for (value,) in self._rows(_META, name)), None)

    def insert(self, entries: Iterable[Entry]) -> None:
        """Add entries, or replace those of their shards."""
        new: Files = {}
        for entry in entries:
            new.setdefault(entry.name.page, []).append(entry)

        def change(page: bytes, files: list[Entry]) -> list[Entry]:
            by_name = {entry.name: entry for entry in (*files, *new[page])}
            # A whole page comes first: coverage looks at the first record only.
            return sorted(by_name.values(), key=lambda entry: entry.name.shard.of > 1)

        self._change(new, change)

    def remove(self, names: Iterable[PageName]) -> int:
        """Take entries out; those that are not there are ignored. Returns their bytes."""
        gone = set(names)
        pages = {name.page for name in gone}
        return -self._change(pages, lambda _, files: [e for e in files if e.name not in gone])

    def raise_ranks(self, ranks: Mapping[PageName, int]) -> None:
        """Give entries higher eviction ranks; those that are not there are ignored."""

        def change(_: bytes, files: list[Entry]) -> list[Entry]:
            new = [max(entry.rank, ranks.get(entry.name, 0)) for entry in files]
            return [entry._replace(rank=rank) for entry, rank in zip(files, new, strict=True)]

        self._change({name.page for name in ranks}, change)

    def set_meta(self, **facts: bytes) -> None:
        with self._transaction() as connection:
            connection.executemany("REPLACE INTO meta VALUES (?, ?)", facts.items())

    def check(self) -> list[str]:
        """The inconsistencies inside the index; empty if it is sound."""
        problems = []
        pages = size = 0
        with self._reading() as connection:
            connection.execute("BEGIN")  # one moment for all
            try:
                marks = {mark for (mark,) in connection.execute("SELECT mark FROM recency")}
                for page, value in connection.execute("SELECT page, files FROM pages"):
                    if len(page) != _NAME_BYTES or len(value) % _RECORD.size or not value:
                        problems.append(f"entry {page.hex()} is malformed")
                        continue
                    for entry in _unpack(page, value):
                        pages, size = pages + 1, size + entry.file_bytes
                        if _mark(entry) not in marks:
                            problems.append(f"entry {page.hex()} has no recency")
                totals = _totals(connection.execute(_META, ("totals",)))
            finally:
                connection.execute("ROLLBACK")
        if len(marks) != pages:
            problems.append("recency has entries of pages that are not there")
        if totals != (pages, size):
            problems.append(f"totals are {totals}, entries {pages}, {size} bytes")
        return problems

    def close(self) -> None:
        """Close it; no thread may be using it."""
        for connection in self._connections:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """A connection that no other thread uses meanwhile."""
        connection = self._idle.get()
        try:
            yield connection
        finally:
            self._idle.put(connection)

    def _rows(self, statement: str, *values: object) -> list[Any]:
        with self._reading() as connection:
            return connection.execute(statement, values).fetchall()

    def _records(self, pages: Iterable[bytes]) -> dict[bytes, bytes]:
        with self._reading() as connection:
            return _find(connection, list(pages))

    def _files(self, pages: Iterable[bytes]) -> Files:
        return {page: _unpack(page, records) for page, records in self._records(pages).items()}

    def _change(
        self, pages: Collection[bytes], change: Callable[[bytes, list[Entry]], list[Entry]]
    ) -> int:
        """Replace the files of some pages by those of ``change``; returns the added bytes."""
        with self._transaction() as connection:
            records = _find(connection, list(pages))
            before = {page: _unpack(page, records.get(page, b"")) for page in pages}
            after = {page: change(page, files) for page, files in before.items()}
            rows = [(page, b"".join(map(_pack, files))) for page, files in after.items() if files]
            _execute(connection, "REPLACE INTO pages VALUES", "(?, ?)", rows)
            empty = [(page,) for page in records if not after[page]]
            _execute(connection, "DELETE FROM pages WHERE page IN", "?", empty)
            old, new = ({e for files in some.values() for e in files} for some in (before, after))
            marks = [(_mark(entry),) for entry in old - new]
            _execute(connection, "DELETE FROM recency WHERE mark IN", "?", marks)
            marks = [(_mark(entry),) for entry in new - old]
            _execute(connection, "REPLACE INTO recency VALUES", "(?)", marks)
            size = sum(e.file_bytes for e in new) - sum(e.file_bytes for e in old)
            totals = _totals(connection.execute(_META, ("totals",)).fetchall())
            packed = _TOTALS.pack(totals.pages + len(new) - len(old), totals.bytes + size)
            connection.execute("REPLACE INTO meta VALUES ('totals', ?)", (packed,))
        return size

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._writer
        if connection is None:
            raise sqlite3.OperationalError("the index was opened to read it")
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            self._ops.commit(connection)
        finally:
            if connection.in_transaction:
                connection.rollback()

    def _connect(self, how: str) -> sqlite3.Connection:
        path, options = quote(str(self._path)), {"uri": True, "check_same_thread": False}
        connection = sqlite3.connect(
            f"file:{path}?{how}", timeout=_WAIT_SECONDS, isolation_level=None, **options
        )
        self._connections.append(connection)
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        return connection

    def _open_to_write(self) -> sqlite3.Connection:
        with suppress(FileExistsError):  # SQLite would let others read it
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        connection = self._connect("mode=rw")
        connection.execute("PRAGMA journal_mode = WAL")
        # A power cut may undo the last commits, never damage the index.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
        connection.executescript(_TABLES)
        return connection

    def _open_to_read(self) -> sqlite3.Connection:
        try:
            connection = self._connect("mode=ro" if self._readonly else "mode=rw")
            connection.execute("SELECT count(*) FROM meta")
        except sqlite3.OperationalError as error:
            # SQLite wants files beside the index, which servers make. Without, none writes.
            wal = self._path.with_name(INDEX_FILE + "-wal")
            code = error.sqlite_errorcode & 0xFF
            if not self._readonly or code not in _READ_ONLY or wal.exists():
                raise
            connection = self._connect("mode=ro&immutable=1")
        return connection


def is_damaged(error: Exception) -> bool:
    """Whether an index that raised ``error`` has to be made anew."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _DAMAGED


def _find(connection: sqlite3.Connection, pages: Sequence[bytes]) -> dict[bytes, bytes]:
    """The records of those of ``pages`` that are there."""
    if not pages:
        return {}
    [(found,)] = connection.execute(_FIND, (len(pages), b"".join(pages))).fetchall()
    return {record[:_NAME_BYTES]: record[_NAME_BYTES:] for record in _from_hex(found)}


def _from_hex(found: str | None) -> list[bytes]:
    return list(map(bytes.fromhex, found.split(","))) if found else []


def _execute(
    connection: sqlite3.Connection, start: str, row: str, rows: Sequence[Sequence[bytes]]
) -> None:
    """Run a statement that ends in a list of rows, a limited number at a time."""
    for begin in range(0, len(rows), _AT_A_TIME):
        some = rows[begin : begin + _AT_A_TIME]
        listed = ", ".join([row] * len(some))
        text = f"{start} ({listed})" if row == "?" else f"{start} {listed}"
        connection.execute(text, [value for values in some for value in values])


def _totals(rows: Iterable[Sequence[bytes]]) -> Totals:
    return next((Totals(*_TOTALS.unpack(value)) for (value,) in rows), Totals(0, 0))


def _pack(entry: Entry) -> bytes:
    blocks = entry.header_bytes // BLOCK
    return _RECORD.pack(*entry.name.shard, 0, blocks, entry.writer, entry.payload_bytes, entry.rank)


def _unpack(page: bytes, records: bytes | memoryview) -> list[Entry]:
    namespace, key = page[:NAMESPACE_BYTES], page[NAMESPACE_BYTES:]
    return [
        Entry(PageName(namespace, key, Shard(number, of)), blocks * BLOCK, payload, writer, rank)
        for number, of, _, blocks, writer, payload, rank in _RECORD.iter_unpack(records)
    ]


def _eighths(records: bytes | None) -> Eighths:
    mask = 0
    for number, of, *_ in _RECORD.iter_unpack(records or b""):
        mask |= Shard(number, of).eighths
    return mask


def _mark(entry: Entry) -> bytes:
    """The key of an entry in ``recency``."""
    return _RANK.pack(entry.rank) + entry.name.page + bytes(entry.name.shard)
