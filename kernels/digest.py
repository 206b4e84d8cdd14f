"""Digests of rows of weights: how they are computed is part of a namespace, so it never changes.

A row is words of its bytes, the widest that divide it. Each word is mixed with its place, the sum
is the digest of the row. Integers wrap around, so the order of additions does not matter.
"""

import torch
import triton
import triton.language as tl

from .launch import Launch

PROGRAMS = 512  # pairs of sums: one for each program of a launch, so that programs share nothing

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
_MIX_A = -7046029254386353131  # odd 64-bit constants of the golden ratio and of splitmix64
_MIX_B = -4658895280553007687
_WIDE, _NARROW = (2, 1024), (128, 16)  # rows and words of each that a program reads at a time


def digest_rows(rows: torch.Tensor, start: int, sums: torch.Tensor) -> None:
    """Add the digests of rows to sums, on the current stream.

    Args:
        rows: ``[n, values]`` of any dtype; copied if values of a row do not lie side by side.
        start: Number of the first row in its tensor.
        sums: int64 ``[PROGRAMS, 2]``, contiguous; over all programs the sum of digests times a
            number of their row's place, and the sum of digests.
    """
    words = _words(rows)
    if words.is_cuda:
        digest_launch(words, start, sums).run()
        return
    words = words.to(torch.int64)
    places = torch.arange(words.shape[1], device=words.device) * _MIX_B | 1
    mixed = (words ^ (words >> 29)) * _MIX_A + words * places
    digests = (mixed ^ (mixed >> 32)).sum(1)
    digests = (digests ^ (digests >> 31)) * _MIX_B
    digests = digests ^ (digests >> 29)
    places = torch.arange(start, start + len(digests), device=words.device) * _MIX_B | 1
    sums[0] += torch.stack(((digests * places).sum(), digests.sum()))


def _words(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of ``rows`` as words, ``[n, words]``."""
    rows = rows.contiguous()
    dtype = next(d for d in _WORDS if rows.shape[1] * rows.element_size() % d.itemsize == 0)
    if rows.storage_offset() * rows.element_size() % dtype.itemsize:
        rows = rows.clone()
    return rows.view(torch.uint8).view(dtype)


def digest_launch(words: torch.Tensor, start: int, sums: torch.Tensor) -> Launch:
    """The launch of :func:`digest_rows` for ``words``, ``[n, width]`` on a GPU."""
    n, width = words.shape
    rows, block = _WIDE if width >= _WIDE[1] // 2 else _NARROW
    grid = (min(PROGRAMS, triton.cdiv(n, rows)),)
    args = {"words": words, "sums": sums, "n": n, "width": width, "start": start, "ROWS": rows}
    args |= {"BLOCK": block, "MIX_A": _MIX_A, "MIX_B": _MIX_B}
    return Launch(digest_kernel, grid, args, warps=4, stages=1)


@triton.jit(  # else it is compiled again for each shape
    do_not_specialize=["n", "width", "start"],
    do_not_specialize_on_alignment=["words", "sums"],
)
def digest_kernel(
    words,  # int [n, width]
    sums,  # int64 [programs, 2]
    n,
    width,
    start,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIX_A: tl.constexpr,
    MIX_B: tl.constexpr,
):
    """Add the digests of rows to the sums of each program, as :func:`digest_rows` says."""
    program = tl.program_id(0)
    exact = tl.zeros((ROWS,), tl.int64)
    rows = tl.zeros((ROWS,), tl.int64)
    for first in range(program * ROWS, n, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        digests = tl.zeros((ROWS,), tl.int64)
        for begin in range(0, width, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            inside = (row < n)[:, None] & (at < width)[None, :]
            word = tl.load(words + row[:, None] * width + at[None, :], mask=inside, other=0)
            word = word.to(tl.int64)
            place = at.to(tl.int64) * MIX_B | 1
            mixed = (word ^ (word >> 29)) * MIX_A + word * place[None, :]
            digests += tl.sum(mixed ^ (mixed >> 32), 1)
        digests = (digests ^ (digests >> 31)) * MIX_B
        digests = digests ^ (digests >> 29)
        exact += digests * ((start + row) * MIX_B | 1)
        rows += digests
    total = sums + 2 * program
    exact_total, rows_total = tl.load(total) + tl.sum(exact), tl.load(total + 1) + tl.sum(rows)
    tl.debug_barrier()  # every warp loads the sums, and one of them stores new ones
    tl.store(total, exact_total)
    tl.store(total + 1, rows_total)
