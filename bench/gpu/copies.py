"""Copies over the bus that the product is measured against: by few programs, and straight to slots.

A kernel whose programs wait for the bus keeps matrix products off the multiprocessors that it
occupies. These go through their work with as few programs as they are told.
"""

# Kernels have no types to state.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hcache_kernels.launch import Launch
from hcache_kernels.project_kv import KVPool

WORD = 8
BLOCK = 2048
"""Words that a program copies at once: 16 KiB."""
WARPS = 4
KV_PROGRAMS = 32
"""Half a MiB on its way: more than a fast bus holds."""


def gather_launch(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, out: torch.Tensor, programs: int
) -> Launch:
    """``out[i] = pages[page_ids[i], offset : offset + length]`` by at most ``programs`` programs.

    Args:
        pages: In pinned host memory, uint8 ``[pages, page_bytes]``.
        page_ids: int64 ``[p]``.
        offset: Bytes, a multiple of 8.
        out: uint8 ``[p, length]``; ``length`` is a multiple of 8.
        programs: At least 1.
    """
    words = out.shape[1] // WORD
    parts = len(page_ids) * triton.cdiv(words, BLOCK)
    arguments = {
        "pages": pages,
        "page_ids": page_ids,
        "out": out,
        "page_bytes": pages.shape[1],
        "offset": offset,
        "parts": parts,
        "WORDS": words,
        "BLOCK": BLOCK,
    }
    return Launch(_gather_kernel, (min(programs, parts),), arguments, WARPS, stages=1)


def slots_launch(rows: torch.Tensor, slots: torch.Tensor, part: torch.Tensor) -> Launch:
    """``part[slots[i]] = rows[i]``.

    Args:
        rows: In pinned host memory, ``[n, width]``; a row has a multiple of 8 bytes.
        slots: int64 ``[n]``.
        part: K or V of a pool, ``[slots, heads, head_dim]`` with ``width`` values a slot.
    """
    words = rows.shape[1] * rows.itemsize // WORD
    block = triton.next_power_of_2(min(words, BLOCK))
    parts = len(rows) * triton.cdiv(words, block)
    arguments = {
        "rows": rows.view(torch.uint8),
        "slots": slots,
        "pool": part.view(torch.uint8),
        "parts": parts,
        "WORDS": words,
        "BLOCK": block,
    }
    return Launch(_slots_kernel, (min(KV_PROGRAMS, parts),), arguments, WARPS, stages=1)


class KVCopier:
    """Copies K and V of a layer from host memory to their slots, as HiCache does.

    Args:
        slots: int64 ``[n]``.

    Attributes:
        name: What does it.
    """

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots
        self._sources = torch.arange(len(slots), device=slots.device)
        self._sglang = None
        self.name = "a kernel as SGLang's"
        if slots.is_cpu:
            self.name = "torch"
            return
        try:
            from sglang.kernels.ops.kvcache.hicache import transfer_hicache_one_layer
        except Exception as error:  # whatever an installation of SGLang lacks
            self.name += f" (that one: {type(error).__name__})"
        else:
            self._sglang, self.name = transfer_hicache_one_layer, "SGLang's kernel"

    def copy(self, k: torch.Tensor, v: torch.Tensor, pool: KVPool) -> None:
        """Copy rows ``[n, width]`` of K and V in pinned memory to ``pool``."""
        if self._slots.is_cpu:
            pool.k[self._slots] = k.view(-1, *pool.k.shape[1:])
            pool.v[self._slots] = v.view(-1, *pool.v.shape[1:])
        elif self._sglang is not None:
            width = k.shape[1]
            self._sglang(pool.k, pool.v, self._slots, k, v, self._sources, element_dim=width)
        else:
            for rows, part in ((k, pool.k), (v, pool.v)):
                slots_launch(rows, self._slots, part).run()


@triton.jit
def _gather_kernel(
    pages,  # uint8 [pages, page_bytes]
    page_ids,  # [p]
    out,  # uint8 [p, 8 * WORDS]
    page_bytes,
    offset,
    parts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of_page: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        item = part // of_page
        page = tl.load(page_ids + item).to(tl.int64)
        source = (pages + page * page_bytes + offset).to(tl.pointer_type(tl.int64))
        target = out.to(tl.pointer_type(tl.int64)) + item * WORDS
        at = (part % of_page) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit
def _slots_kernel(
    rows,  # uint8 [n, 8 * WORDS]
    slots,  # [n]
    pool,  # uint8 [slots, 8 * WORDS]
    parts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of_row: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        row = part // of_row
        slot = tl.load(slots + row).to(tl.int64)
        source = rows.to(tl.pointer_type(tl.int64)) + row * WORDS
        target = (pool + slot * (8 * WORDS)).to(tl.pointer_type(tl.int64))
        at = (part % of_row) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < WORDS), mask=at < WORDS)
