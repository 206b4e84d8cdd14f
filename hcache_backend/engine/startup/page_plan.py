"""What pages look like on this server, how many there are, and what they pass through."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import xxhash
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.staging import Staging
from hcache_backend.engine.capture_hooks import HiddenCapture
from hcache_backend.engine.host_pool import HostPages
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.graphs import recording_problem
from hcache_backend.engine.startup.memory import plan_host_pages, staging_places, step_tokens
from hcache_backend.engine.startup.self_check import Probe
from hcache_backend.page import PageLayout
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.restore.exchange import Exchange, share_of_rank
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.restore.ring import ring_bytes
from hcache_kernels.codecs import Codec


class PagePlan(NamedTuple):
    """What pages look like, how many there are, and what they pass through.

    Attributes:
        layers: All layers of this pipeline stage.
        methods: What is stored of each layer.
        recomputer: Recomputes the first layers; None where it cannot or need not.
        codec: Encodes hidden states.
        exchange: Between the ranks that share the tokens of every page; None: pages are whole.
        layout: Layout of a page.
        kv: Copies the K and V that are stored.
        pages: How many pages there are.
        hooks: The capture hooks that CUDA graphs were recorded with, if any.
        staging: Where captured rows go first.
    """

    layers: tuple[AttentionLayer, ...]
    methods: LayerMethods
    recomputer: Recomputer | None
    codec: Codec
    exchange: Exchange | None
    layout: PageLayout
    kv: KVSegments
    pages: HostPages
    hooks: HiddenCapture | None
    staging: Staging

    @property
    def hidden_layers(self) -> list[AttentionLayer]:
        """Layers that are stored as hidden states."""
        return [self.layers[index] for index in self.methods.layers("hidden")]


def plan_pages(
    runner: Any,
    kvcache: Any,
    probe: Probe,
    methods: LayerMethods,
    recomputer: Recomputer | None,
    codec: Codec,
    exchange: Exchange | None,
) -> PagePlan:
    """Find room for what is stored of each layer; talks to no other rank.

    Raises:
        Refused: There is no room, or CUDA graphs were recorded for something else.
    """
    unrecorded = recording_problem(runner, codec)
    if unrecorded is not None:
        raise Refused(unrecorded)
    memory, tokens, hidden = get_memory(), kvcache.page_size, methods.layers("hidden")
    kv = KVSegments(kvcache, methods.layers("kv"), tokens)
    number, shares = (exchange.number, exchange.shares) if exchange else (0, 1)
    segments = [0] * len(methods.methods)
    for layer in hidden:
        segments[layer] = tokens // shares * codec.row_bytes
    for layer in kv.layers:
        segments[layer] = kv.segment_bytes(layer)
    layout = PageLayout(tokens, tuple(segments), number, shares)
    pages = plan_host_pages(
        kvcache, layout, memory.hicache_size, memory.hicache_ratio, host_memory_budget_bytes()
    )
    hooks: HiddenCapture | None = getattr(runner, "hcache_capture", None)
    staging = hooks.staging if hooks is not None else None
    try:
        if staging is None:
            places = staging_places(len(hidden), *step_tokens(runner), 0)
            staging = Staging(len(hidden), codec, places, kvcache.device)
        # Is there room for restores? Freed memory stays in torch's cache until it is needed.
        room = ring_bytes(layout, methods.chunk_tokens, hidden)
        torch.empty(room, dtype=torch.uint8, device=kvcache.device)
    except torch.OutOfMemoryError as error:
        raise Refused(f"no device memory for staging and restores: {error}") from None
    return PagePlan(
        probe.layers, methods, recomputer, codec, exchange, layout, kv, pages, hooks, staging
    )


def make_exchange(probe: Probe, page_size: int) -> Exchange | None:
    """What brings the shares of a page's tokens together; all ranks must call it at one point.

    Returns:
        None where there is nothing to share: one rank, or pages that do not divide.

    Raises:
        Refused: On every rank: hidden states differ between ranks, or do not get across.
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
    every = ranks.all_gather_object((problem, digest))
    for other, _ in every:
        if other is not None:
            raise Refused(other)
    if len({digest for _, digest in every}) > 1:
        raise Refused("hidden states differ between tensor-parallel ranks")
    return exchange
