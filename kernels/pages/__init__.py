"""Layer segments of pages in host memory <-> contiguous rows, or the KV pool, on the device.

Pages are uint8 ``[pages, page_bytes]``. If the ids are on a GPU, the pages must be in pinned host
memory or on that GPU: one kernel reads or writes them over the bus, all pages at once, so that many
small segments cost one launch and no staging. If the ids are on the CPU, torch copies.

A program that waits for the bus keeps others off its multiprocessor. So a kernel is a few programs
(:func:`hcache_kernels.launch.copy_programs`) that go through all pages in turn. Threads move 16
bytes at once if all sizes and addresses are multiples of 16, otherwise 8.

Values of ids are checked only if they are on the CPU. All checks raise a ValueError, and then
nothing was written.
"""

from collections.abc import Sequence

import torch

from ..checks import BYTES, INDEX_TYPES, check_range, check_tensor, wrong
from .kernel import WORD, gather_launch, gather_planes_launch


def gather_pages(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    length: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same bytes of many pages, one after the other: uint8 ``[p, length]``.

    Args:
        pages: All pages, uint8 ``[pages, page_bytes]``.
        page_ids: Which ones, int32 or int64 ``[p]``, in any order.
        offset: Where the bytes begin in a page, a multiple of 8 (fastest: of 16, as all sizes).
        length: How many, a multiple of 8.
        out: Where to, contiguous uint8 ``[p, length]``; None: new. On the device of
            ``page_ids``.
    """
    _check_pages(pages, offset, length)
    _check_ids("page_ids", page_ids, len(page_ids), len(pages))
    if out is None:
        out = torch.empty((len(page_ids), length), dtype=torch.uint8, device=page_ids.device)
    check_tensor("out", out, BYTES, (len(page_ids), length), page_ids.device)
    if page_ids.is_cpu:
        torch.index_select(pages[:, offset : offset + length], 0, page_ids, out=out)
    elif out.numel():
        gather_launch(pages, page_ids, offset, out).run()
    return out


def scatter_pages(
    rows: torch.Tensor, pages: torch.Tensor, page_ids: torch.Tensor, offset: int
) -> None:
    """Write rows, uint8 ``[p, length]``, to bytes ``offset`` to ``offset + length`` of the pages
    ``page_ids``. If a page is named twice, it gets either row."""
    check_tensor("rows", rows, BYTES, (len(rows), "length"))
    _check_pages(pages, offset, rows.shape[1])
    _check_ids("page_ids", page_ids, len(rows), len(pages), rows.device)
    if rows.is_cpu:
        words = pages.view(torch.int64)[:, offset // WORD : (offset + rows.shape[1]) // WORD]
        words[page_ids.long()] = rows.view(torch.int64)
    elif rows.numel():
        gather_launch(pages, page_ids, offset, rows, save=True).run()


def gather_planes(
    pages: torch.Tensor,
    page_ids: torch.Tensor,
    offset: int,
    pool: Sequence[torch.Tensor],
    pool_ids: torch.Tensor,
) -> None:
    """Copy K and V, or latents, of one layer of many pages to pages of the pool, and nothing else.

    In a page K is one group of heads after the other, each of all tokens, then V likewise; the pool
    has one token after the other, each with all heads.

    Args:
        pages: As in :func:`gather_pages`; so ``page_ids``.
        offset: Where K begins in a page, a multiple of 8.
        pool: K and V of the pool, or its latents, each uint8 ``[pool pages, page_size, groups,
            row_bytes]``, contiguous; ``row_bytes`` is a multiple of 8 and may differ.
        pool_ids: Where to, each page of the pool once, as ``page_ids`` and on the pool's device.
    """
    first = pool[0]
    check_tensor("K of the pool", first, BYTES, ("pool pages", "page_size", "groups", "row_bytes"))
    for name, plane in zip("KV", pool, strict=False):  # latents alone are called K
        what = f"{name} of the pool"
        check_tensor(what, plane, BYTES, (*first.shape[:3], "row_bytes"), first.device)
        if plane.shape[3] % WORD:
            raise wrong(f"row_bytes of {name}", plane.shape[3], f"a multiple of {WORD}")
    _check_pages(pages, offset, sum(plane[0].numel() for plane in pool) if len(first) else 0)
    _check_ids("page_ids", page_ids, len(page_ids), len(pages), first.device)
    _check_ids("pool_ids", pool_ids, len(page_ids), len(first), first.device)
    if not first.is_cpu:
        if len(page_ids):
            gather_planes_launch(pages, page_ids, offset, pool, pool_ids).run()
        return
    start = offset // WORD
    ids = list(zip(page_ids.tolist(), pool_ids.tolist(), strict=True))
    for plane in pool:
        words = plane.view(torch.int64)
        _, tokens, groups, row = words.shape
        end = start + tokens * groups * row
        found = pages.view(torch.int64)[:, start:end].view(-1, groups, tokens, row).transpose(1, 2)
        for page, to in ids:  # index_copy_ goes word by word: an eighth of the speed
            words[to].copy_(found[page])
        start = end


def _check_pages(pages: torch.Tensor, offset: int, length: int) -> None:
    """Raise ValueError for memory that is no pages, or bytes (a segment) that no page holds."""
    check_tensor("pages", pages, BYTES, ("pages", "page_bytes"))
    for name, value in (("page_bytes", pages.shape[1]), ("offset", offset), ("length", length)):
        if value % WORD:
            raise wrong(name, value, f"a multiple of {WORD}")
    if offset < 0 or length < 0 or offset + length > pages.shape[1]:
        raise wrong("bytes", f"{offset} to {offset + length}", f"in a page of {pages.shape[1]}")


def _check_ids(
    name: str, ids: torch.Tensor, count: int, limit: int, device: torch.device | None = None
) -> None:
    """Raise ValueError for ids that are no vector of ``count``, or, on a CPU, not below ``limit``:
    values on a GPU are not read, because that would wait for it."""
    check_tensor(name, ids, INDEX_TYPES, (count,), device)
    if ids.is_cpu:
        check_range(name, ids, limit, "all there are")
