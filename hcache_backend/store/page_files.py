"""Writing and reading one page file in an open folder; what the disk refuses is an OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from hcache_backend.store.file_ops import opened
from hcache_backend.store.folder import Folder, FolderView
from hcache_backend.store.format import (
    BLOCK,
    DamagedFileError,
    Header,
    PageName,
    file_layout,
    header_length,
    pack_header,
    parse_header,
    round_up,
)
from hcache_backend.store.index import Entry
from hcache_backend.store.page_io import PageIO, PageMemory
from hcache_backend.units import ALL_EIGHTHS, SegmentTable, Unit


@dataclass(frozen=True)
class Subset:
    """The part of a page that a caller wants.

    Attributes:
        segments: Numbers of the wanted segments; None means all.
        eighths: Bit mask of the wanted eighths. A group that stands for several is wanted when one
            of them is.
    """

    segments: frozenset[int] | None = None
    eighths: int = ALL_EIGHTHS


class OtherSizeError(Exception):
    """The memory for a page file has another length than what is to come into it."""


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
    name: PageName,
    writer: bytes,
    memory: PageMemory,
    table: SegmentTable,
    stamp: int,
) -> Written:
    """Write the share of a page in ``memory`` to a file of the session, or leave nothing of it.

    ``stamp`` is when it was used, for the index.
    """
    layout = file_layout(table, name.share)
    header = folder.io.scratch.header(layout.header_bytes)
    digests = memory.digests or [memory.digest(unit) for unit in layout.units]
    pack_header(header, name, writer, table, digests)
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
    return Written(number, entry, copied)


def remove_nameless(folder: Folder, number: int) -> None:
    """Remove a file of the session; what cannot be removed goes at the next opening."""
    with contextlib.suppress(OSError):
        dir_fd, name = folder.session.place(number)
        folder.ops.unlink(name, dir_fd)


def file_exists(folder: FolderView, name: PageName) -> bool:
    """Whether a page file is really there."""
    try:
        with folder.shard(name.shard) as shard_fd:
            folder.ops.stat(name.file, shard_fd)
    except FileNotFoundError:
        return False
    return True


def delete_page(folder: FolderView, name: PageName, only: os.stat_result | None = None) -> bool:
    """Delete a page file, under the folder's lock; its entry in the index is the caller's.

    Another file than the one with status ``only`` stays. Returns whether nothing stands there now.
    """
    try:
        with folder.shard(name.shard) as shard_fd:
            if only is not None:
                there = folder.ops.stat(name.file, shard_fd)
                if not os.path.samestat(there, only) or there.st_mtime_ns != only.st_mtime_ns:
                    return False
            folder.ops.unlink(name.file, shard_fd)
    except FileNotFoundError:
        pass
    return True


@contextmanager
def opened_page(folder: FolderView, name: PageName) -> Iterator[tuple[int, os.stat_result]]:
    """A page file, open for reading, and its status; FileNotFoundError when it is not there."""
    with folder.shard(name.shard) as shard_fd:
        fd = folder.ops.open(name.file, os.O_RDONLY | folder.io.alignment.flags, shard_fd)
    try:
        status = os.fstat(fd)
        try:
            yield fd, status
        except DamagedFileError as error:
            error.status = status
            raise
    finally:
        folder.ops.close(fd)


def read_page(
    folder: FolderView, entry: Entry, memory: PageMemory, wanted: Subset, own: int
) -> tuple[int, int]:
    """Read and verify what is wanted of a page file, into the memory of the same or another share.

    Args:
        wanted: What is wanted of the page, of this and other files: no other eighths than those of
            the memory's share.
        own: Bit mask of the wanted eighths that this file is there for. A group that several files
            have comes from the file that is there for the first of its eighths.

    Returns:
        Payload bytes that were read, and bytes that went through aligned memory.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedFileError: It is not what the index or its own checksums say.
        OtherSizeError: The memory has another length.
    """
    with opened_page(folder, entry.name) as (fd, status):
        check_size(status, entry.file_bytes)
        share = entry.name.share
        if share == memory.share and wanted == Subset(eighths=own) and own == share.eighths:
            return _read_all(folder.io, fd, entry, memory)
        return _read_units(folder.io, fd, entry, memory, wanted, own)


def check_size(status: os.stat_result, file_bytes: int) -> None:
    """Refuse a file that is shorter or longer than ``file_bytes``, by a DamagedFileError."""
    if status.st_size != file_bytes:
        raise DamagedFileError(f"it has {status.st_size} bytes, not {file_bytes}")


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
    for unit, digest in zip(header.layout.units, header.digests, strict=True):
        _verify(memory, unit, digest)
    return memory.length, copied


def _read_units(
    io: PageIO, fd: int, entry: Entry, memory: PageMemory, wanted: Subset, own: int
) -> tuple[int, int]:
    """Read the wanted units of a file to where the memory has them."""
    header = read_header(io, fd)
    _check_names(header, entry)
    target = file_layout(header.table, memory.share)
    _check_memory(target.payload_bytes, memory)
    digests = dict(zip(header.layout.units, header.digests, strict=True))
    places = target.payload_offsets
    read = copied = 0
    for run in _runs([unit for unit in header.layout.units if _is_in(unit, wanted, own)]):
        offset = header.layout.header_bytes + run[0].payload_offset
        pieces = [
            piece
            for start, length in _stretches(run, places)
            for piece in memory.pieces(start, length)
        ]
        copied += io.read(fd, offset, pieces)
        for unit in run:
            here = unit._replace(payload_offset=places[unit.page_offset])
            _verify(memory, here, digests[unit])
            read += unit.length
    return read, copied


def _is_in(unit: Unit, wanted: Subset, own: int) -> bool:
    if wanted.segments is not None and unit.segment not in wanted.segments:
        return False
    eighths = unit.eighths & wanted.eighths
    first = eighths & -eighths
    return bool(first & own)


def _verify(memory: PageMemory, unit: Unit, digest: int) -> None:
    if memory.digest(unit) != digest:
        raise DamagedFileError(f"checksum of segment {unit.segment}")


def _runs(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units that follow each other in the file, together: one reading each."""
    runs: list[list[Unit]] = []
    for unit in units:
        if runs and runs[-1][-1].payload_offset + runs[-1][-1].length == unit.payload_offset:
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return runs


def _stretches(run: Sequence[Unit], places: dict[int, int]) -> list[tuple[int, int]]:
    """Where the units of a run go in the memory, as few stretches: their starts and lengths."""
    stretches: list[tuple[int, int]] = []
    for unit in run:
        place = places[unit.page_offset]
        if stretches and sum(stretches[-1]) == place:
            start, length = stretches[-1]
            stretches[-1] = (start, length + unit.length)
        else:
            stretches.append((place, unit.length))
    return stretches
