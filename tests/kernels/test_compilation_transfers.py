"""Every configuration of the codec and page kernels compiles for every device; nothing spills."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from hcache_kernels import pages
from hcache_kernels.codecs import exp4, make_codec, scaled
from hcache_kernels.launch import Launch
from tests.kernels.compilation import (
    SHARED_MEMORY,
    Job,
    Usage,
    cases,
    device_name,
    empty,
    require_fits,
)

N = 1024
WIDTHS = (256, 4096, 7168)
"""One warp, the usual width, and one whose last block is masked."""


def exp4_launch(decode: bool, width: int) -> Launch:
    rows = empty(N, width, dtype=torch.bfloat16)
    encoded = empty(N, make_codec("exp4", width, torch.bfloat16).row_bytes)
    if decode:
        return exp4.decode_launch(encoded, rows)
    return exp4.encode_launch(rows, encoded, empty(N))


def scaled_launch(name: str, decode: bool, width: int, dtype: torch.dtype) -> Launch:
    codec = make_codec(name, width, dtype)
    rows, encoded = empty(N, width, dtype=dtype), empty(N, codec.row_bytes)
    if decode:
        return scaled.decode_launch(encoded, rows, codec.largest)
    return scaled.encode_launch(rows, encoded, empty(N), codec.largest)


def gather_launch(length: int) -> Launch:
    memory, ids = empty(N, 4096 + 4 * length), empty(N, dtype=torch.int64)
    return pages.gather_launch(memory, ids, 4096, empty(N, length))


def scatter_launch(row_bytes: int) -> Launch:
    ids = empty(N, dtype=torch.int64)
    memory = empty(N, 4096 + 64 * row_bytes)
    return pages.scatter_launch(empty(N, row_bytes), memory, ids, ids, 4096)


def jobs() -> Iterator[tuple[str, Job]]:
    for capability in SHARED_MEMORY:
        for decode in (False, True):
            what = f"{device_name(capability)} {'decode' if decode else 'encode'}"
            for width in WIDTHS:
                yield f"{what} exp4, {width}", Job(capability, partial(exp4_launch, decode, width))
            for name, dtype in (("int8", torch.bfloat16), ("fp8", torch.float32)):
                yield (
                    f"{what} {name} {str(dtype).removeprefix('torch.')}, {WIDTHS[-1]}",
                    Job(capability, partial(scaled_launch, name, decode, WIDTHS[-1], dtype)),
                )
        what = device_name(capability)
        for length in (64 * 8192, 64 * 392 + 8):
            yield f"{what} gather {length}", Job(capability, partial(gather_launch, length))
        for row_bytes in (8192, 392):
            yield f"{what} scatter {row_bytes}", Job(capability, partial(scatter_launch, row_bytes))


JOBS = dict(jobs())


@pytest.mark.parametrize("job", cases(JOBS))
def test_nothing_spills_and_shared_memory_suffices(job: str, usage: Usage) -> None:
    require_fits(JOBS[job], usage)
