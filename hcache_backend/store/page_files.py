"""Writing and reading one page file in an open folder."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from hcache_backend.store.base import (
    ALL_EIGHTHS,
    WHOLE,
    SegmentTable,
    Share,
    Subset,
)
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
    round_up,
)
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_io import PageIO, PageMemory


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
        temporary: Its name in the session folder.
        entry: What the index will say of it.
        copied: Bytes that went through aligned memory.
    """

    temporary: str
    entry: Entry
    copied: int


def write_page(
    folder: Folder,
    io: PageIO,
    names: tuple[bytes, bytes, bytes],
    memory: PageMemory,
    table: SegmentTable,
    share: Share,
    stamp: int,
) -> Written:
    """Write a share of a page to a file in the session folder.

    Args:
        names: Namespace, key, writer.

    Raises:
        OSError: It could not be written; nothing is left of it.
    """
    namespace, key, writer = names
    layout = file_layout(table, share)
    header = io.scratch.header(layout.header_bytes)
    pack_header(
        header,
        table,
        share,
        namespace,
        key,
        writer,
        lambda block: memory.digest(block.page_offset, block.length),
    )
    if share == WHOLE:
        pieces = memory.pieces(0, memory.length)
    else:
        pieces = [piece for run in _runs(layout.blocks) for piece in memory.pieces(*_span(run))]
    temporary = folder.temporary_name()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | folder.alignment.flags
    try:
        fd = folder.ops.open(temporary, flags, folder.session_fd)
        try:
            copied = io.write(fd, [header, *pieces], folder.alignment)
        finally:
            folder.ops.close(fd)
    except OSError:
        remove_temporary(folder, temporary)
        raise
    record = Record(share, layout.header_bytes, layout.payload_bytes, writer, stamp)
    return Written(temporary, Entry(namespace, key, record), copied)


def remove_temporary(folder: Folder, temporary: str) -> None:
    """Remove a file of the session folder; what cannot be removed goes at the next opening."""
    try:
        folder.ops.unlink(temporary, folder.session_fd)
    except OSError:
        return


def read_page(
    folder: Folder,
    io: PageIO,
    entry: Entry,
    memory: PageMemory,
    subset: Subset | None,
) -> Reading:
    """Read and verify what ``subset`` wants (None: everything) of a page file."""
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
            if subset is None and entry.record.share == WHOLE:
                return _read_whole(folder, io, fd, entry, memory, identity)
            return _read_blocks(folder, io, fd, entry, memory, subset or Subset(), identity)
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


def _read_whole(
    folder: Folder, io: PageIO, fd: int, entry: Entry, memory: PageMemory, identity: Identity
) -> Reading:
    record = entry.record
    if record.payload_bytes != memory.length:
        return Reading(
            Outcome.OTHER_SIZE,
            reason=f"it has {record.payload_bytes} bytes, the memory {memory.length}",
        )
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
        if memory.digest(block.page_offset, block.length) != digest:
            raise DamagedFileError(f"checksum of segment {block.segment}")
    return Reading(Outcome.HIT, memory.length, copied, identity=identity)


def _read_blocks(
    folder: Folder,
    io: PageIO,
    fd: int,
    entry: Entry,
    memory: PageMemory,
    subset: Subset,
    identity: Identity,
) -> Reading:
    header = read_header(folder, io, fd)
    check_names(header, entry)
    if header.table.page_bytes != memory.length:
        return Reading(
            Outcome.OTHER_SIZE,
            reason=f"it has {header.table.page_bytes} bytes, the memory {memory.length}",
        )
    digests = dict(zip(header.layout.blocks, header.digests, strict=True))
    wanted = [block for block in header.layout.blocks if _is_wanted(block, subset)]
    read = copied = 0
    for run in _runs(wanted):
        offset = header.layout.header_bytes + run[0].payload_offset
        pieces = memory.pieces(*_span(run))
        filled, run_copied = io.read(fd, offset, pieces, folder.alignment)
        _must_fill((filled, run_copied))
        for block in run:
            if memory.digest(block.page_offset, block.length) != digests[block]:
                raise DamagedFileError(f"checksum of segment {block.segment}")
        read += _span(run)[1]
        copied += run_copied
    return Reading(Outcome.HIT, read, copied, identity=identity)


def _is_wanted(block: Block, subset: Subset) -> bool:
    if subset.segments is not None and block.segment not in subset.segments:
        return False
    # A block that does not divide by tokens is wanted by whoever wants its segment.
    return block.eighths == ALL_EIGHTHS or bool(block.eighths & subset.eighths)


def _runs(blocks: tuple[Block, ...] | list[Block]) -> list[list[Block]]:
    """Blocks that follow each other both in the page and in the file, together."""
    runs: list[list[Block]] = []
    for block in blocks:
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.page_offset + last.length == block.page_offset
            and last.payload_offset + last.length == block.payload_offset
        ):
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs


def _span(run: list[Block]) -> tuple[int, int]:
    """Where a run begins in the page, and its length."""
    start = run[0].page_offset
    return start, run[-1].page_offset + run[-1].length - start


def _must_fill(result: tuple[bool, int]) -> None:
    if not result[0]:
        # The file had its right length a moment ago, so it is the reading that fell short.
        raise OSError(errno.EIO, "the file system returned too little")
