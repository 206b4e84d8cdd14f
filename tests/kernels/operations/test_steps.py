"""The kernels of a step and of both stages against their torch references, to the byte."""

import pytest
import torch

from hcache_kernels.staging import (
    NOWHERE,
    WRONG_STEP,
    StagedRows,
    StepTargets,
    begin_launch,
    begin_rows,
    judge_launch,
    judge_rows,
    save_launch,
    save_rows,
    stage_launch,
    stage_rows,
)
from tests.kernels.operations.conftest import by, finish, host

PLACES = 300


BOTH = pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("n", "placed"),
    [(1, range(7, 8)), (5, range(2, 7)), (290, range(10, 300)), (290, range(0)), (700, range(0))],
)
@BOTH
def test_begin_rows(device: str, n: int, placed: range, dtype: torch.dtype, kernel: bool) -> None:
    """Rows behind those of the step, and all rows of a step without targets, get none."""
    torch.manual_seed(n)
    device = device if kernel else "cpu"
    slots, positions = torch.randperm(2 * n).to(dtype), torch.arange(9, 9 + n).to(dtype)
    tokens = (slots[::2], positions, torch.randint(0, 1000, (n,), dtype=dtype))
    there = tuple(values.to(device) for values in tokens)
    where = torch.full((3, n), -7, device=device)
    copied = torch.full((3 * n + 1,), -7, pin_memory=device == "cuda")
    now = StepTargets(torch.full((PLACES,), 5, device=device), torch.zeros_like(where[0, :1]))
    if kernel:
        begin_launch(there, where, copied[: 3 * n], now, 41, placed).run()
        finish()
    else:
        begin_rows(there, where, copied[: 3 * n], now, 41, placed)
    want = torch.stack(tokens).long()
    assert torch.equal(where.cpu(), want)
    assert copied.tolist() == [*want.flatten().tolist(), -7]
    assert now.targets.tolist() == [*placed, *[NOWHERE] * (PLACES - len(placed))]
    assert now.number.tolist() == [41]


@pytest.mark.parametrize(("layers", "n"), [(1, 1), (3, 128), (5, 300)])
@BOTH
def test_judge_rows(device: str, layers: int, n: int, kernel: bool) -> None:
    """Rows of a part of staging; some of another step, some that no codec could hold."""
    torch.manual_seed(n)
    marks = torch.full((layers, n + 3), 17)[:, 2 : n + 2]
    marks[torch.rand(layers, n) < 0.1] = 16
    marks[torch.rand(layers, n) < 0.1] = WRONG_STEP
    unfit, written = (marks == WRONG_STEP).any(0), (marks == 17).all(0)
    want = [2 if unfit[i] else int(written[i]) for i in range(n)]
    got = host(n + 1, value=0xEE)
    if kernel:
        judge_launch(marks.to(device), 17, got[:n]).run()
        finish()
    else:
        judge_rows(marks, 17, got[:n])
    assert got.tolist() == [*want, 0xEE]


STAGED = 9


def buffer(layers: int, row_bytes: int, device: str) -> StagedRows:
    return StagedRows(
        torch.full((layers, STAGED, row_bytes), 0xEE, dtype=torch.uint8, device=device),
        torch.zeros((layers, STAGED), dtype=torch.int64, device=device),
    )


def staged(
    rows: torch.Tensor, targets: torch.Tensor, device: str, layers: int = 1, layer: int = 0
) -> StagedRows:
    """What the reference stages in step 41, and the kernel too."""
    row_bytes, step = rows.shape[1] * rows.itemsize, torch.tensor([41], device=device)
    got, want = buffer(layers, row_bytes, device), buffer(layers, row_bytes, "cpu")
    stage_launch(rows, targets, step, got, layer).run()
    stage_rows(rows.cpu(), targets.cpu(), step.cpu(), want, layer)
    assert torch.equal(got.rows.cpu(), want.rows)
    assert torch.equal(got.marks.cpu(), want.marks)
    return want


