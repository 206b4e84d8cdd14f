"""A captured step, from its begin to its verdicts; each part in torch and as one kernel.

At the begin the rows of the step get targets in staging, and the host gets the tokens and their
slots. Then hidden states are saved in two stages (paper section 4.2.2). At the end the host gets
which rows were written.

Stage one takes the rows of one layer out of the forward pass into a staging buffer on the device.
It may be recorded in a CUDA graph, so where rows go, and the step's number, are read from device
memory. Beside each row it leaves the step's number: proof that this step wrote the row.

Stage two moves the staged rows of many layers to their pages in host memory, in one launch. Kernels
move the largest words that everything is aligned to: over the bus, many small stores cost more.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launch, alignment, block_launch, copy_programs

TokenRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # slots, positions and token ids

_BEGUN, _JUDGED = 256, 128  # tokens of a program that begins a step, and of one that judges it


@dataclass(frozen=True)
class StepTargets:
    """Which rows of staging the rows of the present step go to, for stage one."""

    targets: torch.Tensor  # of each row, int64 [most]; NOWHERE for rows beyond those of the step
    number: torch.Tensor  # of the step, int64 [1]


def begin_rows(
    tokens: TokenRows,
    table: torch.Tensor,
    host_table: torch.Tensor,
    now: StepTargets,
    number: int,
    placed: range,
) -> None:
    """Begin a step: where its tokens are, for the device and the host, and where their rows go.

    Args:
        tokens: On the device, ``[n]`` each.
        table: The same in one, int64 ``[3, n]``, contiguous, on the device.
        host_table: The same for the host, int64 ``[3 * n]``, in memory that the device can write.
        number: Number of the step.
        placed: Rows of staging for the step: consecutive, as many as tokens; or none.
    """
    if table.is_cuda:
        begin_launch(tokens, table, host_table, now, number, placed).run()
        return
    torch.stack([values.to(torch.int64) for values in tokens], out=table)
    host_table.copy_(table.view(-1))
    now.targets.fill_(NOWHERE)
    now.targets[: len(placed)] = torch.arange(placed.start, placed.stop, device=now.targets.device)
    now.number.fill_(number)


def judge_rows(marks: torch.Tensor, step: int, verdicts: torch.Tensor) -> None:
    """Write for each row of a step whether it was written in all layers. ``marks``: the step that
    wrote each row, int64 ``[layers, n]``; rows of a layer contiguous. ``verdicts``: uint8 ``[n]``,
    contiguous, in memory that the device can write (pinned): 1 if all layers have that number, 2 if
    one has :data:`WRONG_STEP`, otherwise 0."""
    if marks.is_cuda:
        judge_launch(marks, step, verdicts).run()
        return
    written = (marks == step).all(0).to(torch.uint8)
    verdicts.copy_(written.masked_fill_((marks == WRONG_STEP).any(0), 2))


def begin_launch(
    tokens: TokenRows,
    table: torch.Tensor,
    host_table: torch.Tensor,
    now: StepTargets,
    number: int,
    placed: range,
) -> Launch:
    """The launch of :func:`begin_rows`."""
    slots, positions, token_ids = (values.contiguous() for values in tokens)
    most = now.targets.numel()
    args = {"slots": slots, "positions": positions, "token_ids": token_ids, "n": slots.numel()}
    args |= {"table": table, "host_table": host_table, "targets": now.targets, "step": now.number}
    args |= {"number": number, "first": placed.start, "placed": len(placed), "most": most}
    grid = (triton.cdiv(max(slots.numel(), most), _BEGUN),)
    return block_launch(begin_kernel, grid, _BEGUN, _WARP, **args, NONE=NOWHERE)


def judge_launch(marks: torch.Tensor, step: int, verdicts: torch.Tensor) -> Launch:
    """The launch of :func:`judge_rows`."""
    layers, n = marks.shape
    args = {"marks": marks, "layer_stride": marks.stride(0), "layers": layers, "n": n}
    args |= {"step": step, "verdicts": verdicts, "WRONG": WRONG_STEP}
    return block_launch(judge_kernel, (triton.cdiv(n, _JUDGED),), _JUDGED, _WARP, **args)


@triton.jit(  # else it is compiled again in service
    do_not_specialize=["n", "number", "first", "placed", "most"],
    do_not_specialize_on_alignment=["slots", "positions", "token_ids", "table", "host_table"],
)
def begin_kernel(
    slots,  # int [n]
    positions,  # int [n]
    token_ids,  # int [n]
    table,  # int64 [3, n]
    host_table,  # int64 [3, n]
    targets,  # int64 [most]
    step,  # int64 [1]
    n,
    number,
    first,
    placed,
    most,
    NONE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a block of tokens' numbers to both tables, and set targets; the first sets ``step``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < n).to(tl.int64)
    position = tl.load(positions + at, mask=at < n).to(tl.int64)
    token_id = tl.load(token_ids + at, mask=at < n).to(tl.int64)
    tl.store(table + at, slot, mask=at < n)
    tl.store(table + n + at, position, mask=at < n)
    tl.store(table + 2 * n + at, token_id, mask=at < n)
    tl.store(host_table + at, slot, mask=at < n)
    tl.store(host_table + n + at, position, mask=at < n)
    tl.store(host_table + 2 * n + at, token_id, mask=at < n)
    target = tl.where(at < placed, first + at, NONE).to(tl.int64)
    tl.store(targets + at, target, mask=at < most)
    if tl.program_id(0) == 0:
        tl.store(step, number)


@triton.jit(  # else it is compiled again in service
    do_not_specialize=["step", "n", "layers", "layer_stride"],
    do_not_specialize_on_alignment=["marks"],
)
def judge_kernel(
    marks,  # int64 [layers, n], layers layer_stride apart
    verdicts,  # uint8 [n]
    step,
    n,
    layers,
    layer_stride,
    WRONG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Verdicts of a block of rows over all layers: 2, if one has WRONG; 1, if all have ``step``."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    written = tl.full((BLOCK,), 1, tl.int32)
    unfit = tl.full((BLOCK,), 0, tl.int32)
    row = marks + at
    for _ in range(layers):
        mark = tl.load(row, mask=at < n, other=0)
        row += layer_stride
        written &= (mark == step).to(tl.int32)
        unfit |= (mark == WRONG).to(tl.int32)
    verdict = tl.where(unfit != 0, 2, written)
    tl.store(verdicts + at, verdict.to(tl.uint8), mask=at < n)


WRONG_STEP = -1  # mark of a row that its codec could not hold; no step has this number
NOWHERE = -1  # place of a row that is not written; it gets no mark

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDEST_WORD = max(_WORDS)
_MOST_WORDS = 1024  # that a program moves at a time
_WARP = 128  # values of a warp


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
    kept: range,
) -> None:
    """Stage two: copy staged rows to the shadow pages of their slots.

    Args:
        staged: Rows, encoded or not, uint8 ``[layers, n, row_bytes]``; those of a layer contiguous.
        slots: Slots of the KV pool, int64 ``[n]``, on the device.
        shadows: Physical page of every device page, int64 ``[device_pages]``, on the device.
        arena: uint8 ``[pages, page_bytes]``, memory that the device can write (pinned).
        segments: Offset in a page of each layer's segment, int64 ``[layers]``, on the device: a
            multiple of 16 bytes, or of what ``row_bytes`` is a multiple of.
        kept: The tokens of a page whose rows its segments hold, consecutive.
    """
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
    args = {"rows": rows.view(_WORDS[word]), "row_stride": stride // word, "WORDS": words}
    args |= {"staged": staged.rows[layer].view(_WORDS[word]), "marks": staged.marks[layer]}
    args |= {"targets": targets, "step": step, "NONE": NOWHERE}
    return block_launch(stage_kernel, (n, triton.cdiv(words, block)), block, _WARP, **args)


def save_launch(
    staged: torch.Tensor,
    slots: torch.Tensor,
    shadows: torch.Tensor,
    arena: torch.Tensor,
    segments: torch.Tensor,
    page_size: int,
    kept: range,
) -> Launch:
    """The launch of :func:`save_rows`."""
    layers, n, row_bytes = staged.shape
    aligned = alignment(row_bytes, staged.stride(0), arena.shape[1])
    word = min(_WIDEST_WORD, aligned)
    words = row_bytes // word
    block = min(_MOST_WORDS, triton.next_power_of_2(words))
    args = {"staged": staged.view(_WORDS[word]), "layer_stride": staged.stride(0) // word}
    args |= {"arena": arena.view(_WORDS[word]), "page_words": arena.shape[1] // word}
    args |= {"slots": slots, "shadows": shadows, "segments": segments, "n": n, "layers": layers}
    args |= {"PAGE_SIZE": page_size, "FIRST": kept.start, "KEPT": len(kept)}
    args |= {"WORDS": words, "WORD_BYTES": word, "ALIGNED": aligned}
    grid = (min(copy_programs(slots.device), n * layers),)
    return block_launch(save_kernel, grid, block, _WARP, **args)


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
    """Copy a block of words of one row to its target, and mark that with the step's number."""
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
    """Copy rows of all layers to the pages of their slots; only tokens FIRST to FIRST + KEPT."""
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
