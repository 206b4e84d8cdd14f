"""What a step that is captured begins and ends with, each in torch and as one kernel.

At its begin the rows of the step get targets in staging, and the host is told which tokens go to
which slots. At its end the host is told which rows were written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launch import Launch, block_launch
from .staging import NOWHERE, WRONG_STEP

TokenRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Slots, positions and token ids."""

_BEGUN, _JUDGED = 256, 128
"""Tokens of a program that begins a step, and of one that judges it."""


@dataclass(frozen=True)
class StepTargets:
    """Which rows of staging the rows of the present step go to, for stage one."""

    targets: torch.Tensor  # of each row, int64 [most]; NOWHERE for rows beyond those of the step
    number: torch.Tensor  # of the step, int64 [1]


def begin_rows(
    tokens: TokenRows,
    where: torch.Tensor,
    copied: torch.Tensor,
    now: StepTargets,
    number: int,
    placed: range,
) -> None:
    """Begin a step: where its tokens are, for the device and the host, and where their rows go.

    Args:
        tokens: On the device, ``[n]`` each.
        where: The same in one, int64 ``[3, n]``, contiguous, on the device.
        copied: The same for the host, int64 ``[3 * n]``, memory that the device can write (pinned).
        number: Number of the step.
        placed: Rows of staging for the step: consecutive, as many as tokens; or none.
    """
    if where.is_cuda:
        begin_launch(tokens, where, copied, now, number, placed).run()
        return
    torch.stack([values.to(torch.int64) for values in tokens], out=where)
    copied.copy_(where.view(-1))
    device = now.targets.device
    now.targets.fill_(NOWHERE)
    now.targets[: len(placed)] = torch.arange(placed.start, placed.stop, device=device)
    now.number.fill_(number)


def judge_rows(marks: torch.Tensor, step: int, verdicts: torch.Tensor) -> None:
    """Say of each row of a step whether it was written in all layers.

    Args:
        marks: Which step wrote each row, int64 ``[layers, n]``; rows of a layer contiguous.
        verdicts: uint8 ``[n]``, contiguous, memory that the device can write (pinned): 1 where all
            layers have that number, 2 where one has :data:`WRONG_STEP`, else 0.
    """
    if marks.is_cuda:
        judge_launch(marks, step, verdicts).run()
        return
    written = (marks == step).all(0).to(torch.uint8)
    verdicts.copy_(written.masked_fill_((marks == WRONG_STEP).any(0), 2))


def begin_launch(
    tokens: TokenRows,
    where: torch.Tensor,
    copied: torch.Tensor,
    now: StepTargets,
    number: int,
    placed: range,
) -> Launch:
    """The launch of :func:`begin_rows`."""
    slots, positions, token_ids = (values.contiguous() for values in tokens)
    most = now.targets.numel()
    return block_launch(
        begin_kernel,
        grid=(triton.cdiv(max(slots.numel(), most), _BEGUN),),
        block=_BEGUN,
        warp_values=128,
        slots=slots,
        positions=positions,
        token_ids=token_ids,
        where=where,
        copied=copied,
        targets=now.targets,
        step=now.number,
        n=slots.numel(),
        number=number,
        first=placed.start,
        placed=len(placed),
        most=most,
        NONE=NOWHERE,
    )


def judge_launch(marks: torch.Tensor, step: int, verdicts: torch.Tensor) -> Launch:
    """The launch of :func:`judge_rows`."""
    layers, n = marks.shape
    return block_launch(
        judge_kernel,
        grid=(triton.cdiv(n, _JUDGED),),
        block=_JUDGED,
        warp_values=128,
        marks=marks,
        verdicts=verdicts,
        step=step,
        n=n,
        layers=layers,
        layer_stride=marks.stride(0),
        WRONG=WRONG_STEP,
    )


@triton.jit(  # else it is compiled again in service
    do_not_specialize=["n", "number", "first", "placed", "most"],
    do_not_specialize_on_alignment=["slots", "positions", "token_ids", "where", "copied"],
)
def begin_kernel(
    slots,  # int [n]
    positions,  # int [n]
    token_ids,  # int [n]
    where,  # int64 [3, n]
    copied,  # int64 [3, n]
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
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < n).to(tl.int64)
    position = tl.load(positions + at, mask=at < n).to(tl.int64)
    token_id = tl.load(token_ids + at, mask=at < n).to(tl.int64)
    tl.store(where + at, slot, mask=at < n)
    tl.store(where + n + at, position, mask=at < n)
    tl.store(where + 2 * n + at, token_id, mask=at < n)
    tl.store(copied + at, slot, mask=at < n)
    tl.store(copied + n + at, position, mask=at < n)
    tl.store(copied + 2 * n + at, token_id, mask=at < n)
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
