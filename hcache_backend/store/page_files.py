"""Writing and reading one page file in an open folder."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hcache_backend.store.base import ALL_EIGHTHS, SegmentTable
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import (
    BLOCK,
    Block,
    DamagedFileError,
    Header,
    file_layout,
    file_name,
    header_length,
    pack_header,
    parse_header,
    payload_offsets,
    round_up,
)
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_io import PageIO, PageMemory


class Wanted(NamedTuple):
    """What is wanted of one page file.

    Attributes:
        segments: Numbers of the segments; None means all.
        eighths: Bit mask of the eighths of those that divide by tokens.
        undivided: Whether those that do not divide are wanted of this file: every file of a page
            has them, and one of them is enough.
    """

    segments: frozenset[int] | None
    eighths: int
    undivided: bool

    def has(self, block: Block) -> bool:
        """Whether a block is wanted."""
        if self.segments is not None and block.segment not in self.segments:
            return False
        if block.eighths == ALL_EIGHTHS:
            return self.undivided
        return bool(block.eighths & self.eighths)


class Outcome(Enum):
    """How reading a page file ended."""

    HIT = "hit"
    GONE = "gone"
    DAMAGED = "damaged"
    OTHER_SIZE = "other size"
    ERROR = "error"


class Identity(NamedTuple):
    """Tells a file from one that later stands under its name."""

    device: int
    inode: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns)


@dataclass(frozen=True)
class Reading:
    """What reading a page file gave.

    Attributes:
        outcome: How it ended; on anything but a hit the memory holds anything.
        read: Payload bytes read.
        copied: Bytes that went through aligned memory.
        reason: What was wrong.
        identity: The file that was read.
    """

    outcome: Outcome
    read: int = 0
    copied: int = 0
    reason: str = ""
    identity: Identity | None = None


class Written(NamedTuple):
    """A page file that has no name yet.

    Attributes:
        number: Which file of the session it is.
        entry: What the index will say of it.
        copied: Bytes that went through aligned memory.
    """

    number: int
    entry: Entry
    copied: int


def write_page(
    folder: Folder,
    io: PageIO,
    names: tuple[bytes, bytes, bytes],
    memory: PageMemory,
    table: SegmentTable,
    stamp: int,
) -> Written:
    """Write the share of a page that is in ``memory`` to a file of the session.

    Args:
        names: Namespace, key, writer.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    namespace, key, writer = names
    share = memory.share
    layout = file_layout(table, share)
    header = io.scratch.header(layout.header_bytes)
    pack_header(
        header,
        table,
        share,
        namespace,
        key,
        writer,
        lambda block: memory.digest(block.payload_offset, block.length),
    )
    pieces = memory.pieces(0, memory.length)
    number = folder.session.new_file()
    dir_fd, name = folder.session.place(number)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | folder.alignment.flags
    try:
        fd = folder.ops.open(name, flags, dir_fd)
        try:
            copied = io.write(fd, [header, *pieces], folder.alignment)
        finally:
            folder.ops.close(fd)
    except OSError:
        remove_nameless(folder, number)
        raise
    record = Record(share, layout.header_bytes, layout.payload_bytes, writer, stamp)
    return Written(number, Entry(namespace, key, record), copied)


def remove_nameless(folder: Folder, number: int) -> None:
    """Remove a file of the session; what cannot be removed goes at the next opening."""
    with contextlib.suppress(OSError):
        dir_fd, name = folder.session.place(number)
        folder.ops.unlink(name, dir_fd)


def read_page(
    folder: Folder,
    io: PageIO,
    entry: Entry,
    memory: PageMemory,
    wanted: Wanted,
) -> Reading:
    """Read and verify what is wanted of a page file, into the memory of the same or another share.

    Args:
        wanted: No other eighths than those of the memory's share.
    """
    shard, name = file_name(entry.namespace, entry.key, entry.record.share)
    identity = None
    try:
        with folder.shard(shard) as shard_fd:
            fd = folder.ops.open(name, os.O_RDONLY | folder.alignment.flags, shard_fd)
        try:
            status = os.fstat(fd)
            identity = Identity.of(status)
            if status.st_size != entry.record.file_bytes:
                raise DamagedFileError(
                    f"it has {status.st_size} bytes, not {entry.record.file_bytes}"
                )
            share = entry.record.share
            if share == memory.share and wanted == Wanted(None, share.eighths, True):
                return _read_all(folder, io, fd, entry, memory, identity)
            return _read_blocks(folder, io, fd, entry, memory, wanted, identity)
        finally:
            folder.ops.close(fd)
    except FileNotFoundError as error:
        return Reading(Outcome.GONE, reason=str(error))
    except OSError as error:
        return Reading(Outcome.ERROR, reason=str(error), identity=identity)
    except DamagedFileError as error:
        return Reading(Outcome.DAMAGED, reason=str(error), identity=identity)


