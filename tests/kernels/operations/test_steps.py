"""The kernels that a step begins and ends with against their torch references, to the byte."""

from __future__ import annotations

import pytest
import torch

from hcache_kernels.staging import NOWHERE, WRONG_STEP
from hcache_kernels.steps import StepPlaces, begin_launch, begin_rows, judge_launch, judge_rows
from tests.kernels.operations.conftest import finish, host

PLACES = 300


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("n", "placed"),
    [(1, range(7, 8)), (5, range(2, 7)), (290, range(10, 300)), (290, range(0)), (700, range(0))],
)
def test_begin_rows(device: str, n: int, placed: range, dtype: torch.dtype) -> None:
    """Rows behind those of the step, and all rows of a step without places, get none."""
    torch.manual_seed(n)
    slots, positions = torch.randperm(2 * n).to(dtype), torch.arange(9, 9 + n).to(dtype)
    tokens = (slots[::2], positions, torch.randint(0, 1000, (n,), dtype=dtype))
    results = []
    for launch in (begin_rows, lambda *a: begin_launch(*a).run()):
        on = "cpu" if launch is begin_rows else device
        where = torch.full((3, n), -7, device=on)
        copied = torch.full((3 * n + 1,), -7)
        copied = copied.pin_memory() if on == "cuda" else copied
        now = StepPlaces(torch.full((PLACES,), 5, device=on), torch.zeros(1, device=on).long())
        there = tuple(values.to(on) for values in tokens)
        launch(there, where, copied[: 3 * n], now, 41, placed)
        finish()
        results.append([where.cpu(), copied, now.places.cpu(), now.number.cpu()])
    want = torch.stack(tokens).long()
    none = [NOWHERE] * (PLACES - len(placed))
    for where, copied, places, number in results:
        assert torch.equal(where, want)
        assert copied.tolist() == [*want.flatten().tolist(), -7]
        assert places.tolist() == [*placed, *none]
        assert number.tolist() == [41]


@pytest.mark.parametrize(("layers", "n"), [(1, 1), (3, 128), (5, 300)])
def test_judge_rows(device: str, layers: int, n: int) -> None:
    """Rows of a part of staging; some of another step, some that no codec could hold."""
    torch.manual_seed(n)
    marks = torch.full((layers, n + 3), 17)[:, 2 : n + 2]
    marks[torch.rand(layers, n) < 0.1] = 16
    marks[torch.rand(layers, n) < 0.1] = WRONG_STEP
    unfit, written = (marks == WRONG_STEP).any(0), (marks == 17).all(0)
    want = [2 if unfit[i] else int(written[i]) for i in range(n)]
    got = torch.full((n + 1,), 0xEE, dtype=torch.uint8)
    judge_rows(marks, 17, got[:n])
    assert got.tolist() == [*want, 0xEE]
    got = host(n + 1, value=0xEE)
    judge_launch(marks.to(device), 17, got[:n]).run()
    finish()
    assert got.tolist() == [*want, 0xEE]
