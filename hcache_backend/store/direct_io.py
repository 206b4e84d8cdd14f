"""Reads and writes of page files past the page cache (O_DIRECT), if the file system can."""

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcache_backend.format.envelope import BLOCK, round_up
from hcache_backend.format.units import PageMemory
from hcache_backend.store.file_ops import FileOps, opened

_Move = Callable[[int, Sequence[memoryview], int], int]


class Alignment(NamedTuple):
    """The demands of a file system on direct I/O."""

    flags: int  # os.O_DIRECT, or 0 if it has none
    memory: int  # addresses must be multiples of this
    length: int  # offsets and lengths must be multiples of this


BUFFERED = Alignment(0, 1, 1)
_ZEROS = memoryview(mmap.mmap(-1, BLOCK)).toreadonly()


class Scratch(threading.local):
    """Aligned memory of the calling thread: ``size`` bytes to bounce through, room for headers."""

    def __init__(self, size: int) -> None:
        self.bounce = memoryview(mmap.mmap(-1, size))
        self._header = memoryview(mmap.mmap(-1, 4 * BLOCK))
        self.end = memoryview(mmap.mmap(-1, BLOCK))

    def header(self, length: int) -> memoryview:
        if length > len(self._header):
            self._header = memoryview(mmap.mmap(-1, length))
        return self._header[:length]


class PageIO:
    """Reads and writes stretches of the files of one file system, directly if it can. Memory that
    direct I/O (O_DIRECT) does not take goes through an aligned buffer of the calling thread, of
    ``buffer_bytes``; its bytes are counted as copied."""

    def __init__(self, ops: FileOps, alignment: Alignment, buffer_bytes: int) -> None:
        self._ops, self.alignment, self.scratch = ops, alignment, Scratch(buffer_bytes)

    def write(self, fd: int, pieces: Sequence[memoryview]) -> int:
        """Write ``pieces``, one after the other, as the file ``fd``, padded with zeros to 4096
        bytes. Returns how many bytes were copied to aligned memory first."""
        length = sum(piece.nbytes for piece in pieces)
        whole = round_up(length)
        if (division := _divide(pieces, 0, self.alignment)) is not None:
            body, tail = division  # only the tail is copied, and padded
            end = self.scratch.end[: whole - length + len(tail)]
            end[: len(tail)], end[len(tail) :] = tail, bytes(whole - length)
            move_all(self._ops.write, fd, [*body, end] if end else body, 0, whole)
            return len(tail)
        file, bounce = PageMemory([*pieces, _ZEROS[: whole - length]]), self.scratch.bounce
        for start in range(0, whole, len(bounce)):
            size = min(len(bounce), whole - start)
            for piece, room in _pair_pieces(file.pieces(start, size), bounce):
                np.copyto(room, piece)
            move_all(self._ops.write, fd, [bounce[:size]], start, size)
        return length

    def read(self, fd: int, offset: int, pieces: Sequence[memoryview]) -> int:
        """Fill ``pieces``, one after the other, with the bytes of file ``fd`` from ``offset`` on;
        it has enough. Returns how many bytes were copied from aligned memory."""
        length = sum(piece.nbytes for piece in pieces)
        if (division := _divide(pieces, offset, self.alignment)) is not None:
            body, tail = division  # the tail is read by way of whole blocks, and copied
            # No further than the block in which a file may end: KvikIO reads nothing past it.
            cut = offset + length - len(tail)  # where the tail begins in the file
            end = self.scratch.end[: round_up(cut + len(tail)) - cut if tail else 0]
            move_all(self._ops.read, fd, [*body, end] if end else body, offset, length)
            tail[:] = end[: len(tail)]
            return len(tail)
        target, bounce, done = PageMemory(pieces), self.scratch.bounce, 0
        while done < length:
            skipped = (offset + done) % BLOCK  # bytes of the first block that are not wanted
            size = min(length - done, len(bounce) - skipped)
            blocks = [bounce[: round_up(skipped + size)]]
            move_all(self._ops.read, fd, blocks, offset + done - skipped, skipped + size)
            for piece, room in _pair_pieces(target.pieces(done, size), bounce[skipped:]):
                np.copyto(piece, room)
            done += size
        return length


def move_all(move: _Move, fd: int, pieces: Sequence[memoryview], offset: int, least: int) -> None:
    """Call ``move``, :meth:`.FileOps.read` or ``write``, until at least ``least`` bytes of
    ``pieces`` are moved. The file may end behind them; if it ends before, an OSError."""
    while (done := move(fd, pieces, offset)) < least:
        if done <= 0:
            raise OSError(errno.EIO, "the file system moved too little, as of a cut file")
        offset += done
        least -= done
        pieces = PageMemory(pieces).pieces(done, sum(piece.nbytes for piece in pieces) - done)


def find_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """The demands of direct I/O in a folder, found by trying a new file ``name``; or BUFFERED."""
    room = memoryview(mmap.mmap(-1, 4 * BLOCK))
    with _unless_refused():
        fd = ops.open(name, os.O_RDWR | os.O_CREAT | os.O_DIRECT, dir_fd)
        try:
            # Small demands first: every step asks for more than the one before.
            demands = ((64, 512), (512, 512), (64, BLOCK), (512, BLOCK), (BLOCK, BLOCK))
            for memory, length in demands:
                # A block in two pieces whose addresses and lengths are just such multiples.
                parts = [room[memory:][:length], room[2 * BLOCK + memory :][: BLOCK - length]]
                parts = [part for part in parts if part]
                with _unless_refused():
                    if ops.write(fd, parts, 0) == BLOCK and ops.read(fd, parts, 0) == BLOCK:
                        return Alignment(os.O_DIRECT, memory, length)
        finally:
            ops.close(fd)
            ops.unlink(name, dir_fd)
    return BUFFERED


def reading_alignment(ops: FileOps, dir_fd: int, name: str) -> Alignment:
    """As find_alignment, without writing: whole blocks if the file ``name`` can be read so."""
    room = memoryview(mmap.mmap(-1, BLOCK))
    with _unless_refused(), opened(ops, name, os.O_RDONLY | os.O_DIRECT, dir_fd) as fd:
        ops.read(fd, [room], 0)
        return Alignment(os.O_DIRECT, BLOCK, BLOCK)
    return BUFFERED


@contextmanager
def _unless_refused() -> Iterator[None]:
    """Leave the block without an error if a file system refuses direct I/O in it."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


def _divide(
    pieces: Sequence[memoryview], offset: int, alignment: Alignment
) -> tuple[Sequence[memoryview], memoryview] | None:
    """The body of ``pieces``, which direct I/O takes in place, and the tail: the end of the last
    piece, shorter than ``alignment.length``. None: other places are unaligned, so it takes none."""
    _, memory, length = alignment
    body, rest = [*pieces], pieces[-1].nbytes % length
    cut = pieces[-1].nbytes - rest
    body[-1:], tail = [pieces[-1][:cut]] if cut else [], pieces[-1][cut:]
    unaligned = any(p.nbytes % length or (memory > 1 and _address(p) % memory) for p in body)
    return None if unaligned or offset % length else (body, tail)


def _address(piece: memoryview) -> int:
    if piece.readonly:
        return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0])
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


def _pair_pieces(
    pieces: Sequence[memoryview], flat: memoryview
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Each piece, and as long a stretch of ``flat``: numpy copies without the interpreter lock."""
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.nbytes
        yield np.frombuffer(piece, np.uint8), np.frombuffer(flat[begin:end], np.uint8)