def read_header(folder: Folder, io: PageIO, fd: int) -> Header:
    """The verified header of an open page file.

    Raises:
        OSError: It could not be read.
        DamagedFileError: It is none.
    """
    first = io.scratch.header(BLOCK)
    _must_fill(io.read(fd, 0, [first], folder.alignment))
    length = header_length(first)
    header = io.scratch.header(length)
    if length > BLOCK:
        _must_fill(io.read(fd, 0, [header], folder.alignment))
    return parse_header(header)


def check_names(header: Header, entry: Entry) -> None:
    """Refuse a header that is not the one of ``entry``.

    Raises:
        DamagedFileError: It belongs to something else.
    """
    record = entry.record
    wanted = (entry.namespace, entry.key, record.share, record.header_bytes, record.payload_bytes)
    layout = header.layout
    found = (header.namespace, header.key, header.share, layout.header_bytes, layout.payload_bytes)
    if found != wanted:
        raise DamagedFileError("it is the file of something else")


def _read_all(
    folder: Folder, io: PageIO, fd: int, entry: Entry, memory: PageMemory, identity: Identity
) -> Reading:
    """Read a file whose payload is just what the memory is for, in one go."""
    record = entry.record
    if record.payload_bytes != memory.length:
        return _other_size(record.payload_bytes, memory, identity)
    header_memory = io.scratch.header(record.header_bytes)
    padding = round_up(record.payload_bytes) - record.payload_bytes
    pieces = [header_memory, *memory.pieces(0, memory.length)]
    if padding:
        pieces.append(io.scratch.tail[:padding])
    filled, copied = io.read(fd, 0, pieces, folder.alignment)
    _must_fill((filled, copied))
    header = parse_header(header_memory)
    check_names(header, entry)
    for block, digest in zip(header.layout.blocks, header.digests, strict=True):
        _verify(memory, block, block.payload_offset, digest)
    return Reading(Outcome.HIT, memory.length, copied, identity=identity)


def _read_blocks(
    folder: Folder,
    io: PageIO,
    fd: int,
    entry: Entry,
    memory: PageMemory,
    wanted: Wanted,
    identity: Identity,
) -> Reading:
    """Read the wanted blocks of a file to where the memory has them."""
    header = read_header(folder, io, fd)
    check_names(header, entry)
    payload_bytes = file_layout(header.table, memory.share).payload_bytes
    if payload_bytes != memory.length:
        return _other_size(payload_bytes, memory, identity)
    digests = dict(zip(header.layout.blocks, header.digests, strict=True))
    places = payload_offsets(header.table, memory.share)
    read = copied = 0
    for run in _runs([block for block in header.layout.blocks if wanted.has(block)]):
        offset = header.layout.header_bytes + run[0].payload_offset
        pieces = [
            piece
            for start, length in _stretches(run, places)
            for piece in memory.pieces(start, length)
        ]
        filled, run_copied = io.read(fd, offset, pieces, folder.alignment)
        _must_fill((filled, run_copied))
        for block in run:
            _verify(memory, block, places[block.page_offset], digests[block])
            read += block.length
        copied += run_copied
    return Reading(Outcome.HIT, read, copied, identity=identity)


def _other_size(payload_bytes: int, memory: PageMemory, identity: Identity) -> Reading:
    share = memory.share
    reason = (
        f"share {share.number} of {share.of} has {payload_bytes} bytes, the memory {memory.length}"
    )
    return Reading(Outcome.OTHER_SIZE, reason=reason, identity=identity)


def _verify(memory: PageMemory, block: Block, start: int, digest: int) -> None:
    if memory.digest(start, block.length) != digest:
        raise DamagedFileError(f"checksum of segment {block.segment}")


def _runs(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks that follow each other in the file, together: one reading each."""
    runs: list[list[Block]] = []
    for block in blocks:
        if runs and runs[-1][-1].payload_offset + runs[-1][-1].length == block.payload_offset:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _stretches(run: Sequence[Block], places: dict[int, int]) -> list[tuple[int, int]]:
    """Where the blocks of a run go in the memory, as few stretches: their starts and lengths."""
    stretches: list[tuple[int, int]] = []
    for block in run:
        place = places[block.page_offset]
        if stretches and sum(stretches[-1]) == place:
            start, length = stretches[-1]
            stretches[-1] = (start, length + block.length)
        else:
            stretches.append((place, block.length))
    return stretches


def _must_fill(result: tuple[bool, int]) -> None:
    if not result[0]:
        # The file had its right length a moment ago, so it is the reading that fell short.
        raise OSError(errno.EIO, "the file system returned too little")
