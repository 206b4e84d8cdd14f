"""Gathering and scattering parts of pages in torch, and what is refused whatever does it."""

from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given
from hypothesis import strategies as st

from hcache_kernels.pages import gather_pages, gather_planes, scatter_pages

PAGES, PAGE_BYTES = 7, 4096 + 64


def some_pages() -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, generator=source)


@given(
    ids=st.lists(st.integers(0, PAGES - 1), max_size=12),
    offset=st.integers(0, PAGE_BYTES // 8).map(lambda words: 8 * words),
    data=st.data(),
)
def test_gathered_bytes_are_those_of_the_pages(
    ids: list[int], offset: int, data: st.DataObject
) -> None:
    length = 8 * data.draw(st.integers(0, (PAGE_BYTES - offset) // 8))
    pages = some_pages()
    for dtype in (torch.int32, torch.int64):
        got = gather_pages(pages, torch.tensor(ids, dtype=dtype), offset, length)
        assert got.shape == (len(ids), length)
        for row, page in zip(got, ids, strict=True):
            assert torch.equal(row, pages[page, offset : offset + length])


@given(
    shape=st.tuples(st.integers(1, 8), st.integers(1, 4)),
    rows_bytes=st.tuples(*[st.integers(1, 8).map(lambda words: 8 * words)] * 2),
    offset=st.integers(0, 8).map(lambda words: 8 * words),
    to=st.dictionaries(st.integers(0, 9), st.integers(0, PAGES - 1)),
)
def test_k_and_v_go_to_their_pages_of_the_pool_token_by_token(
    shape: tuple[int, int], rows_bytes: tuple[int, int], offset: int, to: dict[int, int]
) -> None:
    pages, (tokens, groups) = some_pages(), shape
    pool = [torch.zeros((10, tokens, groups, row), dtype=torch.uint8) for row in rows_bytes]
    want = [plane.clone() for plane in pool]
    ids = torch.tensor([*to.values()], dtype=torch.int32)
    gather_planes(pages, ids, offset, pool, torch.tensor([*to], dtype=torch.int64))
    for place, page in to.items():
        start = offset
        for plane, row_bytes in zip(want, rows_bytes, strict=True):
            for group, token in product(range(groups), range(tokens)):
                plane[place, token, group] = pages[page, start : start + row_bytes]
                start += row_bytes
    assert all(map(torch.equal, pool, want))


@given(
    places=st.lists(st.integers(0, PAGES - 1), unique=True),
    row_bytes=st.integers(1, 500).map(lambda words: 8 * words),
    offset=st.integers(0, 8).map(lambda words: 8 * words),
)
def test_scattered_rows_are_the_only_change(places: list[int], row_bytes: int, offset: int) -> None:
    before = some_pages()
    pages = before.clone()
    rows = torch.randint(0, 256, (len(places), row_bytes), dtype=torch.uint8)
    scatter_pages(rows, pages, torch.tensor(places, dtype=torch.int32), offset)
    want = before.clone()
    for row, page in zip(rows, places, strict=True):
        want[page, offset : offset + row_bytes] = row
    assert torch.equal(pages, want)


IDS = torch.tensor([1, 2])
ROWS = torch.zeros(2, 64, dtype=torch.uint8)
PLANE = torch.zeros(4, 2, 1, 64, dtype=torch.uint8)
LONG_PLANE = torch.zeros(4, 33, 1, 64, dtype=torch.uint8)
NARROW = PLANE[..., :12].contiguous()
META = torch.zeros(2, dtype=torch.int64, device="meta")
OPERATIONS: dict[str, tuple[Any, dict[str, object]]] = {
    "gather": (gather_pages, {"length": 64}),
    "scatter": (scatter_pages, {"rows": ROWS}),
    "planes": (gather_planes, {"pool": [PLANE, PLANE], "pool_ids": IDS}),
}
TWO, ALL = "gather scatter", "gather scatter planes"


@pytest.mark.parametrize(
    ("operations", "changes", "message"),
    [
        (ALL, {"pages": torch.zeros(4, 64)}, "pages: torch.float32 is not uint8"),
        (ALL, {"pages": some_pages()[:, ::2]}, "pages: strides (4160, 2) is not contiguous"),
        (TWO, {"pages": ROWS.new_zeros(9, 100)}, "page_bytes: 100 is not a multiple of 8"),
        (ALL, {"page_ids": IDS * 0 + PAGES}, "page_ids go from 7 to 7: must be from 0 to 6"),
        (ALL, {"page_ids": torch.tensor([-1, 0])}, "page_ids go from -1 to 0: must be from 0 to 6"),
        (ALL, {"page_ids": IDS.float()}, "page_ids: torch.float32 is not int32 or int64"),
        ("scatter planes", {"page_ids": META}, "meta is not on cpu"),
        (ALL, {"offset": 4}, "offset: 4 is not a multiple of 8"),
        (TWO, {"offset": -8}, "bytes: -8 to 56 is not in a page of 4160"),
        (TWO, {"offset": PAGE_BYTES - 56}, "bytes: 4104 to 4168 is not in a page of 4160"),
        ("gather", {"out": ROWS[:, :32].contiguous()}, "out: "),
        ("scatter", {"rows": ROWS.float()}, "rows: torch.float32 is not uint8"),
        ("scatter", {"rows": ROWS[:, :60].contiguous()}, "length: 60 is not a multiple of 8"),
        ("scatter", {"rows": ROWS[:1]}, "page_ids: (2,) is not [1]"),
        ("planes", {"pool": [PLANE, torch.zeros(4, 8)]}, "V of the pool: (4, 8) is not [4, 2, 1,"),
        ("planes", {"pool": [NARROW, PLANE]}, "row_bytes of K: 12 is not a multiple"),
        ("planes", {"pool": [PLANE, PLANE[:3]]}, "V of the pool: (3, 2, 1, 64) is not [4, 2, 1,"),
        ("planes", {"pool": [PLANE, LONG_PLANE[:, :2]]}, "V of the pool: strides"),
        ("planes", {"pool": [LONG_PLANE, LONG_PLANE]}, "is not in a page of 4160"),
        ("planes", {"pool_ids": IDS + 2}, "pool_ids go from 3 to 4: must be from 0 to 3"),
        ("planes", {"pool_ids": IDS[:1]}, "pool_ids: (1,) is not [2]"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    operations: str, changes: dict[str, object], message: str
) -> None:
    for name in operations.split():
        pages, (operation, arguments) = some_pages(), OPERATIONS[name]
        with pytest.raises(ValueError) as error:
            operation(**{"pages": pages, "page_ids": IDS, "offset": 64, **arguments, **changes})
        assert message in str(error.value)
        assert torch.equal(pages, some_pages()) and not PLANE.any()
