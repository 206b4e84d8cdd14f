"""The kernels of capture compile for every device; nothing spills."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hcache_kernels.launch import Launch
from hcache_kernels.staging import StagedRows, save_launch, stage_launch
from tests.kernels.compilation import (
    SHARED_MEMORY,
    Job,
    Usage,
    cases,
    device_name,
    empty,
    require_fits,
)

N, LAYERS, PLACES, PAGE = 64, 4, 512, 64
ROW_BYTES = (8192, 6304, 392)
"""bfloat16 of a usual width, exp4 of it, and rows that are multiples of 8 bytes only."""


def ids(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def stage(row_bytes: int, with_ok: bool) -> Launch:
    staged = StagedRows(empty(LAYERS, PLACES + 1, row_bytes), ids(LAYERS, PLACES + 1))
    ok = empty(N, dtype=torch.bool) if with_ok else None
    return stage_launch(empty(N, row_bytes), ok, ids(N), ids(1), staged, 0)


def save(row_bytes: int) -> Launch:
    staged = empty(LAYERS, PLACES + 1, row_bytes)[:, :N]
    arena, kept = empty(256, 4096 + LAYERS * PAGE * row_bytes), range(PAGE // 2, PAGE)
    return save_launch(staged, ids(N), ids(128), arena, ids(LAYERS), PAGE, kept)


def jobs() -> Iterator[tuple[str, Job]]:
    for capability in SHARED_MEMORY:
        what = device_name(capability)
        for row_bytes in ROW_BYTES:
            for with_ok in (False, True):
                name = f"{what} stage {row_bytes}{' with ok' if with_ok else ''}"
                yield name, Job(capability, partial(stage, row_bytes, with_ok))
            yield f"{what} save {row_bytes}", Job(capability, partial(save, row_bytes))


JOBS = dict(jobs())


@pytest.mark.parametrize("job", cases(JOBS))
def test_nothing_spills_and_shared_memory_suffices(job: str, usage: Usage) -> None:
    require_fits(JOBS[job], usage)
