"""How much host and device memory hidden mode takes; all of it within what the user gave."""

from __future__ import annotations

from typing import Any

from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.host_pool import HostPages
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.page import PageLayout

_DECODE_TOKENS = 256
"""Larger decode steps are captured layer by layer; staging need not hold two of them."""


def kv_bytes_per_token(kvcache: Any) -> int:
    """Bytes of K and V of one token, all layers of this rank."""
    return sum(
        kvcache.k_buffer[i][0].nbytes + kvcache.v_buffer[i][0].nbytes
        for i in range(kvcache.layer_num)
    )


def plan_host_pages(
    kvcache: Any, layout: PageLayout, size_gb: float, ratio: float, budget_bytes: float
) -> HostPages:
    """Divide the memory that HiCache may take into host pages and shadows.

    Args:
        kvcache: The device's KV pool.
        layout: Layout of a page.
        size_gb: ``--hicache-size``, or 0.
        ratio: ``--hicache-ratio``: without a size, host memory is this many times the KV pool's.
        budget_bytes: What the machine has.

    Raises:
        Refused: It is not enough, or not there.
    """
    device = int(kvcache.k_buffer[0].shape[0]) // layout.page_size
    if size_gb > 0:
        given, option = size_gb * 1e9, f"--hicache-size {size_gb} (GB)"
    else:
        given = ratio * kvcache.size * kv_bytes_per_token(kvcache)
        option = f"--hicache-ratio {ratio}"
    host = int(given // layout.page_bytes) - device
    if host < 1:
        raise Refused(
            f"{option} gives {given / 1e9:.2f} GB of host memory, and the hidden states of the "
            f"tokens on the device alone take {device * layout.page_bytes / 1e9:.2f} GB"
        )
    if given > budget_bytes:
        raise Refused(
            f"{option} asks for {given / 1e9:.2f} GB of host memory and "
            f"{budget_bytes / 1e9:.2f} GB are there"
        )
    return HostPages(host, device)


def staging_places(layers: int, step_tokens: int, decode_tokens: int, recorded_tokens: int) -> int:
    """Rows that staging needs.

    Args:
        layers: Captured layers. Without any, places take no memory.
        step_tokens: Tokens of the longest eager forward pass; it uses staging layer by layer, and
            wants two layers to fit.
        decode_tokens: Tokens of the largest decode step; two of them fit, so that one is captured
            while the one before is still on its way.
        recorded_tokens: Tokens of the largest CUDA graph; all its layers must fit.
    """
    by_layer = -(-2 * step_tokens // layers) if layers else step_tokens
    return max(by_layer, 2 * decode_tokens, recorded_tokens, 1)


def step_tokens(runner: Any) -> tuple[int, int]:
    """Tokens of the longest forward pass to be captured, and of a decode step."""
    args = resolved(runner.server_args)
    decode = int(runner.max_running_requests)
    chunk = args.chunked_prefill_size
    prefill = chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens
    return min(int(prefill) + decode, int(runner.max_total_num_tokens)), min(decode, _DECODE_TOKENS)
