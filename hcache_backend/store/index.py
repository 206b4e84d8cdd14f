"""The index of one folder: its page files, their writers, and the order in which they are evicted.

It is an SQLite database with a rollback journal that any number of processes open at once. WAL mode
would map a file into memory, and a disk without room for it would end the process (SIGBUS). All
changes are made by the holder of the folder's lock; a look-up waits while one is committed. It can
be rebuilt from the page files: what no store writes raises a DamagedIndexError.

- ``pages``: namespace + key -> one record of 32 bytes for every shard in this folder.
- ``recency``: last use (8 bytes, big-endian) + namespace + key + shard.
- ``meta``: totals (files, bytes) and their digest, format, the machine's boot, whether the index is
  complete.

Each row that a statement returns costs a switch of Python's threads. So a look-up of any number of
pages is one statement with one row.
"""

import os
import sqlite3
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import xxhash

from hcache_backend.format.envelope import BLOCK, KEY_BYTES, NAMESPACE_BYTES, PageName, round_up
from hcache_backend.format.units import ALL_EIGHTHS, SHARD_COUNTS, Eighths, Shard
from hcache_backend.store.file_ops import FOLDER, FileOps, kept_open

INDEX_FORMAT = b"2"
INDEX_FILE = "index.sqlite"

_RECORD = struct.Struct("<BBHI8sQQ")
_RANK = struct.Struct(">Q")
_TOTALS = struct.Struct("<QQ")
_NAME_BYTES = NAMESPACE_BYTES + KEY_BYTES
_SHARD_COUNT_AT = 1  # byte of a record

LAST_RANK = 2**63 - 1  # the year 2262
_TABLES = {
    "CREATE TABLE pages (page BLOB PRIMARY KEY, files BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE recency (mark BLOB PRIMARY KEY) WITHOUT ROWID",
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
}
_JOURNAL_BYTES = 16 << 20
_CACHE_KIB = 16 << 10
_WAIT_SECONDS = 5.0  # of a change for readers, and of who reads all entries for a commit
_LOOK_SECONDS = 0.5  # of a look-up for a commit; then it finds nothing
_READERS = 4  # threads that look up at once; another one waits
_AT_A_TIME = 499  # entries of one statement; before 3.32 SQLite takes 999 values
_KEYS_AT_A_TIME = 2048  # of a look-up: a change waits for each statement
# Errors that are the disk's, or another process's; all others are of a damaged file.
_NO_DAMAGE = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_PERM),
    *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_NOLFS),
)
_FIND = f"""
WITH RECURSIVE numbers (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM numbers WHERE i + 1 < ?)
SELECT group_concat(hex(page || files)) FROM numbers
CROSS JOIN pages ON page = substr(?, 1 + i * {_NAME_BYTES}, {_NAME_BYTES})
"""
_NEXT = """
SELECT group_concat(hex(page || files)) FROM (
SELECT page, files FROM pages WHERE page > ? ORDER BY page LIMIT ?)
"""
_OLDEST = """
SELECT group_concat(hex(mark)) FROM (
SELECT mark FROM recency WHERE mark > ? ORDER BY mark LIMIT ?)
"""
# Apart, so that each is one step in the tree.
_ENDS = "SELECT (SELECT min(mark) FROM recency), (SELECT max(mark) FROM recency)"
_META = "SELECT value FROM meta WHERE name = ?"
_PAGES = "SELECT page, files FROM pages WHERE page > ? ORDER BY page LIMIT 512"
_MARKS = "SELECT mark FROM recency WHERE mark > ? ORDER BY mark LIMIT 512"
_META_TOTALS = "SELECT value FROM meta WHERE name IN ('totals', 'totals digest') ORDER BY name"


class DamagedIndexError(sqlite3.DatabaseError):
    """The index says what no store writes, so it has to be made anew."""


class _Connection(sqlite3.Connection):
    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*arguments)
        except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
            raise DamagedIndexError("its schema is damaged") from error


class Entry(NamedTuple):
    name: PageName
    header_bytes: int
    payload_bytes: int
    writer: bytes  # the server run that made it, 8 bytes
    rank: int  # the last use, see :mod:`.eviction`: the lowest goes first

    @property
    def file_bytes(self) -> int:
        return self.header_bytes + round_up(self.payload_bytes)


