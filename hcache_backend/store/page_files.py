"""Writing and reading one page file in an open folder."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from hcache_backend.store.file_ops import opened
from hcache_backend.store.folder import Folder
from hcache_backend.store.format import (
    BLOCK,
    Block,
    DamagedFileError,
    Header,
    Identity,
    PageName,
    file_layout,
    header_length,
    pack_header,
    parse_header,
    payload_offsets,
    round_up,
)
from hcache_backend.store.index import Entry, Record
from hcache_backend.store.page_io import PageIO, PageMemory
from hcache_backend.store.shares import ALL_EIGHTHS, SegmentTable


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


class OtherSizeError(Exception):
    """The memory for a page file has another length than what is to come into it."""


class Read(NamedTuple):
    """What reading a page file took.

    Attributes:
        bytes: Payload bytes that were read.
        copied: Bytes that went through aligned memory.
    """

    bytes: int
    copied: int


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
        with opened(folder.ops, name, flags, dir_fd) as fd:
            copied = io.write(fd, [header, *pieces], folder.alignment)
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


def file_exists(folder: Folder, name: PageName) -> bool:
    """Whether a page file is really there.

    Raises:
        OSError: The folder cannot be looked at.
    """
    try:
        with folder.shard(name.shard) as shard_fd:
            folder.ops.stat(name.file, shard_fd)
    except FileNotFoundError:
        return False
    return True


def delete_page(folder: Folder, name: PageName, only: Identity | None = None) -> bool:
    """Delete a page file, under the folder's lock; its entry in the index is the caller's.

    Args:
        only: The file that is meant: another one that stands there by now stays.

    Returns:
        Whether nothing stands there any more, also when nothing stood there.

    Raises:
        OSError: It could not be deleted.
    """
    try:
        with folder.shard(name.shard) as shard_fd:
            if only is not None and Identity.of(folder.ops.stat(name.file, shard_fd)) != only:
                return False
            folder.ops.unlink(name.file, shard_fd)
    except FileNotFoundError:
        pass
    return True


@contextmanager
def opened_page(folder: Folder, name: PageName) -> Iterator[tuple[int, os.stat_result]]:
    """A page file, open for reading, and its status.

    Raises:
        OSError: It could not be opened; FileNotFoundError when it is not there.
    """
    with folder.shard(name.shard) as shard_fd:
        fd = folder.ops.open(name.file, os.O_RDONLY | folder.alignment.flags, shard_fd)
    try:
        status = os.fstat(fd)
        try:
            yield fd, status
        except DamagedFileError as error:
            error.identity = Identity.of(status)
            raise
    finally:
        folder.ops.close(fd)


def read_page(folder: Folder, io: PageIO, entry: Entry, memory: PageMemory, wanted: Wanted) -> Read:
    """Read and verify what is wanted of a page file, into the memory of the same or another share.

    Args:
        wanted: No other eighths than those of the memory's share.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: It could not be read.
        DamagedFileError: It is not what the index or its own checksums say.
        OtherSizeError: The memory has another length.
    """
    with opened_page(folder, entry.name) as (fd, status):
        check_size(status, entry.record.file_bytes)
        share = entry.record.share
        if share == memory.share and wanted == Wanted(None, share.eighths, True):
            return _read_all(folder, io, fd, entry, memory)
        return _read_blocks(folder, io, fd, entry, memory, wanted)


def check_size(status: os.stat_result, file_bytes: int) -> None:
    """Refuse a file that is shorter or longer than ``file_bytes``.

    Raises:
        DamagedFileError: It is.
    """
    if status.st_size != file_bytes:
        raise DamagedFileError(f"it has {status.st_size} bytes, not {file_bytes}")


def read_header(folder: Folder, io: PageIO, fd: int) -> Header:
    """The verified header of an open page file.

    Raises:
        OSError: It could not be read.
        DamagedFileError: It is none.
    """
    first = io.scratch.header(BLOCK)
    _filled(io.read(fd, 0, [first], folder.alignment))
    length = header_length(first)
    header = io.scratch.header(length)
    if length > BLOCK:
        _filled(io.read(fd, 0, [header], folder.alignment))
    return parse_header(header)


def _check_names(header: Header, entry: Entry) -> None:
    record, layout = entry.record, header.layout
    wanted = (entry.name, record.header_bytes, record.payload_bytes)
    if (header.name, layout.header_bytes, layout.payload_bytes) != wanted:
        raise DamagedFileError("it is the file of something else")


def _check_memory(payload_bytes: int, memory: PageMemory) -> None:
    number, of = memory.share
    if payload_bytes != memory.length:
        raise OtherSizeError(
            f"share {number} of {of} has {payload_bytes} bytes, the memory {memory.length}"
        )


def _read_all(folder: Folder, io: PageIO, fd: int, entry: Entry, memory: PageMemory) -> Read:
    """Read a file whose payload is just what the memory is for, in one go."""
    record = entry.record
    _check_memory(record.payload_bytes, memory)
    header_memory = io.scratch.header(record.header_bytes)
    padding = round_up(record.payload_bytes) - record.payload_bytes
    pieces = [header_memory, *memory.pieces(0, memory.length)]
    if padding:
        pieces.append(io.scratch.tail[:padding])
    copied = _filled(io.read(fd, 0, pieces, folder.alignment))
    header = parse_header(header_memory)
    _check_names(header, entry)
    for block, digest in zip(header.layout.blocks, header.digests, strict=True):
        _verify(memory, block, block.payload_offset, digest)
    return Read(memory.length, copied)


def _read_blocks(
    folder: Folder, io: PageIO, fd: int, entry: Entry, memory: PageMemory, wanted: Wanted
) -> Read:
    """Read the wanted blocks of a file to where the memory has them."""
    header = read_header(folder, io, fd)
    _check_names(header, entry)
    _check_memory(file_layout(header.table, memory.share).payload_bytes, memory)
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
        copied += _filled(io.read(fd, offset, pieces, folder.alignment))
        for block in run:
            _verify(memory, block, places[block.page_offset], digests[block])
            read += block.length
    return Read(read, copied)


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


def _filled(result: tuple[bool, int]) -> int:
    """Bytes that were copied by a reading that must not fall short."""
    filled, copied = result
    if not filled:
        # The file had its right length a moment ago, so it is the reading that fell short.
        raise OSError(errno.EIO, "the file system returned too little")
    return copied
