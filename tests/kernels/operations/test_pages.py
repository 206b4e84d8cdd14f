"""The page kernels move what the reference moves, and write nothing else."""

import pytest
import torch

from hcache_kernels.pages import gather_pages, gather_planes, scatter_pages
from hcache_kernels.pages.kernel import gather_launch, gather_planes_launch
from tests.kernels.operations.conftest import by, finish, host

PAGES = 9
POISON = 0x5A

WAYS = pytest.mark.parametrize(
    ("index_type", "programs", "spare"),
    [(torch.int32, 1, 24), (torch.int64, 3, 32), (torch.int64, 1000, 32)],
)
"""Types of ids, programs (more than there is work for, too), and bytes behind the last segment of a
page, with which pages are aligned to 16 bytes or to 8."""


@WAYS
@pytest.mark.parametrize(
    ("offset", "length"), [(4096, 4096), (4096, 8), (8, 392), (0, 24), (4104, 4 * 392), (0, 40000)]
)
def test_gather(
    device: str, offset: int, length: int, index_type: torch.dtype, programs: int, spare: int
) -> None:
    pages = host(PAGES, offset + length + spare)
    ids = torch.tensor([8, 0, 3, 3, 5], dtype=index_type)
    out = torch.full((len(ids) + 2, length), POISON, dtype=torch.uint8, device=device)
    by(programs, gather_launch(pages, ids.to(device), offset, out[1:-1])).run()
    assert torch.equal(out[1:-1].cpu(), gather_pages(pages, ids, offset, length))
    assert (out[0] == POISON).all()
    assert (out[-1] == POISON).all()


@pytest.mark.parametrize(("groups", "programs"), [(1, 1), (1, 1000), (2, 3), (4, 1000)])
@pytest.mark.parametrize(
    ("offset", "tokens", "rows"),
    [
        *((4096, 16, (256, 256)), (8, 8, (8, 16)), (4104, 5, (392, 392)), (0, 64, (1024, 512))),
        (8, 8, (1152,)),  # latents
    ],
)
def test_gather_planes(
    device: str, offset: int, tokens: int, rows: tuple[int, ...], groups: int, programs: int
) -> None:
    pages = host(PAGES, offset + tokens * groups * sum(rows) + 32)
    ids, places = torch.tensor([8, 0, 3, 3, 5]), torch.tensor([1, 6, 4, 0, 2])
    before = [torch.full((8, tokens, groups, row), POISON, dtype=torch.uint8) for row in rows]
    want, pool = [plane.clone() for plane in before], [plane.to(device) for plane in before]
    gather_planes(pages, ids, offset, want, places)
    on_device = ids.to(device), offset, pool, places.to(device)
    by(programs, gather_planes_launch(pages, *on_device)).run()
    for got, wanted in zip(pool, want, strict=True):
        assert torch.equal(got.cpu(), wanted)
        assert (wanted[[3, 5, 7]] == POISON).all()


@WAYS
@pytest.mark.parametrize(("offset", "length"), [(4096, 512), (4096, 392), (8, 8), (16, 20000)])
def test_scatter(
    device: str, offset: int, length: int, index_type: torch.dtype, programs: int, spare: int
) -> None:
    pages = host(PAGES, offset + length + spare)
    want = pages.clone()
    ids = torch.randperm(PAGES)[:5].to(index_type)
    rows = torch.randint(0, 256, (5, length), dtype=torch.uint8)
    scatter_pages(rows, want, ids, offset)
    scatter = gather_launch(pages, ids.to(device), offset, rows.to(device), save=True)
    by(programs, scatter).run()
    finish()
    assert torch.equal(pages, want)


def test_nothing_is_moved_for_no_ids(device: str) -> None:
    pages = host(PAGES, 4096)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert gather_pages(pages, none, 0, 64).shape == (0, 64)
    before = pages.clone()
    scatter_pages(torch.empty(0, 64, dtype=torch.uint8, device=device), pages, none, 0)
    plane = torch.empty(2, 4, 2, 8, dtype=torch.uint8, device=device)
    gather_planes(pages, none, 0, [plane, plane], none)
    assert torch.equal(pages, before)
