"""Attention of the CPU engine where times are measured: as PyTorch's with a mask."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.cpu_engine.hcache_cpu_engine.attention import extend


@pytest.mark.parametrize(("heads", "kv_heads", "value_size"), [(4, 4, 16), (4, 2, 16), (3, 1, 12)])
def test_new_tokens_attend_to_the_prefix_and_to_themselves(
    heads: int, kv_heads: int, value_size: int
) -> None:
    torch.manual_seed(0)
    lengths = [(0, 5), (7, 3), (40, 1)]  # before, new
    new = sum(each for _, each in lengths)
    query = torch.randn(new, heads, 16)
    pool = torch.randn(200, kv_heads, 16), torch.randn(200, kv_heads, value_size)
    slots = torch.randperm(200)[: 3 * 50].view(3, 50)
    totals = torch.tensor([before + each for before, each in lengths])
    output = torch.empty(new, heads, value_size)
    befores, news = (torch.tensor(column) for column in zip(*lengths, strict=True))
    requests = torch.arange(3)
    extend(
        *(None, query, output, *pool, slots, requests, totals, befores, news),
        scaling=0.3,
        causal=True,
    )
    start = 0
    for request, (before, each) in enumerate(lengths):
        key, value = (part[slots[request, : before + each]].movedim(0, 1)[None] for part in pool)
        rows = query[start : start + each].movedim(0, 1)[None]
        seen = torch.ones(each, before + each, dtype=torch.bool).tril(before)
        want = scaled_dot_product_attention(
            rows, key, value, attn_mask=seen, scale=0.3, enable_gqa=True
        )
        found = output[start : start + each].movedim(0, 1)[None]
        torch.testing.assert_close(found, want)
        start += each
