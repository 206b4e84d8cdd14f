"""What pages look like on this server, how many there are, and what they pass through."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.staging import Staging
from hcache_backend.engine.capture_hooks import HiddenCapture
from hcache_backend.engine.hooks import install, prefix_hooks
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.graphs import recording_problem, step_tokens
from hcache_backend.engine.startup.memory import HostPages, plan_host_pages, staging_places
from hcache_backend.engine.startup.partitioning import Partitioning
from hcache_backend.engine.startup.recomputer import check_recompute, make_recomputer
from hcache_backend.engine.startup.self_check import Probe, SelfCheckFailed
from hcache_backend.page import PageLayout
from hcache_backend.restore.exchange import Exchange, share_of_rank
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.restore.ring import ring_bytes
from hcache_kernels.codecs import Codec

logger = logging.getLogger("hcache")


class PagePlan(NamedTuple):
    """What pages look like, how many there are, and what they pass through.

    Attributes:
        parts: What is stored of each layer.
        recomputer: Recomputes the first layers; None where it cannot or need not.
        hooks: The capture hooks that CUDA graphs were recorded with, if any.
        exchange: Between the ranks that share the tokens of every page; None: pages are whole.
    """

    parts: Partitioning
    recomputer: Recomputer | None
    codec: Codec
    layout: PageLayout
    kv: KVSegments
    pages: HostPages
    hooks: HiddenCapture | None
    staging: Staging
    exchange: Exchange | None


def plan_pages(
    runtime: Runtime,
    probe: Probe,
    codec: Codec,
    kvcache: Any,
    parts: Partitioning,
    exchange: Exchange | None,
) -> PagePlan:
    """Find room for what is stored of each layer.

    The K and V that the model wrote during the probe must still be in the pool.

    Args:
        runtime: State of this process.
        probe: The layers, and what they received.
        codec: Of the hidden states.
        kvcache: The KV pool.
        parts: What is to be stored of each layer.
        exchange: Between the ranks that share the tokens of every page, if any do.

    Raises:
        SelfCheckFailed: There is no room, or CUDA graphs were recorded for something else.
    """
    memory = get_memory()
    unrecorded = recording_problem(runtime.runner, codec)
    if unrecorded is not None:
        raise SelfCheckFailed(unrecorded)
    recomputer, parts = _recomputation(runtime, probe, kvcache, parts)
    (recomputed,) = on_all_ranks(get_tp_group().cpu_group, recomputer is not None)
    if recomputer is not None and not recomputed:
        recomputer, parts = None, parts.without_recompute("another tensor-parallel rank cannot")
    kv = KVSegments(kvcache, parts.layers("kv"), kvcache.page_size)
    number, shares = (exchange.number, exchange.shares) if exchange else (0, 1)
    hidden_bytes = kvcache.page_size // shares * codec.row_bytes
    length: dict[str, Callable[[int], int]] = {
        "hidden": lambda _: hidden_bytes,
        "kv": kv.segment_bytes,
        "recompute": lambda _: 0,
    }
    segments = (length[method](layer) for layer, method in enumerate(parts.methods))
    layout = PageLayout(kvcache.page_size, tuple(segments), number, shares)
    pages = plan_host_pages(
        kvcache, layout, memory.hicache_size, memory.hicache_ratio, host_memory_budget_bytes()
    )
    runner = runtime.runner
    hooks: HiddenCapture | None = getattr(runner, "hcache_capture", None)
    try:
        if hooks is not None and hooks.staging is not None:
            staging = hooks.staging
        else:
            captured = len(parts.layers("hidden"))
            places = staging_places(captured, *step_tokens(runner), 0)
            staging = Staging(captured, codec, places, kvcache.device)
        # Is there room for restores? Freed memory stays in torch's cache until it is needed.
        torch.empty(
            ring_bytes(layout, parts.chunk_tokens, parts.layers("hidden")),
            dtype=torch.uint8,
            device=kvcache.device,
        )
    except torch.OutOfMemoryError as error:
        raise SelfCheckFailed(f"no device memory for staging and restores: {error}") from None
    return PagePlan(parts, recomputer, codec, layout, kv, pages, hooks, staging, exchange)


def make_exchange(probe: Probe, page_size: int) -> Exchange | None:
    """What brings the shares of a page's tokens together; all ranks must call it at one point.

    Returns:
        None where there is nothing to share: one rank, or pages that do not divide.

    Raises:
        SelfCheckFailed: On every rank: hidden states differ between ranks, or do not get across.
    """
    ranks = get_tp_group()
    number, shares = share_of_rank(ranks.rank_in_group, ranks.world_size, page_size)
    if shares == 1:
        return None
    device = probe.slots.device
    first = ranks.rank_in_group - number
    exchange = Exchange.between(ranks.ranks[first : first + shares], device)
    problem = exchange.check(device)
    digest = xxhash.xxh3_64_intdigest(
        torch.cat([rows.flatten() for rows in probe.hidden]).view(torch.uint8).cpu().numpy().data
    )
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, (problem, digest), group=ranks.cpu_group)
    for other, _ in every:
        if other is not None:
            raise SelfCheckFailed(other)
    if len({digest for _, digest in every}) > 1:
        raise SelfCheckFailed("hidden states differ between tensor-parallel ranks")
    return exchange


def _recomputation(
    runtime: Runtime, probe: Probe, kvcache: Any, parts: Partitioning
) -> tuple[Recomputer | None, Partitioning]:
    """What recomputes first layers, if anything is to; and what is stored where it cannot."""
    if not parts.can_recompute or (parts.profile is None and not parts.partition.recompute):
        return None, parts
    recomputer = make_recomputer(runtime.runner, kvcache, parts.chunk_tokens)
    try:
        if runtime.runner.model_config.is_multimodal:
            raise SelfCheckFailed("the model's embeddings are not those of token ids alone")
        check_recompute(probe, recomputer, kvcache)
        missing = install(prefix_hooks())
        if missing is not None:
            raise SelfCheckFailed(missing)
    except SelfCheckFailed as error:
        logger.warning("hcache: layers are not recomputed: %s", error)
        return None, parts.without_recompute(str(error))
    return recomputer, parts
