"""The copies that the benchmarks compare with: right, whatever the number of programs."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.copies import BLOCK, KVCopier, gather_launch, slots_launch
from hcache_kernels.project_kv import KVPool

PAGES, HEADER = 5, 64


def pinned(values: torch.Tensor, device: str) -> torch.Tensor:
    return values.pin_memory() if device == "cuda" else values


@pytest.mark.parametrize("programs", [1, 3, 1000])
@pytest.mark.parametrize("length", [8 * 24, 8 * BLOCK + 16])
def test_gathered_by_few_programs(length: int, programs: int, device: str) -> None:
    values = torch.randint(0, 256, (PAGES, HEADER + 2 * length), dtype=torch.uint8)
    pages = pinned(values, device)
    ids = torch.tensor([4, 0, 3])
    out = torch.zeros((len(ids), length), dtype=torch.uint8, device=device)
    gather_launch(pages, ids.to(device), HEADER + length, out, programs).run()
    assert torch.equal(out.cpu(), values[ids, HEADER + length :])


def test_rows_go_to_their_slots_and_nowhere_else(device: str) -> None:
    n, heads, head_dim = 70, 2, 12
    slots = torch.randperm(90)[:n]
    rows = torch.randn(n, heads * head_dim).bfloat16()
    part = torch.zeros(90, heads, head_dim, dtype=torch.bfloat16, device=device)
    slots_launch(pinned(rows, device), slots.to(device), part).run()
    want = torch.zeros_like(part, device="cpu")
    want[slots] = rows.view(n, heads, head_dim)
    assert torch.equal(part.cpu(), want)


def test_k_and_v_are_copied_by_whatever_is_there(device: str) -> None:
    slots = torch.randperm(20, device=device)[:16]
    k, v = (pinned(torch.randn(16, 128).bfloat16(), device) for _ in "kv")
    kinds = {"dtype": torch.bfloat16, "device": device}
    pool = KVPool(*(torch.zeros(20, 1, 128, **kinds) for _ in "kv"))
    copier = KVCopier(slots)
    copier.copy(k, v, pool)
    assert copier.name
    assert torch.equal(pool.k[slots].view(16, -1).cpu(), k)
    assert torch.equal(pool.v[slots].view(16, -1).cpu(), v)
