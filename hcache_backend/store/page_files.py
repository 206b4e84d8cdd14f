"""Writing and reading one page file in an open folder; what the disk refuses is an OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from hcache_backend.format.envelope import BLOCK, PageName, round_up
from hcache_backend.format.file import (
    DamagedFileError,
    FileLayout,
    Header,
    file_layout,
    header_length,
    pack_header,
    parse_header,
    runs_between,
)
from hcache_backend.format.units import WHOLE, PageMemory, SegmentTable, Unit
from hcache_backend.store.file_ops import opened
from hcache_backend.store.folder import Folder, FolderView
from hcache_backend.store.index import Entry
from hcache_backend.store.page_io import PageIO


class OtherSizeError(Exception):
    """The memory for a page file has another length than what is to come into it."""


class PageRead(NamedTuple):
    """A page file to be read.

    Attributes:
        number: Place of the page in the caller's lists.
        entry: The file.
        memory: Where it goes to: the memory of the same or another share.
        own: Bit mask of the memory's eighths that this file is there for. A group that several
            files have comes from the file that is there for the first of its eighths.
    """

    number: int
    entry: Entry
    memory: PageMemory
    own: int


class PageWrite(NamedTuple):
    """The share of a page to be written.

    Attributes:
        number: Place of the page in the caller's lists.
        stamp: When it was used, for the index.
    """

    number: int
    name: PageName
    memory: PageMemory
    layout: FileLayout
    stamp: int


def page_write(
    number: int,
    name: PageName,
    memory: PageMemory,
    layout: FileLayout | None,
    stamp: int,
) -> PageWrite:
    """A share of page ``name`` in ``memory``, checked against its table.

    Args:
        layout: That of the share's file; None: every part of ``memory`` is one segment.

    Raises:
        ValueError: A share without a layout, or memory or digests of another number.
    """
    share = name.share
    if layout is None:
        if share != WHOLE:
            raise ValueError(f"share {share.number} of {share.of} without a table of the page")
        layout = file_layout(SegmentTable.of_parts(memory.parts), share)
    digests = len(layout.units) if memory.digests is None else len(memory.digests)
    if (layout.payload_bytes, len(layout.units)) != (memory.length, digests):
        raise ValueError(
            f"memory of {memory.length} bytes and {digests} digests for share {share.number} of "
            f"{share.of} of a page; by its table it has {layout.payload_bytes} and "
            f"{len(layout.units)}"
        )
    return PageWrite(number, name, memory, layout, stamp)


class Written(NamedTuple):
    """A page file that has no name yet.

    Attributes:
        number: Place of the page in the caller's lists.
        file: Which file of the session it is.
        entry: What the index will say of it.
        copied: Bytes that went through aligned memory.
    """

    number: int
    file: int
    entry: Entry
    copied: int


def write_page(folder: Folder, write: PageWrite, writer: bytes) -> Written:
    """Write the share of a page to a file of the session, or leave nothing of it."""
    page, name, memory, layout, stamp = write
    header = folder.io.scratch.header(layout.header_bytes)
    pack_header(header, name, writer, layout, memory.digests or memory.digests_of(layout.units))
    pieces = memory.pieces(0, memory.length)
    number = folder.session.new_file()
    dir_fd, file = folder.session.place(number)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | folder.io.alignment.flags
    try:
        with opened(folder.ops, file, flags, dir_fd) as fd:
            copied = folder.io.write(fd, [header, *pieces])
    except OSError:
        remove_nameless(folder, number)
        raise
    entry = Entry(name, layout.header_bytes, layout.payload_bytes, writer, stamp)
    return Written(page, number, entry, copied)


def give_name(folder: Folder, written: Written) -> None:
    """Make a page file of a file of the session."""
    name = written.entry.name
    source_fd, source = folder.session.place(written.file)
    with folder.shard(name.bucket, make=True) as shard_fd:
        folder.ops.rename(source, source_fd, name.file, shard_fd)


def remove_nameless(folder: Folder, number: int) -> None:
    """Remove a file of the session; what cannot be removed goes at the next opening."""
    with contextlib.suppress(OSError):
        dir_fd, name = folder.session.place(number)
        folder.ops.unlink(name, dir_fd)


def file_exists(folder: FolderView, name: PageName) -> bool:
    """Whether a page file is really there."""
    try:
        with folder.shard(name.bucket) as shard_fd:
            folder.ops.stat(name.file, shard_fd)
    except FileNotFoundError:
        return False
    return True


def delete_page(folder: FolderView, name: PageName, only: os.stat_result | None = None) -> bool:
    """Delete a page file, under the folder's lock; its entry in the index is the caller's.

    Another file than the one with status ``only`` stays. Returns whether nothing stands there now.
    """
    try:
        with folder.shard(name.bucket) as shard_fd:
            if only is not None:
                there = folder.ops.stat(name.file, shard_fd)
                if not os.path.samestat(there, only) or there.st_mtime_ns != only.st_mtime_ns:
                    return False
            folder.ops.unlink(name.file, shard_fd)
    except FileNotFoundError:
        pass
    return True


def open_page(folder: FolderView, name: PageName) -> int:
    """Open a page file for reading; FileNotFoundError when it is not there."""
    flags = os.O_RDONLY | folder.io.alignment.flags
    with folder.shard(name.bucket) as shard_fd:
        return folder.ops.open(name.file, flags, shard_fd)


def read_page(folder: FolderView, read: PageRead) -> tuple[int, int]:
    """Read and verify what the memory needs of a page file.

    Returns:
        Payload bytes that were read, and bytes that went through aligned memory.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedFileError: It is not what the index or its own checksums say.
        OtherSizeError: The memory has another length.
    """
    _, entry, memory, own = read
    share = entry.name.share
    fd = open_page(folder, entry.name)
    try:
        check_size(fd, entry.file_bytes)
        if share == memory.share and own == share.eighths:
            return _read_all(folder.io, fd, entry, memory)
        return _read_units(folder.io, fd, entry, memory, own)
    except DamagedFileError as error:
        error.status = os.fstat(fd)
        raise
    finally:
        folder.ops.close(fd)


def check_size(fd: int, file_bytes: int) -> None:
    """Refuse a file that is shorter or longer than ``file_bytes``, by a DamagedFileError."""
    size = os.fstat(fd).st_size
    if size != file_bytes:
        raise DamagedFileError(f"it has {size} bytes, not {file_bytes}")


def read_header(io: PageIO, fd: int) -> Header:
    """The verified header of an open page file; a DamagedFileError if it is none."""
    first = io.scratch.header(BLOCK)
    io.read(fd, 0, [first])
    length = header_length(first)
    header = io.scratch.header(length)
    if length > BLOCK:
        io.read(fd, 0, [header])
    return parse_header(header)


def _check_names(header: Header, entry: Entry) -> None:
    layout = header.layout
    if (header.name, layout.header_bytes, layout.payload_bytes) != entry[:3]:
        raise DamagedFileError("it is the file of something else")


def _check_memory(payload_bytes: int, memory: PageMemory) -> None:
    number, of = memory.share
    if payload_bytes != memory.length:
        raise OtherSizeError(
            f"share {number} of {of} has {payload_bytes} bytes, the memory {memory.length}"
        )


def _read_all(io: PageIO, fd: int, entry: Entry, memory: PageMemory) -> tuple[int, int]:
    """Read a file whose payload is just what the memory is for, in one go."""
    _check_memory(entry.payload_bytes, memory)
    header_memory = io.scratch.header(entry.header_bytes)
    padding = round_up(entry.payload_bytes) - entry.payload_bytes
    pieces = [header_memory, *memory.pieces(0, memory.length)]
    if padding:
        pieces.append(io.scratch.tail[:padding])
    copied = io.read(fd, 0, pieces)
    header = parse_header(header_memory)
    _check_names(header, entry)
    _verify(memory, header.layout.units, header.digests)
    return memory.length, copied


def _read_units(io: PageIO, fd: int, entry: Entry, memory: PageMemory, own: int) -> tuple[int, int]:
    """Read the units that a file is there for to where the memory has them."""
    header = read_header(io, fd)
    _check_names(header, entry)
    _check_memory(file_layout(header.table, memory.share).payload_bytes, memory)
    copied = 0
    read, runs = runs_between(header.table, header.name.share, memory.share, own)
    for offset, stretches, numbers, units in runs:
        pieces = [piece for stretch in stretches for piece in memory.pieces(*stretch)]
        copied += io.read(fd, offset, pieces)
        _verify(memory, units, tuple(header.digests[number] for number in numbers))
    return read, copied


def _verify(memory: PageMemory, units: Sequence[Unit], digests: tuple[int, ...]) -> None:
    found = memory.digests_of(units)
    if found != digests:
        pairs = zip(units, found, digests, strict=True)
        wrong = next(unit for unit, here, there in pairs if here != there)
        raise DamagedFileError(f"checksum of segment {wrong.segment}")
