"""The copies that the benchmarks compare with are right."""

from __future__ import annotations

import torch

from bench.gpu.copies import KVCopier, slots_launch
from hcache_kernels.project_kv import KVPool


def pinned(values: torch.Tensor, device: str) -> torch.Tensor:
    return values.pin_memory() if device == "cuda" else values


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
