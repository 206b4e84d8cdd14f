"""The two stages of saving hidden states (paper section 4.2.2), each in torch and as one kernel.

Stage one takes the rows of one layer out of the forward pass into a staging buffer on the device.
It may be recorded in a CUDA graph, so everything that changes from step to step (where rows go, and
the step's number) is read from device memory. Beside each row it leaves the step's number: proof
that this layer's row was written by this step, and not by an earlier one.

Stage two moves the staged rows of many layers to their pages in host memory, in one launch. Kernels
move the largest words that everything is aligned to: over the bus, many small stores cost more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launch, alignment, block_launch, copy_programs

WRONG_STEP = -1
"""Mark of a row that its codec could not hold; no step has this number."""
NOWHERE = -1
"""Place of a row that is not written; it gets no mark."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDEST_WORD = max(_WORDS)
_MOST_WORDS = 1024  # that a program moves at a time


@dataclass(frozen=True)
class StagedRows:
    """A staging buffer; both tensors are contiguous."""

    rows: torch.Tensor  # as the model has them, uint8 [layers, capacity, row_bytes]
    marks: torch.Tensor  # number of the step that wrote each row, int64 [layers, capacity]


def stage_rows(
    rows: torch.Tensor, targets: torch.Tensor, step: torch.Tensor, staged: StagedRows, layer: int
) -> None:
    """Stage one: copy the rows of one layer to their targets in the staging buffer.

    Args:
        rows: Rows as the model has them, ``[n, values]`` of any dtype, a row's values side by side.
        targets: int64 ``[n]``: where each row goes, or :data:`NOWHERE`. Without one, the buffer
            is not touched: it may be gone when a recorded launch is replayed.
        step: Number of the step, int64 ``[1]``.
    """
    if rows.is_cuda:
        stage_launch(rows, targets, step, staged, layer).run()
        return
    wanted = targets != NOWHERE
    targets, rows = targets[wanted], rows.view(torch.uint8)[wanted]
    staged.rows[layer].index_copy_(0, targets, rows)
    staged.marks[layer].index_copy_(0, targets, step.expand(len(rows)))


