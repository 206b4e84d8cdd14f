"""Moving pages between memory and page files: vectored, direct where memory and offset allow it.

Direct I/O (O_DIRECT) wants addresses, lengths and offsets that are multiples of what the device
asks for. Memory that is not aligned goes through the aligned buffer of the calling thread, and the
bytes are counted as copied.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import xxhash

from hcache_backend.store.file_ops import MAX_VECTORS, FileOps
from hcache_backend.store.format import BLOCK, round_up
from hcache_backend.store.shares import WHOLE, Parts, Share


class Alignment(NamedTuple):
    """What the file system of a folder wants of direct I/O.

    Attributes:
        flags: ``os.O_DIRECT``, or 0 when it has none.
        memory: Addresses must be multiples of this.
        length: Offsets and lengths must be multiples of this.
    """

    flags: int
    memory: int
    length: int


BUFFERED = Alignment(0, 1, 1)


class PageMemory:
    """The memory of a share of one page, addressed by offsets in the payload of the share.

    Args:
        parts: The memory.
        share: The share; of the whole page the payload is the page itself.
    """

    def __init__(self, parts: Parts, share: Share = WHOLE) -> None:
        self.share = share
        self._parts = [part for part in parts if part.nbytes]
        self._ends = list(accumulate(part.nbytes for part in self._parts))
        self.length = self._ends[-1] if self._ends else 0

    def pieces(self, start: int, length: int) -> list[memoryview]:
        """The memory of ``length`` bytes of the payload from ``start`` on."""
        if len(self._parts) == 1:
            return [self._parts[0][start : start + length]]
        found = []
        number = bisect_right(self._ends, start)
        while length > 0:
            part = self._parts[number]
            begin = start - (self._ends[number] - part.nbytes)
            piece = part[begin : begin + length]
            found.append(piece)
            start += piece.nbytes
            length -= piece.nbytes
            number += 1
        return found

    def digest(self, start: int, length: int) -> int:
        """xxh3-64 of a stretch of the payload."""
        pieces = self.pieces(start, length)
        if len(pieces) == 1:
            return xxhash.xxh3_64_intdigest(pieces[0])
        hasher = xxhash.xxh3_64()
        for piece in pieces:
            hasher.update(piece)
        return hasher.intdigest()


class Scratch(threading.local):
    """Aligned memory of the calling thread: a bounce buffer, and room for headers.

    Args:
        size: Bytes of the bounce buffer, a multiple of 4096.
    """

    def __init__(self, size: int) -> None:
        self.bounce = memoryview(mmap.mmap(-1, size))
        self._header = memoryview(mmap.mmap(-1, 4 * BLOCK))
        self.tail = memoryview(mmap.mmap(-1, BLOCK))

    def header(self, length: int) -> memoryview:
        """Aligned room for a header of ``length`` bytes."""
        if length > len(self._header):
            self._header = memoryview(mmap.mmap(-1, length))
        return self._header[:length]


ZEROS = memoryview(mmap.mmap(-1, BLOCK)).toreadonly()


class PageIO:
    """Reads and writes stretches of files.

    Args:
        ops: The file operations.
        buffer_bytes: Size of the aligned buffer of every thread that needs one.
    """

    def __init__(self, ops: FileOps, buffer_bytes: int) -> None:
        self._ops = ops
        self.scratch = Scratch(buffer_bytes)

    def write(self, fd: int, pieces: Sequence[memoryview], alignment: Alignment) -> int:
        """Write ``pieces`` as the file ``fd`` from its beginning, padded to 4096 bytes.

        Returns:
            Bytes that had to be copied into aligned memory.

        Raises:
            OSError: Also when the file system took only part of it.
        """
        total = sum(piece.nbytes for piece in pieces)
        padding = round_up(total) - total
        tail = [ZEROS[:padding]] if padding else []
        if _aligned([*pieces, *tail], 0, alignment):
            self._write_all(fd, [*pieces, *tail], 0)
            return 0
        bounce = self.scratch.bounce
        offset = 0
        for filled in _fill(bounce, [*pieces, *tail]):
            self._write_all(fd, [bounce[:filled]], offset)
            offset += filled
        return total

    def read(
        self, fd: int, offset: int, pieces: Sequence[memoryview], alignment: Alignment
    ) -> tuple[bool, int]:
        """Fill ``pieces`` from ``offset`` of the file on.

        Returns:
            Whether the file was long enough, and the bytes that had to be copied.

        Raises:
            OSError: The file could not be read.
        """
        total = sum(piece.nbytes for piece in pieces)
        if _aligned(pieces, offset, alignment):
            return self._read_all(fd, list(pieces), offset) == total, 0
        bounce = self.scratch.bounce
        targets = list(pieces)
        position, end = offset, offset + total
        while position < end:
            begin = position // BLOCK * BLOCK
            wanted = min(round_up(end) - begin, len(bounce))
            got = self._read_all(fd, [bounce[:wanted]], begin)
            usable = min(begin + got, end) - position
            if usable < min(begin + wanted, end) - position:
                return False, total
            _scatter(bounce[position - begin : position - begin + usable], targets)
            position += usable
        return True, total

    def _write_all(self, fd: int, pieces: list[memoryview], offset: int) -> None:
        while pieces:
            written = self._ops.write(fd, pieces, offset)
            if written <= 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            offset += written
            pieces = _advance(pieces, written)

    def _read_all(self, fd: int, pieces: list[memoryview], offset: int) -> int:
        """Bytes read until the pieces were full or the file ended."""
        done = 0
        while pieces:
            asked = sum(piece.nbytes for piece in pieces[:MAX_VECTORS])
            got = self._ops.read(fd, pieces, offset + done)
            if got <= 0:
                break
            done += got
            pieces = _advance(pieces, got)
            if got < asked and done % BLOCK:
                break  # a file that ends within a block has ended
        return done


def probe_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """Find out by trying what direct I/O wants in a folder; ``name`` is made and removed there.

    Raises:
        OSError: The folder cannot be written or read at all.
    """
    room = memoryview(mmap.mmap(-1, 4 * BLOCK))
    # Small demands first: every step asks for more than the one before.
    candidates = [
        Alignment(os.O_DIRECT, memory, length) for length in (512, BLOCK) for memory in (64, 512)
    ]
    candidates.append(Alignment(os.O_DIRECT, BLOCK, BLOCK))
    flags = os.O_RDWR | os.O_CREAT
    try:
        fd = ops.open(name, flags | os.O_DIRECT, dir_fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return BUFFERED
    try:
        for candidate in candidates:
            start, first = candidate.memory, candidate.length
            vectors = [room[start : start + first]]
            if first < BLOCK:
                second = 2 * BLOCK + start
                vectors.append(room[second : second + BLOCK - first])
            try:
                if ops.write(fd, vectors, 0) == BLOCK and ops.read(fd, vectors, 0) == BLOCK:
                    return candidate
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
        return BUFFERED
    finally:
        ops.close(fd)
        ops.unlink(name, dir_fd)


def _aligned(pieces: Sequence[memoryview], offset: int, alignment: Alignment) -> bool:
    _, memory, length = alignment
    if memory == 1:
        return True
    return offset % length == 0 and all(
        piece.nbytes % length == 0 and _address(piece) % memory == 0 for piece in pieces
    )


def _address(piece: memoryview) -> int:
    if piece.readonly:
        return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def _advance(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``pieces`` after ``count`` bytes."""
    number = 0
    while number < len(pieces) and count >= pieces[number].nbytes:
        count -= pieces[number].nbytes
        number += 1
    rest = pieces[number:]
    if rest and count:
        rest[0] = rest[0][count:]
    return rest


def _fill(buffer: memoryview, pieces: Sequence[memoryview]) -> Iterator[int]:
    """Copy ``pieces`` through ``buffer``; yields how much of it is filled."""
    filled = 0
    for piece in pieces:
        done = 0
        while done < piece.nbytes:
            step = min(piece.nbytes - done, len(buffer) - filled)
            _copy(buffer[filled : filled + step], piece[done : done + step])
            done += step
            filled += step
            if filled == len(buffer):
                yield filled
                filled = 0
    if filled:
        yield filled


def _scatter(source: memoryview, targets: list[memoryview]) -> None:
    """Copy ``source`` into the first bytes of ``targets`` and take them off the list."""
    while source:
        step = min(len(source), targets[0].nbytes)
        _copy(targets[0][:step], source[:step])
        source = source[step:]
        if step == targets[0].nbytes:
            del targets[0]
        else:
            targets[0] = targets[0][step:]


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy copies without holding the interpreter lock
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
