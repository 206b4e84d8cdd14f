"""HiCache's stack in hidden mode: host pool, capture, restores and controller, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.staging import StagedCapture
from hcache_backend.engine import metrics
from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.capture_hooks import HiddenCapture, invalidate_on_allocation
from hcache_backend.engine.controller import HiddenStateController
from hcache_backend.engine.eager_loads import EagerLoads, ReservablePages, eager_problem
from hcache_backend.engine.hooks import eager_hooks, install
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.kv_segments import PoolParking
from hcache_backend.engine.loads import LoadQueue
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.service_check import PageCheck, ServiceChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.engine.startup.page_plan import PagePlan
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.ring import ring_bytes

logger = logging.getLogger("hcache")


def build_stack(
    runtime: Runtime,
    kvcache: Any,
    params: Any,
    plan: PagePlan,
    projector: Projector,
    **kwargs: Any,
) -> StackBuildResult:
    """What HiCache works with in hidden mode, by the plan that every rank agreed on.

    ``params`` and ``kwargs`` are what SGLang gives a stack strategy.
    """
    assert runtime.config is not None
    memory, layout = get_memory(), plan.layout
    allocator, ranks = params.token_to_kv_pool_allocator, params.tp_cache_group
    _use_hidden_mode(runtime, kvcache, plan)
    pool = HiddenStatePool(
        kvcache,
        params.page_size,
        memory.hicache_mem_layout,
        page_layout=layout,
        host_pages=plan.pages,
        stamp=lambda page: layout.stamp(page, runtime.page_namespace(), runtime.writer),
        pin_memory=kvcache.device != "cpu",
        allocator_type=get_allocator_type(),
    )
    reservable = _reservable(runtime, allocator)
    order = CollectiveOrder(kvcache.device) if get_tp_group().world_size > 1 else None
    capture = _start_capture(runtime, allocator, pool, plan, order)
    pipeline = RestorePipeline(
        pool.kv_buffer,
        layout,
        _restored_layers(kvcache, plan, projector),
        plan.methods.chunk_tokens,
        kvcache.device,
        exchange=plan.exchange,
        order=order,
    )
    loads = LoadQueue(pool.arena, pipeline, plan.methods, plan.recomputer, kvcache.device)
    pool.use(capture, plan.kv, loads)
    group = HostPoolGroup([PoolEntry(PoolName.KV, pool, kvcache, lambda layer: layer, True)])
    controller = HiddenStateController(
        allocator,
        group,
        params.page_size,
        ranks,
        attn_cp_group=params.attn_cp_cache_group,
        attn_tp_group=params.attn_tp_cache_group,
        pp_group=params.pp_cache_group,
        write_policy=memory.hicache_write_policy,
        io_backend=memory.hicache_io_backend,
        **{name: kwargs[name] for name in _CONTROLLER_ARGUMENTS},
    )
    check = PageCheck(layout, plan.codec, plan.hidden_layers, plan.kv, projector, plan.exchange)
    checks = ServiceChecks(runtime, pool, capture, check, ranks)
    stages = StagePages(
        pool.arena, plan.pages.host, lambda: runtime.distrust is None, runtime.lose_trust
    )
    eager = None
    if reservable is not None:
        most = max(1, int(plan.pages.device * runtime.config.restore_share))
        eager = EagerLoads(reservable, pool, pipeline, loads, most)
        runtime.on_weights_changed.append(eager.give_back)
    controller.use_hidden_states(runtime, pool, capture, checks, loads, stages, eager)
    return StackBuildResult(
        host_pool_group=group,
        cache_controller=controller,
        component_host_pools={ComponentType.FULL: pool},
        pools_desc="hidden states",
    )


_CONTROLLER_ARGUMENTS = (
    "load_cache_event",
    "storage_backend",
    "prefetch_threshold",
    "model_name",
    "storage_backend_extra_config",
    "enable_storage_metrics",
)


def _use_hidden_mode(runtime: Runtime, kvcache: Any, plan: PagePlan) -> None:
    """Say what pages look like: in their namespace, in metrics and in the log."""
    assert runtime.config is not None
    runtime.use_hidden_mode()
    runtime.layer_methods = plan.methods
    metrics.CODEC.set(runtime.config.codec, plan.codec.name)
    runtime.page_fields = {
        "kind": "hidden",
        "partition": list(plan.methods.methods),
        "codec": plan.codec.name,
        "first_layer": kvcache.start_layer,
    }
    ranks = get_tp_group()
    if not plan.kv.layers:
        runtime.page_fields["any_ranks"] = True
    elif ranks.world_size > 1:
        # Hidden states are the same on every rank; K and V are those of its own heads.
        runtime.page_fields["tp"] = [ranks.rank_in_group, ranks.world_size]
    chunk_tokens = plan.methods.chunk_tokens
    logger.info(
        "hcache: restores take %.0f MB of device memory beside one projection of %d tokens",
        ring_bytes(plan.layout, chunk_tokens, plan.methods.layers("hidden")) / 1e6,
        chunk_tokens,
    )
    logger.info(
        "hcache: hidden mode: %s, %d bytes a %d-token page, codec %s, %d host pages, %d shadows",
        plan.methods.describe(),
        plan.layout.page_bytes,
        plan.layout.page_size,
        plan.codec.name,
        *plan.pages,
    )


def _reservable(runtime: Runtime, allocator: Any) -> ReservablePages | None:
    """The device's pages, some of which are to be reserved; None: restores are layer-wise."""
    assert runtime.config is not None
    if runtime.config.restore == "layerwise":
        return None
    problem = eager_problem(allocator, resolved(runtime.runner.server_args))
    if problem is None:
        problem = install(eager_hooks())
    if problem is None:
        return ReservablePages(allocator)
    logger.warning("hcache: restores are layer-wise, not eager: %s", problem)
    return None


def _start_capture(
    runtime: Runtime,
    allocator: Any,
    pool: HiddenStatePool,
    plan: PagePlan,
    order: CollectiveOrder | None,
) -> StagedCapture:
    """Capture what the layers that are stored as hidden states receive in every forward pass."""
    hooks, layers = plan.hooks, plan.hidden_layers
    if hooks is None:
        hooks = HiddenCapture([(layer.module, [layer.projection]) for layer in layers])
    else:
        hooks.watch_only(layer.projection for layer in layers)
    segments = [layer.index for layer in layers]
    capture = StagedCapture(pool.arena, pool.kv_buffer, plan.staging, segments)
    hooks.use(capture, tokens_only=plan.recomputer is not None, order=order)
    invalidate_on_allocation(allocator, hooks)
    runtime.on_weights_changed.append(capture.ledger.forget)
    runtime.runner.hcache_capture = hooks
    logger.info(
        "hcache: capture: staging of %d tokens, %.0f MB of device memory",
        plan.staging.places,
        plan.staging.device_bytes / 1e6,
    )
    return capture


def _restored_layers(kvcache: Any, plan: PagePlan, projector: Projector) -> list[RestoredLayer]:
    row_bytes = plan.codec.row_bytes
    parks = PoolParking.fits(kvcache, row_bytes)

    def projected(index: int) -> RestoredLayer:
        layer = plan.layers[index]

        def fill(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            rows = plan.codec.decode(segments.view(-1, row_bytes))
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