def save_rows(
    staged: torch.Tensor,
    slots: torch.Tensor,
    shadows: torch.Tensor,
    arena: torch.Tensor,
    segments: torch.Tensor,
    page_size: int,
    kept: range | None = None,
) -> None:
    """Stage two: copy staged rows to the shadow pages of their slots.

    Args:
        staged: Rows, encoded or not, uint8 ``[layers, n, row_bytes]``; those of a layer contiguous.
        slots: Slots of the KV pool, int64 ``[n]``, on the device.
        shadows: Physical page of every device page, int64 ``[device_pages]``, on the device.
        arena: uint8 ``[pages, page_bytes]``, memory that the device can write (pinned).
        segments: Offset in a page of each layer's segment, int64 ``[layers]``, on the device: a
            multiple of 16 bytes, or of what ``row_bytes`` is a multiple of.
        kept: The tokens of a page whose rows its segments hold, consecutive; None: all.
    """
    kept = kept or range(page_size)
    if staged.is_cuda:
        save_launch(staged, slots, shadows, arena, segments, page_size, kept).run()
        return
    row_bytes = staged.shape[-1]
    pages, rows = shadows[slots // page_size], slots % page_size - kept.start
    mine = (rows >= 0) & (rows < len(kept))
    pages, rows = pages[mine], rows[mine]
    for layer, start in enumerate(segments.tolist()):
        segment = arena[:, start : start + len(kept) * row_bytes]
        segment.unflatten(1, (len(kept), row_bytes))[pages, rows] = staged[layer, mine]


def stage_launch(
    rows: torch.Tensor, targets: torch.Tensor, step: torch.Tensor, staged: StagedRows, layer: int
) -> Launch:
    """The launch of :func:`stage_rows`."""
    size = rows.element_size()
    (n, row_bytes), stride = (len(rows), rows.shape[1] * size), rows.stride(0) * size
    # The model's own tensors may be rows of something wider.
    word = min(_WIDEST_WORD, alignment(row_bytes, stride, rows.storage_offset() * size))
    words = row_bytes // word
    block = min(_MOST_WORDS, triton.next_power_of_2(words))
    return block_launch(
        stage_kernel,
        grid=(n, triton.cdiv(words, block)),
        block=block,
        warp_values=128,
        rows=rows.view(_WORDS[word]),
        targets=targets,
        step=step,
        staged=staged.rows[layer].view(_WORDS[word]),
        marks=staged.marks[layer],
        row_stride=stride // word,
        WORDS=words,
        NONE=NOWHERE,
    )


def save_launch(
    staged: torch.Tensor,
    slots: torch.Tensor,
    shadows: torch.Tensor,
    arena: torch.Tensor,
    segments: torch.Tensor,
    page_size: int,
    kept: range,
    programs: int | None = None,
) -> Launch:
    """The launch of :func:`save_rows` by at most ``programs`` programs; without a number by those
    of :func:`hcache_kernels.launch.copy_programs`."""
    layers, n, row_bytes = staged.shape
    aligned = alignment(row_bytes, staged.stride(0), arena.shape[1])
    word = min(_WIDEST_WORD, aligned)
    words = row_bytes // word
    return block_launch(
        save_kernel,
        grid=(min(programs or copy_programs(slots.device), n * layers),),
        block=min(_MOST_WORDS, triton.next_power_of_2(words)),
        warp_values=128,
        staged=staged.view(_WORDS[word]),
        slots=slots,
        shadows=shadows,
        arena=arena.view(_WORDS[word]),
        segments=segments,
        layer_stride=staged.stride(0) // word,
        page_words=arena.shape[1] // word,
        n=n,
        layers=layers,
        PAGE_SIZE=page_size,
        FIRST=kept.start,
        KEPT=len(kept),
        WORDS=words,
        WORD_BYTES=word,
        ALIGNED=aligned,
    )


@triton.jit
def stage_kernel(
    rows,  # words [n, WORDS], row_stride apart
    targets,  # int64 [n]
    step,  # int64 [1]
    staged,  # words [capacity, WORDS]
    marks,  # int64 [capacity]
    row_stride,
    WORDS: tl.constexpr,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    target = tl.load(targets + row)
    at = part * BLOCK + tl.arange(0, BLOCK)
    wanted = (at < WORDS) & (target != NONE)
    words = tl.load(rows + row * row_stride + at, mask=wanted)
    tl.store(staged + target * WORDS + at, words, mask=wanted)
    if part == 0:
        tl.store(marks + target, tl.load(step), mask=target != NONE)


@triton.jit(  # else it is compiled again in service
    do_not_specialize=["n", "layers", "layer_stride"],
    do_not_specialize_on_alignment=["staged", "slots"],
)
def save_kernel(
    staged,  # words [layers, n, WORDS], layers layer_stride apart
    slots,  # int64 [n]
    shadows,  # int64 [device_pages]
    arena,  # words [pages, page_words]
    segments,  # int64 [layers], bytes
    layer_stride,
    page_words,
    n,
    layers,
    PAGE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    KEPT: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    while item < n * layers:
        row, layer = item % n, item // n
        slot = tl.load(slots + row)
        page = tl.load(shadows + slot // PAGE_SIZE)
        segment = tl.load(segments + layer) // WORD_BYTES
        in_page = slot % PAGE_SIZE - FIRST
        mine = (in_page >= 0) & (in_page < KEPT)
        source = staged + layer * layer_stride + row * WORDS
        target = arena + page * page_words + segment + in_page * WORDS
        source, target = tl.multiple_of(source, ALIGNED), tl.multiple_of(target, ALIGNED)
        for start in range(0, WORDS, BLOCK):
            at = start + tl.arange(0, BLOCK)
            words = tl.load(source + at, mask=(at < WORDS) & mine)
            tl.store(target + at, words, mask=(at < WORDS) & mine)
        item += tl.num_programs(0)
