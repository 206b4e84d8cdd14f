"""The copy of K and V from host memory to their slots that the product is measured against."""

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


def slots_launch(rows: torch.Tensor, slots: torch.Tensor, part: torch.Tensor) -> Launch:
    """``part[slots[i]] = rows[i]``, by few programs.

    Args:
        rows: In pinned host memory, ``[n, width]``; a row has a multiple of 8 bytes.
        slots: int64 ``[n]``.
        part: K or V of a pool, ``[slots, heads, head_dim]`` with ``width`` values a slot.
    """
    rows, pool = rows.view(torch.uint8), part.view(torch.uint8).view(len(part), -1)
    words = pool.shape[1] // WORD
    block = triton.next_power_of_2(min(words, BLOCK))
    parts = len(slots) * triton.cdiv(words, block)
    arguments = {"rows": rows, "pool": pool, "slots": slots, "parts": parts}
    arguments |= {"WORDS": words, "BLOCK": block}
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
def _slots_kernel(
    rows,  # uint8 [n, 8 * WORDS]
    pool,  # uint8 [slots, 8 * WORDS]
    slots,  # [n]
    parts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    words: tl.constexpr = tl.pointer_type(tl.int64)
    per_row: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    part = tl.program_id(0).to(tl.int64)
    while part < parts:
        row = part // per_row
        slot = tl.load(slots + row).to(tl.int64)
        at = (part % per_row) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load((rows + row * (8 * WORDS)).to(words) + at, mask=at < WORDS)
        tl.store((pool + slot * (8 * WORDS)).to(words) + at, values, mask=at < WORDS)
        part += tl.num_programs(0)
