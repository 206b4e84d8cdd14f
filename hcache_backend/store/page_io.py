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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hcache_backend.format.envelope import BLOCK, round_up
from hcache_backend.format.units import PageMemory
from hcache_backend.store.file_ops import FileOps, opened


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


class Scratch(threading.local):
    """Aligned memory of the calling thread: ``size`` bytes to bounce through, room for headers."""

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
    """Reads and writes stretches of the files of one file system.

    Threads that need an aligned buffer have one of ``buffer_bytes`` each.
    """

    def __init__(self, ops: FileOps, alignment: Alignment, buffer_bytes: int) -> None:
        self._ops = ops
        self.alignment = alignment
        self.scratch = Scratch(buffer_bytes)

    def write(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write ``pieces`` as the file ``fd`` from its beginning, padded to 4096 bytes.

        Returns:
            Bytes that had to be copied into aligned memory.

        Raises:
            OSError: Also when the file system took only part of it.
        """
        length = sum(piece.nbytes for piece in pieces)
        if padding := round_up(length) - length:
            pieces = [*pieces, ZEROS[:padding]]
        if _aligned(pieces, 0, self.alignment):
            self._write_all(fd, pieces, 0)
            return 0
        file = PageMemory(pieces)
        bounce = self.scratch.bounce
        for start in range(0, file.length, len(bounce)):
            size = min(len(bounce), file.length - start)
            end = 0
            for piece in file.pieces(start, size):
                begin, end = end, end + piece.nbytes
                _copy(bounce[begin:end], piece)
            self._write_all(fd, [bounce[:size]], start)
        return length

    def read(self, fd: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill ``pieces`` from ``offset`` of a file on, which is known to be long enough.

        Returns:
            Bytes that had to be copied out of aligned memory.

        Raises:
            OSError: The file could not be read, or only in part.
        """
        if _aligned(pieces, offset, self.alignment):
            self._read_all(fd, pieces, offset, sum(piece.nbytes for piece in pieces))
            return 0
        target = PageMemory(pieces)
        bounce = self.scratch.bounce
        done = 0
        while done < target.length:
            skipped = (offset + done) % BLOCK
            size = min(target.length - done, len(bounce) - skipped)
            room = bounce[: round_up(skipped + size)]
            self._read_all(fd, [room], offset + done - skipped, skipped + size)
            end = skipped
            for piece in target.pieces(done, size):
                begin, end = end, end + piece.nbytes
                _copy(piece, bounce[begin:end])
            done += size
        return target.length

    def _write_all(self, fd: int, pieces: Sequence[memoryview], offset: int) -> None:
        while pieces:
            written = self._ops.write(fd, pieces, offset)
            if written <= 0:
                raise OSError(errno.EIO, "the file system wrote nothing")
            offset += written
            pieces = _behind(pieces, written)

    def _read_all(self, fd: int, pieces: Sequence[memoryview], offset: int, least: int) -> None:
        """Fill the first ``least`` bytes of ``pieces`` at least: the file may end behind them."""
        while (got := self._ops.read(fd, pieces, offset)) < least:
            if got <= 0:
                # The file had its right length a moment ago, so it is the reading that fell short.
                raise OSError(errno.EIO, "the file system returned too little, as of a cut file")
            offset += got
            least -= got
            pieces = _behind(pieces, got)


def probe_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """Find out by trying what direct I/O wants in a folder; ``name`` is made and removed there."""
    room = memoryview(mmap.mmap(-1, 4 * BLOCK))
    # Small demands first: every step asks for more than the one before.
    demands = ((64, 512), (512, 512), (64, BLOCK), (512, BLOCK), (BLOCK, BLOCK))
    candidates = [Alignment(os.O_DIRECT, *demand) for demand in demands]
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


def reading_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """What direct reads in a folder want: whole blocks, if its file ``name`` can be read so."""
    room = memoryview(mmap.mmap(-1, BLOCK))
    try:
        with opened(ops, name, os.O_RDONLY | os.O_DIRECT, dir_fd) as fd:
            ops.read(fd, [room], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return BUFFERED
    return Alignment(os.O_DIRECT, BLOCK, BLOCK)


def _aligned(pieces: Sequence[memoryview], offset: int, alignment: Alignment) -> bool:
    _, memory, length = alignment
    if memory == 1:
        return True
    unaligned = [piece for piece in pieces if piece.nbytes % length or _address(piece) % memory]
    return not unaligned and offset % length == 0


def _behind(pieces: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of ``pieces`` behind their first ``done`` bytes."""
    for number, piece in enumerate(pieces):
        if done < piece.nbytes:
            return [piece[done:], *pieces[number + 1 :]]
        done -= piece.nbytes
    return []


def _address(piece: memoryview) -> int:
    if piece.readonly:
        return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def _copy(target: memoryview, source: memoryview) -> None:
    # numpy copies without holding the interpreter lock
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
