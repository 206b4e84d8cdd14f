"""The kernel of digests against its torch reference, and both against Python's own integers."""

import pytest
import torch

from hcache_kernels import digest
from hcache_kernels.digest import PROGRAMS, digest_launch, digest_rows
from tests.kernels.operations.conftest import finish

SHAPES = [(1, 1), (700, 1), (129, 5), (3, 512), (2, 1031), (5, 4096)]
MASK = (1 << 64) - 1


def by_python(words: list[list[int]], start: int) -> list[int]:
    """What the docstring of ``digest_rows`` says, in numbers without a size."""

    def moved(value: int, by: int) -> int:
        signed = value - (1 << 64) if value >> 63 else value
        return (value ^ signed >> by) & MASK

    a, b = digest._MIX_A, digest._MIX_B
    exact = total = 0
    for number, row in enumerate(words, start):
        found = 0
        for place, word in enumerate(row):
            mixed = moved(word & MASK, 29) * a + word * (place * b | 1)
            found += moved(mixed & MASK, 32)
        found = moved(moved(found & MASK, 31) * b & MASK, 29)
        exact, total = exact + found * (number * b | 1), total + found
    return [exact & MASK, total & MASK]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8], ids=str)
@pytest.mark.parametrize(("n", "width"), SHAPES)
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_digest_rows(device: str, n: int, width: int, dtype: torch.dtype, kernel: bool) -> None:
    """Of rows 7 on, added to sums that are there; few programs, so that each takes many rows."""
    torch.manual_seed(n * width)
    info = torch.iinfo(dtype)
    words = torch.randint(info.min, info.max, (n, width), dtype=dtype)
    words[n // 2] = 0
    sums = torch.zeros((PROGRAMS, 2), dtype=torch.int64, device=device if kernel else "cpu")
    sums[:2] = torch.tensor([[3, 4], [MASK >> 1, 5]])
    if kernel:
        launch = digest_launch(words.to(device), 7, sums)
        for grid in (launch.grid, (min(launch.grid[0], 2),)):
            type(launch)(launch.kernel, grid, launch.arguments, launch.warps, launch.stages).run()
            finish()
    else:
        digest_rows(words, 7, sums)
        digest_rows(words, 7, sums)
    there = [3 + (MASK >> 1), 9]
    words = words if kernel else digest._words(words)  # the reference takes the widest words
    want = [(2 * a + b) & MASK for a, b in zip(by_python(words.tolist(), 7), there, strict=True)]
    assert [value & MASK for value in sums.sum(0).tolist()] == want
