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
    return _launch(pages, page_ids, offset, out, None, programs)


def slots_launch(rows: torch.Tensor, slots: torch.Tensor, part: torch.Tensor) -> Launch:
    """``part[slots[i]] = rows[i]``.

    Args:
        rows: In pinned host memory, ``[n, width]``; a row has a multiple of 8 bytes.
        slots: int64 ``[n]``.
        part: K or V of a pool, ``[slots, heads, head_dim]`` with ``width`` values a slot.
    """
    rows, pool = rows.view(torch.uint8), part.view(torch.uint8).view(len(part), -1)
    return _launch(rows, None, 0, pool, slots, KV_PROGRAMS)


def _launch(
    source: torch.Tensor,
    sources: torch.Tensor | None,
    offset: int,
    target: torch.Tensor,
    targets: torch.Tensor | None,
    programs: int,
) -> Launch:
    """``target[targets[i]] = source[sources[i], offset:]``; None: one row after the other."""
    words = target.shape[1] // WORD
    block = triton.next_power_of_2(min(words, BLOCK))
    parts = len(target if targets is None else targets) * triton.cdiv(words, block)
    arguments = {
        "source": source,
        "sources": sources,
        "source_bytes": source.shape[1],
        "offset": offset,
        "target": target,
        "targets": targets,
        "parts": parts,
        "WORDS": words,
        "BLOCK": block,
    }
    return Launch(_copy_kernel, (min(programs, parts),), arguments, WARPS, stages=1)


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
def _copy_kernel(
    source,  # uint8 [rows, source_bytes]
    sources,  # [n] or None
    source_bytes,
    offset,
    target,  # uint8 [rows, 8 * WORDS]
    targets,  # [n] or None
    parts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    words: tl.constexpr = tl.pointer_type(tl.int64)
    per_row: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        row = part // per_row
        read = row if sources is None else tl.load(sources + row)
        written = row if targets is None else tl.load(targets + row)
        from_row = (source + read.to(tl.int64) * source_bytes + offset).to(words)
        to_row = (target + written.to(tl.int64) * (8 * WORDS)).to(words)
        at = (part % per_row) * BLOCK + tl.arange(0, BLOCK)
        tl.store(to_row + at, tl.load(from_row + at, mask=at < WORDS), mask=at < WORDS)