class Totals(NamedTuple):
    files: int  # a page may have several, one for each of its shards
    bytes: int


Files = dict[bytes, list[Entry]]  # of each page, by namespace + key


class Index:
    """The index in ``folder``, which exists, and need not be writable if ``readonly``. Reading
    needs no lock, a change needs that of the folder. A change that raises sqlite3.Error has changed
    nothing. An index that cannot be opened is one, too, and may be :func:`is_damaged`."""

    def __init__(self, folder: Path, ops: FileOps, *, readonly: bool = False) -> None:
        self._ops, self._path = ops, folder / INDEX_FILE
        files = list(folder.iterdir())
        for file in (*files, *([self._path] if readonly else ())):
            if file not in files or not stat.S_ISREG(file.lstat().st_mode):
                raise DamagedIndexError(f"there is no file {file.name}")
        self._connections: list[sqlite3.Connection] = []
        self._idle: SimpleQueue[sqlite3.Connection] = SimpleQueue()
        try:
            self._writer = None if readonly else self._open_to_write()
            # All at once: SQLite keeps the descriptors of connections closed while others are open.
            for _ in range(1 if readonly else _READERS):
                self._idle.put(self._connect("ro" if readonly else "rw", _LOOK_SECONDS))
            tables = {sql for (sql,) in self._rows("SELECT sql FROM sqlite_master")}
            if not readonly:
                with self._transaction() as connection:
                    for table in () if tables else _TABLES:
                        connection.execute(table)
                    connection.execute("DELETE FROM meta WHERE name = ''")  # tries to write
            if tables != _TABLES and (tables or readonly):
                raise DamagedIndexError(f"its tables are {tables}")
            self.totals(), self.rank_range(), self.meta("complete"), self.meta("boot")  # checks
        except BaseException:
            self.close()
            raise

    def coverage(self, namespace: bytes, keys: Sequence[bytes]) -> list[Eighths]:
        """Of every page the eighths that its files in this folder have together, as a mask."""
        pages = [namespace + key for key in keys]
        by_page = self._records(pages)
        # Most pages have one file, with 1 shard by its record: no function is called for those.
        return [
            ALL_EIGHTHS if records and records[_SHARD_COUNT_AT] == 1 else _eighths(page, records)
            for page in pages
            for records in [by_page.get(page, b"")]
        ]

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[list[Entry]]:
        """The entries of every page: one for each of its shards in this folder."""
        files = self._files([namespace + key for key in keys])
        return [files.get(namespace + key, []) for key in keys]

    def known_names(self, names: Iterable[PageName]) -> set[PageName]:
        wanted = set(names)
        files = self._files({name.page for name in wanted})
        return {entry.name for entries in files.values() for entry in entries} & wanted

    def entries(self, namespace: bytes = b"") -> Iterator[Entry]:
        """All entries of a namespace (b"": of all), perhaps without those inserted meanwhile."""
        page = namespace  # the last one that was read; the next slice begins after it
        while rows := _from_hex(self._rows(_NEXT, page, _AT_A_TIME, seconds=_WAIT_SECONDS)):
            for row in rows:
                page = row[:_NAME_BYTES]
                if not page.startswith(namespace):
                    return
                yield from _unpack(page, row[_NAME_BYTES:])

    def oldest(self, count: int, after: Entry | None = None) -> list[Entry]:
        """The ``count`` entries of the lowest ranks, lowest first. ``after``: only those that
        follow this entry in that order; it may be gone. The folder's lock is held."""
        marks = sorted(_from_hex(self._rows(_OLDEST, _mark(after) if after else b"", count)))
        files = self._files([_unmark(mark)[1] for mark in marks])
        entries = {_mark(entry): entry for of_page in files.values() for entry in of_page}
        if not entries.keys() >= set(marks):
            raise DamagedIndexError("recency has entries of pages that are not there")
        return [entries[mark] for mark in marks]

    def rank_range(self) -> tuple[int, int] | None:
        """The earliest and the latest last use; None if there is no entry."""
        [(first, last)] = self._rows(_ENDS)
        return None if first is None else (_unmark(first)[0], _unmark(last)[0])

    def totals(self) -> Totals:
        return _parse_totals(self._rows(_META_TOTALS))

    def meta(self, name: str) -> bytes | None:
        return next((value for (value,) in self._rows(_META, name)), None)

    def insert(self, entries: Iterable[Entry]) -> None:
        """Add entries. An entry of the same page and shard is replaced."""
        new: Files = {}
        for entry in entries:
            new.setdefault(entry.name.page, []).append(entry)

        def change(page: bytes, files: list[Entry]) -> list[Entry]:
            by_name = {entry.name: entry for entry in (*files, *new[page])}
            # A whole page comes first: coverage looks at the first record only.
            return sorted(by_name.values(), key=lambda entry: entry.name.shard.of > 1)

        self._change(new, change)

    def remove(self, names: Iterable[PageName]) -> int:
        """Take entries out; names without entry are ignored. Returns the bytes of their files."""
        gone = set(names)
        pages = {name.page for name in gone}
        return -self._change(pages, lambda _, files: [e for e in files if e.name not in gone])

    def raise_ranks(self, ranks: Mapping[PageName, int]) -> None:
        """Give entries later last uses, by name; names without entry are ignored."""

        def change(_: bytes, files: list[Entry]) -> list[Entry]:
            new = [max(entry.rank, ranks.get(entry.name, 0)) for entry in files]
            return [entry._replace(rank=rank) for entry, rank in zip(files, new, strict=True)]

        self._change({name.page for name in ranks}, change)

    def set_meta(self, **facts: bytes) -> None:
        with self._transaction() as connection:
            connection.executemany("REPLACE INTO meta VALUES (?, ?)", facts.items())

    def check(self) -> list[str]:
        """The inconsistencies inside the index; empty if it is sound. It is read in slices, so that
        changes do not wait. If there is a change meanwhile, only malformed entries are found."""
        problems: list[str] = []
        page, mark = b"", b""  # the last ones that were read
        entries = size = marks = digests = 0  # digests: XOR over all entries and marks; 0: alike
        with self._reading(_WAIT_SECONDS) as connection:
            version = connection.execute("PRAGMA data_version").fetchall()
            while rows := connection.execute(_PAGES, (page,)).fetchall():
                for page, records in rows:
                    try:
                        for entry in _unpack(page, records):
                            entries, size = entries + 1, size + entry.file_bytes
                            digests ^= xxhash.xxh3_64_intdigest(_mark(entry))
                    except DamagedIndexError as error:
                        problems.append(str(error))
            while rows := connection.execute(_MARKS, (mark,)).fetchall():
                for (mark,) in rows:
                    marks += 1
                    digests ^= xxhash.xxh3_64_intdigest(mark)
            totals = _parse_totals(connection.execute(_META_TOTALS).fetchall())
            if version == connection.execute("PRAGMA data_version").fetchall():
                if digests or marks != entries:
                    problems.append(f"recency has {marks} entries, of other pages or last uses")
                if totals != (entries, size):
                    problems.append(f"totals are {totals}, entries {entries}, {size} bytes")
        return problems

    def close(self) -> None:
        """Close it; no thread may be using it."""
        for connection in self._connections:
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _reading(self, seconds: float = _LOOK_SECONDS) -> Iterator[sqlite3.Connection]:
        """A connection to read with, for this thread alone; it waits ``seconds`` for a commit."""
        connection = self._idle.get()
        try:
            connection.execute(f"PRAGMA busy_timeout = {1000 * seconds:.0f}")
            yield connection
        finally:
            self._idle.put(connection)

    def _rows(self, statement: str, *values: object, seconds: float = _LOOK_SECONDS) -> list[Any]:
        with self._reading(seconds) as connection:
            return connection.execute(statement, values).fetchall()

    def _records(self, pages: Iterable[bytes]) -> dict[bytes, bytes]:
        with self._reading() as connection:
            return _find(connection, list(pages))

    def _files(self, pages: Iterable[bytes]) -> Files:
        return {page: _unpack(page, records) for page, records in self._records(pages).items()}

    def _change(
        self, pages: Collection[bytes], change: Callable[[bytes, list[Entry]], list[Entry]]
    ) -> int:
        """Replace the entries of each of ``pages`` by ``change(page, entries)``, and update recency
        and totals. Returns the bytes of files of new entries less those of removed ones."""
        with self._transaction() as connection:
            records = _find(connection, list(pages))
            before = {page: _unpack(page, records.get(page, b"")) for page in pages}
            after = {page: change(page, files) for page, files in before.items()}
            rows = [(page, b"".join(map(_pack, files))) for page, files in after.items() if files]
            _execute(connection, "REPLACE INTO pages VALUES", "(?, ?)", rows)
            empty = [(page,) for page in records if not after[page]]
            _execute(connection, "DELETE FROM pages WHERE page IN", "?", empty)
            old, new = ({e for files in state.values() for e in files} for state in (before, after))
            marks = [(_mark(entry),) for entry in old - new]
            _execute(connection, "DELETE FROM recency WHERE mark IN", "?", marks)
            marks = [(_mark(entry),) for entry in new - old]
            _execute(connection, "REPLACE INTO recency VALUES", "(?)", marks)
            size = sum(e.file_bytes for e in new) - sum(e.file_bytes for e in old)
            last = _parse_totals(connection.execute(_META_TOTALS).fetchall())
            totals = Totals(last.files + len(new) - len(old), last.bytes + size)
            if min(totals) < 0:
                raise DamagedIndexError(f"totals are {last}, and entries of more bytes go")
            _set_totals(connection, _TOTALS.pack(*totals))
        return size

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A change of the index: committed at the end, or rolled back if anything raises."""
        connection = self._writer
        if connection is None:
            raise sqlite3.OperationalError("the index was opened to read it")
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            self._ops.commit(connection)
        except sqlite3.OperationalError as error:
            # SQLite reports a damaged or deleted file as "read only", too.
            if _code(error) == sqlite3.SQLITE_READONLY and os.access(self._path.parent, os.W_OK):
                raise DamagedIndexError(f"{error}, which its file is not") from error
            raise
        finally:
            if connection.in_transaction:
                connection.rollback()

    def _connect(self, mode: Literal["ro", "rw"], seconds: float) -> sqlite3.Connection:
        path = quote(os.fsencode(self._path), safe="")
        connection = sqlite3.connect(
            f"file:{path}?mode={mode}",
            timeout=seconds,
            isolation_level=None,
            uri=True,
            factory=_Connection,
            check_same_thread=False,
        )
        self._connections.append(connection)
        connection.text_factory = partial(str, encoding="latin-1")  # also of damaged text
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        return connection

    def _open_to_write(self) -> sqlite3.Connection:
        """The connection that makes all changes; its file is made if there is none."""
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR
        with suppress(FileExistsError), ExitStack() as stack:
            folder_fd = kept_open(os.open(self._path.parent, FOLDER), stack)
            # Not by SQLite, which would let other users read it.
            self._ops.close(self._ops.open(INDEX_FILE, flags, folder_fd))
        connection = self._connect("rw", _WAIT_SECONDS)
        # The index of an earlier version is in WAL mode. EXCLUSIVE: reads it without shared memory.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        [(journal_mode,)] = connection.execute("PRAGMA journal_mode")
        connection.execute("PRAGMA journal_mode = PERSIST")
        if journal_mode == "wal":  # that version wrote no digest of the totals
            for (totals,) in connection.execute(_META, ("totals",)).fetchall():
                if isinstance(totals, bytes):
                    _set_totals(connection, totals)
        connection.execute("PRAGMA locking_mode = NORMAL")
        connection.execute("SELECT count(*) FROM sqlite_master")  # releases the exclusive lock
        # With less than FULL a power cut may undo half a change.
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA journal_size_limit = {_JOURNAL_BYTES}")
        return connection


def is_damaged(error: Exception) -> bool:
    """Whether an index that raised ``error`` has to be made anew."""
    return isinstance(error, DamagedIndexError) or _code(error) not in (None, *_NO_DAMAGE)


def _code(error: Exception) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return code if code is None else code & 0xFF


def _find(connection: sqlite3.Connection, pages: Sequence[bytes]) -> dict[bytes, bytes]:
    """The records of those of ``pages`` that have any, by page."""
    records: dict[bytes, bytes] = {}
    for begin in range(0, len(pages), _KEYS_AT_A_TIME):
        batch = pages[begin : begin + _KEYS_AT_A_TIME]
        rows = connection.execute(_FIND, (len(batch), b"".join(batch))).fetchall()
        records |= {row[:_NAME_BYTES]: row[_NAME_BYTES:] for row in _from_hex(rows)}
    if not records.keys() <= {*pages}:
        raise DamagedIndexError("a page was found that nobody asked for")
    return records


def _from_hex(rows: list[tuple[str | None]]) -> list[bytes]:
    """The values in the only row of a ``group_concat(hex(...))``, with commas between them."""
    [(listed,)] = rows
    return list(map(bytes.fromhex, listed.split(","))) if listed else []


def _execute(
    connection: sqlite3.Connection, start: str, row: str, rows: Sequence[Sequence[bytes]]
) -> None:
    """Run the statement ``start``, followed by a list of ``rows`` (values of each), for a limited
    number of rows at a time. ``row``: placeholders of one row; "?": of a list in parentheses."""
    for begin in range(0, len(rows), _AT_A_TIME):
        batch = rows[begin : begin + _AT_A_TIME]
        listed = ", ".join([row] * len(batch))
        text = f"{start} ({listed})" if row == "?" else f"{start} {listed}"
        connection.execute(text, [value for values in batch for value in values])


def _parse_totals(rows: Sequence[Sequence[Any]]) -> Totals:
    match rows:
        case []:  # a new index
            return Totals(0, 0)
        case [(bytes(value),), (digest,)] if digest == xxhash.xxh3_64_digest(value):
            return Totals(*_TOTALS.unpack(value))
    raise DamagedIndexError(f"totals are {rows}")


def _set_totals(connection: sqlite3.Connection, totals: bytes) -> None:
    rows = ("totals", totals, "totals digest", xxhash.xxh3_64_digest(totals))
    connection.execute("REPLACE INTO meta VALUES (?, ?), (?, ?)", rows)


def _pack(entry: Entry) -> bytes:
    blocks = entry.header_bytes // BLOCK
    return _RECORD.pack(*entry.name.shard, 0, blocks, entry.writer, entry.payload_bytes, entry.rank)


def _unpack(page: bytes, records: bytes) -> list[Entry]:
    """The entries of a page; a DamagedIndexError if no store writes such records."""
    if len(page) != _NAME_BYTES or len(records) % _RECORD.size:
        raise DamagedIndexError(f"page {page.hex()} has a record of {len(records)} bytes")
    namespace, key, entries = page[:NAMESPACE_BYTES], page[NAMESPACE_BYTES:], []
    for number, count, zero, blocks, writer, payload, rank in _RECORD.iter_unpack(records):
        if count not in SHARD_COUNTS or number >= count or zero or not blocks or rank > LAST_RANK:
            raise DamagedIndexError(f"page {page.hex()} has the record {records.hex()}")
        name = PageName(namespace, key, Shard(number, count))
        entries.append(Entry(name, blocks * BLOCK, payload, writer, rank))
    return entries


def _eighths(page: bytes, records: bytes) -> Eighths:
    mask = 0
    for entry in _unpack(page, records):
        mask |= entry.name.shard.eighths
    return mask


def _mark(entry: Entry) -> bytes:
    """The key of an entry in ``recency``."""
    return _RANK.pack(entry.rank) + entry.name.page + bytes(entry.name.shard)


def _unmark(mark: object) -> tuple[int, bytes]:
    """Rank, and namespace + key, of a mark in ``recency``; a DamagedIndexError if it is none."""
    if isinstance(mark, bytes) and len(mark) == _RANK.size + _NAME_BYTES + len(bytes(Shard(0, 1))):
        [rank] = _RANK.unpack_from(mark)
        if rank <= LAST_RANK:
            return rank, mark[_RANK.size : _RANK.size + _NAME_BYTES]
    raise DamagedIndexError(f"recency has {mark!r}")
