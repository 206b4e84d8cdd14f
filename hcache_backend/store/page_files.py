"""Writing and reading one page file in an open folder; an error of the disk is an OSError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from hcache_backend.format.units import Eighths, PageMemory, Unit
from hcache_backend.store.file_ops import PageIO, opened
from hcache_backend.store.folder import Folder
from hcache_backend.store.index import Entry


class PageRead(NamedTuple):
    """A file of page ``number`` of the caller's lists, and the ``part`` that it fills of the memory
    of the same or another share."""

    number: int
    entry: Entry
    part: Eighths
    memory: PageMemory


@dataclass(eq=False)
class PageWrite:
    """The share of page ``number`` of the caller's lists, on its way to the disk."""

    number: int
    entry: Entry
    memory: PageMemory
    layout: FileLayout
    place: tuple[int, str] | None = None  # open folder and name of a file that has no name yet
    copied: int = 0  # bytes that went through aligned memory
    stored: bool = False  # it is a page now


def write_page(folder: Folder, write: PageWrite) -> None:
    """Write the share of a page to a file of the session, or leave nothing of it."""
    io, memory, layout = folder.io, write.memory, write.layout
    header = io.scratch.header(layout.header_bytes)
    digests = memory.digests or memory.digests_of(layout.units)
    pack_header(header, write.entry.name, write.entry.writer, layout, digests)
    place = dir_fd, file = folder.session.new_file()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | io.alignment.flags
    try:
        with opened(folder.ops, file, flags, dir_fd) as fd:
            write.copied = io.write(fd, [header, *memory.parts])
    except OSError:
        remove_nameless(folder, place)
        raise
    write.place = place


def give_name(folder: Folder, write: PageWrite) -> None:
    """Make a page file of a file of the session."""
    assert write.place is not None
    source_fd, source = write.place
    name = write.entry.name
    with folder.buckets.opened(name.bucket, make=True) as bucket_fd:
        folder.ops.rename(source, source_fd, name.file, bucket_fd)
    write.place, write.stored = None, True


def remove_nameless(folder: Folder, place: tuple[int, str] | None) -> None:
    """Remove a file of the session, if there is one; otherwise the next opening removes it."""
    if place is not None:
        with contextlib.suppress(OSError):
            folder.ops.unlink(place[1], place[0])


def file_exists(folder: Folder, name: PageName) -> bool:
    """Whether a page file is really there."""
    try:
        with folder.buckets.opened(name.bucket) as bucket_fd:
            folder.ops.stat(name.file, bucket_fd)
    except FileNotFoundError:
        return False
    return True


def delete_page(folder: Folder, name: PageName, only: os.stat_result | None = None) -> bool:
    """Delete a page file, if it still is that with status ``only``; the folder's lock is held.

    Its entry in the index is the caller's. Returns whether there is no file now.
    """
    try:
        with folder.buckets.opened(name.bucket) as bucket_fd:
            if only is not None:
                there = folder.ops.stat(name.file, bucket_fd)
                if not os.path.samestat(there, only) or there.st_mtime_ns != only.st_mtime_ns:
                    return False
            folder.ops.unlink(name.file, bucket_fd)
    except FileNotFoundError:
        pass
    return True


def read_page(folder: Folder, read: PageRead) -> tuple[int, int]:
    """Read and verify a part of a page. Returns its bytes, and those through aligned memory.

    Raises:
        FileNotFoundError: There is no such file.
        DamagedFileError: It is not what the index or its own checksums say.
        ValueError: The memory has another length.
    """
    _, entry, part, memory = read
    share = entry.name.share
    with _opened(folder, entry.name) as fd:
        _check_size(fd, entry.file_bytes)
        if share == memory.share and part == share.eighths:
            return _read_all(folder.io, fd, entry, memory)
        return _read_units(folder.io, fd, entry, memory, part)


def entry_of(folder: Folder, name: PageName) -> Entry:
    """The entry that a page file should have, with its time of writing as its last use.

    Its header is verified. Raises as :func:`read_page`.
    """
    with _opened(folder, name) as fd:
        header = _read_header(folder.io, fd)
        if name != header.name:
            raise DamagedFileError("its name is not the one in its header")
        layout = header.layout
        _check_size(fd, layout.file_bytes)
        sizes = layout.header_bytes, layout.payload_bytes
        return Entry(name, *sizes, header.writer, os.fstat(fd).st_mtime_ns)


@contextlib.contextmanager
def _opened(folder: Folder, name: PageName) -> Iterator[int]:
    """A page file, open for reading; it tells its status if it turns out to be damaged."""
    flags = os.O_RDONLY | folder.io.alignment.flags
    with folder.buckets.opened(name.bucket) as bucket_fd:
        fd = folder.ops.open(name.file, flags, bucket_fd)
    try:
        yield fd
    except DamagedFileError as error:
        error.status = os.fstat(fd)
        raise
    finally:
        folder.ops.close(fd)


def _check_size(fd: int, file_bytes: int) -> None:
    size = os.fstat(fd).st_size
    if size != file_bytes:
        raise DamagedFileError(f"it has {size} bytes, not {file_bytes}")


def _read_header(io: PageIO, fd: int) -> Header:
    """The verified header of an open page file."""
    first = io.scratch.header(BLOCK)
    io.read(fd, 0, [first])
    header = io.scratch.header(header_length(first))
    if len(header) > BLOCK:
        io.read(fd, 0, [header])
    return parse_header(header)


def _read_all(io: PageIO, fd: int, entry: Entry, memory: PageMemory) -> tuple[int, int]:
    """Read a file that has exactly the memory's share, in one go."""
    _check_memory(entry.payload_bytes, memory)
    data = io.scratch.header(entry.header_bytes)
    padding = io.scratch.tail[: round_up(entry.payload_bytes) - entry.payload_bytes]
    copied = io.read(fd, 0, [data, *memory.parts, *([padding] if padding else ())])
    header = parse_header(data)
    _check_names(header, entry)
    _verify(memory, header.layout.units, header.digests)
    return memory.length, copied


def _read_units(
    io: PageIO, fd: int, entry: Entry, memory: PageMemory, part: Eighths
) -> tuple[int, int]:
    """Read the units of ``part`` to their places in the memory."""
    header = _read_header(io, fd)
    _check_names(header, entry)
    table = header.layout.table
    _check_memory(file_layout(table, memory.share).payload_bytes, memory)
    copied = 0
    read, runs = runs_between(table, header.name.share, memory.share, part)
    for offset, stretches, numbers, units in runs:
        pieces = [piece for stretch in stretches for piece in memory.pieces(*stretch)]
        copied += io.read(fd, offset, pieces)
        _verify(memory, units, tuple(header.digests[number] for number in numbers))
    return read, copied


def _check_names(header: Header, entry: Entry) -> None:
    layout = header.layout
    if (header.name, layout.header_bytes, layout.payload_bytes) != entry[:3]:
        raise DamagedFileError("it is the file of something else")


def _check_memory(payload_bytes: int, memory: PageMemory) -> None:
    if payload_bytes != memory.length:
        raise ValueError(f"{memory.share} has {payload_bytes} bytes, the memory {memory.length}")


def _verify(memory: PageMemory, units: Sequence[Unit], digests: tuple[int, ...]) -> None:
    found = memory.digests_of(units)
    if found != digests:
        pairs = zip(units, found, digests, strict=True)
        wrong = next(unit for unit, here, there in pairs if here != there)
        raise DamagedFileError(f"checksum of segment {wrong.segment}")
