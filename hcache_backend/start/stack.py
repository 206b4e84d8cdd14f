"""HiCache's stack over own pages: host pool, capture, restores and controller, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.hooks import invalidate_on_allocation
from hcache_backend.capture.recomputed_rows import RecomputedRows
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.checks.service import KVChecks, ServiceChecks
from hcache_backend.host.loads import LoadQueue
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.projection.paged_pool import planes_of
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.layers import PoolParking, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.ring import ring_bytes
from hcache_backend.sglang.allocator import ReservablePages
from hcache_backend.sglang.arguments import kv_fields
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.host_pool import OwnPagesPool
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.sglang.stage_pages import StagePages
from hcache_backend.start.attach import warn_of_small_host_pool
from hcache_backend.start.capabilities import EAGER, Server, refusal
from hcache_backend.start.machine import judge_hits
from hcache_backend.start.page_plan import PagePlan, asked_codec, kv_bytes_per_token
from hcache_backend.start.sides import SidePool

logger = logging.getLogger("hcache")

_RESERVED = 0.5  # largest share of the device's pages that hits being read may reserve

_CONTROLLER_ARGUMENTS = (
    "load_cache_event",
    "storage_backend",
    "prefetch_threshold",
    "model_name",
    "storage_backend_extra_config",
    "enable_storage_metrics",
)


def build_stack(
    runtime: Runtime,
    params: Any,
    arguments: Mapping[str, Any],
    plan: PagePlan,
    projector: Projector,
    side: SidePool | None = None,
) -> StackBuildResult:
    """HiCache's components, by the plan that every rank agreed on. SGLang gives ``params`` and
    ``arguments`` to a strategy. ``side``: of a hybrid model."""
    kvcache, layout, config = plan.kvcache, plan.layout, runtime.config
    codec, ranks, memory = plan.codec, attention_ranks(), get_memory()
    device, whole = kvcache.device, params.token_to_kv_pool_allocator
    allocator = getattr(whole, "full_attn_allocator", whole)  # of a pool with windows
    assert config is not None
    pool = OwnPagesPool(
        kvcache,
        params.page_size,
        memory.hicache_mem_layout,
        page_layout=layout,
        pages=plan.pages,
        kv=plan.kv,
        pin_memory=device != "cpu",
        allocator_type=get_allocator_type(),
        stamp=lambda page: layout.stamp(page, runtime.page_namespace(), runtime.writer),
        keeps_unfit=plan.recomputer is not None,
    )
    hidden, order = codec is not None, None
    if ranks.world_size > 1 and (hidden or plan.exchange is not None):
        order = CollectiveOrder(device)
    runtime.runner.hcache_order = None if hidden else order  # otherwise capture has it
    # Before capture wraps the allocator: pages taken from a reservation are allocated, too.
    reason = refusal(EAGER, Server(runtime, kvcache, allocator, hidden))
    runtime.eager, reservable = reason is None, None
    if reason is None:
        reservable = ReservablePages(allocator)
    else:
        runtime.unused[EAGER] = reason
    capture = _start_capture(runtime, allocator, pool, plan, order) if hidden else None
    pipeline = RestorePipeline(
        pool.kv_buffer,
        layout,
        restored_layers(kvcache, plan, projector),
        plan.methods.chunk_tokens,
        device,
        exchange=plan.exchange,
        order=order,
    )
    loads = LoadQueue(pool.arena, pipeline, plan.methods, plan.recomputer, device)
    loads.on_failed.append(runtime.cannot_restore)
    loads.slowdown = runtime.l3.estimates.slowdown
    pool.use(loads, capture)
    mapper = (lambda layer: layer) if side is None else side.full.get
    entries = [PoolEntry(PoolName.KV, pool, kvcache, mapper, True)]
    pools, component_pools = "own pages", {ComponentType.FULL: pool}
    if side is not None:
        entries.append(side.make())
        component_pools[side.component] = entries[-1].host_pool
        pools += f" + {side.component.name}"
    group = HostPoolGroup(entries)
    warn_of_small_host_pool(
        pool.size, int(kvcache.size), pool.size_per_token, kv_bytes_per_token(kvcache)
    )
    # Known before the controller attaches L3:
    runtime.on_other_l3.append(partial(judge_hits, runtime, config))
    controller = OwnPagesController(
        whole,
        group,
        params.page_size,
        params.tp_cache_group,
        attn_cp_group=params.attn_cp_cache_group,
        attn_tp_group=params.attn_tp_cache_group,
        pp_group=params.pp_cache_group,
        write_policy=memory.hicache_write_policy,
        io_backend=memory.hicache_io_backend,
        transfer_layer_id_max=None if side is None else side.layer_ids,
        **{name: arguments[name] for name in _CONTROLLER_ARGUMENTS},
    )
    kv_checks = KVChecks(runtime, pool, plan.kv)
    new_rows, checks, pairs, eager = None, None, None, None
    if plan.kv.layers:
        pool.on_freed.append(kv_checks.freed)
        pool.on_backed_up.append(kv_checks.transferred)
        if capture is None:  # otherwise a load may recompute layers whose K and V are stored
            pool.on_loaded.append(kv_checks.transferred)
    if codec is not None and capture is not None:
        new_rows = partial(RecomputedRows, capture, plan.staging, plan.capture_hooks)
        how = codec, projector, plan.exchange, order
        checks = ServiceChecks(runtime, pool, plan.hidden_layers, *how)
        pool.on_freed.append(checks.freed)
        pool.on_backed_up.append(checks.transferred)
    if plan.plugin is not None and plan.observer is not None:
        every = params.tp_cache_group, ranks.world_size
        pairs = plan.plugin.backups(plan.observer, layout, *every)
    if reservable is not None:
        most = max(1, int(kvcache.size // params.page_size * _RESERVED))
        methods, seconds = plan.methods, config.recompute_ms / 1e3
        known = methods.profile is not None
        budget = SliceBudget(seconds, methods.chunk_tokens, methods.layer, known=known)
        known_prefetches = runtime.l3, runtime.prefetches
        eager = EagerLoads(
            reservable, pool, pipeline, loads, most, budget, *known_prefetches, new_rows
        )
        runtime.on_weights_changed.append(eager.give_back)
    stages = StagePages(
        plan.pages.host, pool.arena.whole, lambda: runtime.distrust is None, runtime.lose_trust
    )
    controller.use_own_pages(
        runtime, pool, loads, eager, stages, kv_checks, capture=capture, checks=checks, pairs=pairs
    )
    return StackBuildResult(
        host_pool_group=group,
        cache_controller=controller,
        component_host_pools=component_pools,
        register_req_to_token_counter=side is not None and side.of_requests,
        pools_desc=pools,
    )


def use_own_pages(runtime: Runtime, kvcache: Any, plan: PagePlan, reason: str | None) -> None:
    """Tell namespace, metrics and log about pages; ``reason``: why no hidden states, or None."""
    runtime.layer_methods = plan.methods
    fields, codec = page_fields(runtime, kvcache, plan), plan.kv.codec
    dtype = planes_of(kvcache, 0)[0].dtype
    if plan.codec is not None:
        codec, dtype = plan.codec.name, plan.codec.dtype
        fields["codec"] = codec
        if plan.kv.layers and plan.kv.codec != codec:
            codec += f", {plan.kv.codec} of K and V"
        if not plan.codec.is_view and plan.recomputer is None:
            runtime.unused["pages that the codec cannot encode"] = "they cannot be recomputed"
    room = ring_bytes(plan.layout, plan.methods.chunk_tokens, plan.arriving) * bool(plan.arriving)
    runtime.use_codec(codec, asked_codec(runtime, dtype))
    runtime.use_own_pages(fields, reason)
    logger.info(
        "hcache: %s: %s, %d bytes per %d-token page, codec %s, %d host pages, %d shadows, "
        "%.0f MB of device memory for restores",
        "own pages" if plan.codec is None else "hidden mode",
        plan.methods.describe(),
        plan.layout.page_bytes,
        plan.layout.page_size,
        codec,
        *plan.pages,
        room / 1e6,
    )


def page_fields(runtime: Runtime, kvcache: Any, plan: PagePlan) -> dict[str, object]:
    """Fields of the namespace of own pages besides the weights."""
    fields: dict[str, object] = {
        "kind": "own",
        "partition": list(plan.methods.methods),
        "first_layer": kvcache.start_layer,
        "layout": plan.layout.form,
    }
    if plan.kv.layers:
        fields |= kv_fields(runtime.runner)
    ranks = attention_ranks()
    if not plan.kv.layers or plan.kv.latent or plan.layout.share.of == ranks.world_size:
        fields["any_ranks"] = True
    else:  # K and V are of a rank's own heads, which are no share
        fields["tp"] = [ranks.rank_in_group, ranks.world_size]
    return fields


def _start_capture(
    runtime: Runtime,
    allocator: Any,
    pool: OwnPagesPool,
    plan: PagePlan,
    order: CollectiveOrder | None,
) -> StagedCapture:
    """Capture hidden states in every forward pass."""
    assert plan.codec is not None
    hooks, staging = plan.capture_hooks, plan.staging
    segments = [layer.index for layer in plan.hidden_layers]
    capture = StagedCapture(pool.arena, pool.kv_buffer, staging, segments, plan.codec)
    hooks.use(capture, tokens_only=plan.recomputer is not None, order=order)
    invalidate_on_allocation(allocator, hooks)
    runtime.on_weights_changed.append(capture.ledger.forget)
    logger.debug(
        "hcache: capture: staging of %d tokens, %.0f MB of device memory",
        staging.places,
        Staging.bytes_for(staging.layers, staging.row_bytes, staging.places) / 1e6,
    )
    return capture


def restored_layers(kvcache: Any, plan: PagePlan, projector: Projector) -> list[RestoredLayer]:
    codec = plan.codec
    row_bytes = 0 if codec is None else codec.row_bytes
    parks = codec is not None and PoolParking.fits(kvcache, row_bytes)

    def projected(index: int) -> RestoredLayer:
        layer = plan.layers[index]
        assert codec is not None

        def fill(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            rows = codec.decode(segments.view(-1, row_bytes))
            projector.project_to_pool(layer, rows, positions, slots)

        return RestoredLayer(
            "hidden", fill, PoolParking(kvcache, index, row_bytes) if parks else None
        )

    restored: dict[str, Callable[[int], RestoredLayer]] = {
        "hidden": projected,
        "kv": plan.kv.restored_layer,
        "recompute": lambda _: RestoredLayer("recompute", None),
    }
    return [restored[method](layer) for layer, method in enumerate(plan.methods.methods)]