@pytest.mark.parametrize("row_bytes", [1, 6, 12, 160, 3000, 8192])
def test_stage_rows(device: str, row_bytes: int) -> None:
    torch.manual_seed(row_bytes)
    rows = torch.randint(0, 256, (5, row_bytes), dtype=torch.uint8, device=device)
    targets = torch.randperm(STAGED, device=device)[:5]
    want = staged(rows, targets, device, layers=2, layer=1)
    assert torch.equal(want.rows[1, targets.cpu()], rows.cpu())
    assert (want.marks == 41).sum() == 5
    assert (want.rows[0] == 0xEE).all()


def test_rows_without_a_place_leave_the_buffer_alone(device: str) -> None:
    """Also one that is gone, as where hidden mode was refused behind the recording of graphs."""
    rows = torch.randint(0, 256, (4, 160), dtype=torch.uint8, device=device)
    want = staged(rows, torch.tensor([NOWHERE, 2, NOWHERE, NOWHERE], device=device), device)
    assert torch.equal(want.rows[0, 2], rows[1].cpu())
    assert want.marks.nonzero().tolist() == [[0, 2]]
    none, step = torch.full((4,), NOWHERE, device=device), torch.tensor([41], device=device)
    kept, untouched = buffer(1, 160, device), buffer(1, 160, "cpu")
    gone = StagedRows(kept.rows[:, :0], kept.marks[:, :0])
    stage_launch(rows, none, step, gone, 0).run()
    stage_rows(rows, none, step, gone, 0)
    assert torch.equal(kept.rows.cpu(), untouched.rows)
    assert torch.equal(kept.marks.cpu(), untouched.marks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [16, 48])
def test_stage_rows_that_are_part_of_something_wider(
    device: str, columns: int, dtype: torch.dtype
) -> None:
    rows = torch.randn(5, 64, device=device).to(dtype)[:, 3 : 3 + columns]
    want = staged(rows, torch.arange(5, device=device), device)
    assert torch.equal(want.rows[0, :5].view(dtype), rows.cpu())


@pytest.mark.parametrize(
    ("page_size", "row_bytes", "n", "kept"),
    [
        *((size, width, 7, None) for size in (1, 4, 16) for width in (1, 6, 160, 3000)),
        *((8, 24, 20, kept) for kept in (range(0, 4), range(4, 8), range(6, 8), range(3, 4))),
    ],
)
def test_save_rows(device: str, page_size: int, row_bytes: int, n: int, kept: range | None) -> None:
    """Rows of tokens outside ``kept`` go nowhere; the segments are as short as that share."""
    torch.manual_seed(page_size)
    layers, pages, device_pages = 3, 12, 8
    share = kept or range(page_size)
    segment = len(share) * row_bytes
    segments = torch.tensor([16, 16 + segment, 16 + 3 * segment])
    page_bytes = 16 + 5 * segment
    page_bytes += -page_bytes % (16 if row_bytes % 16 == 0 else 8)
    arena = torch.full((pages, page_bytes), 0xEE, dtype=torch.uint8)
    staged = torch.randint(0, 256, (layers, n + 2, row_bytes), dtype=torch.uint8)[:, 1 : n + 1]
    slots = torch.randperm(device_pages * page_size)[:n]
    shadows = torch.randperm(pages)[:device_pages]
    expected = arena.clone()
    for layer in range(layers):
        for i, slot in enumerate(slots.tolist()):
            if slot % page_size in share:
                start = int(segments[layer]) + (slot % page_size - share.start) * row_bytes
                expected[shadows[slot // page_size], start : start + row_bytes] = staged[layer, i]
    want = arena.clone()
    save_rows(staged, slots, shadows, want, segments, page_size, share)
    assert torch.equal(want, expected)
    got = host(*arena.shape, value=0xEE)
    targets = (slots.to(device), shadows.to(device))
    staged, segments = staged.to(device), segments.to(device)
    programs = page_size  # one for all rows, or more than there are
    by(programs, save_launch(staged, *targets, got, segments, page_size, share)).run()
    finish()
    assert torch.equal(got, want)
