"""Our stack strategy: HiCache asks it for host pool and controller of a plain KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackBuildResult,
    StackStrategy,
    _PlainKvStrategy,
    register_stack_strategy,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_memory

from hcache_backend.capture.staging import StagedCapture
from hcache_backend.engine import metrics
from hcache_backend.engine.arguments import resolved
from hcache_backend.engine.capture_hooks import HiddenCapture, invalidate_on_allocation
from hcache_backend.engine.controller import HiddenStateController
from hcache_backend.engine.eager_loads import EagerLoads, ReservablePages, why_not_eager
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.kv_segments import PoolParking
from hcache_backend.engine.loads import LoadQueue
from hcache_backend.engine.ranks import on_all_ranks, smallest
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.service_check import PageCheck, ServiceChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.engine.startup.codec_choice import agree_on_codec
from hcache_backend.engine.startup.layer_projections import LayerProjections, PagedPool
from hcache_backend.engine.startup.page_plan import PagePlan, make_exchange, plan_pages
from hcache_backend.engine.startup.partitioning import Partitioning, partitioning
from hcache_backend.engine.startup.refusal import refusal
from hcache_backend.engine.startup.self_check import Probe, SelfCheckFailed, compare, observe
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.generic import GenericProjector, ProjectionBatch
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.pipeline import RestoredLayer, RestorePipeline
from hcache_backend.restore.ring import ring_bytes
from hcache_kernels.codecs import Codec

logger = logging.getLogger("hcache")


def register(runtime: Runtime, reason: str | None) -> None:
    """Put our strategy before SGLang's own.

    Args:
        runtime: State of this process.
        reason: Why hidden mode is already out of the question, or None.
    """
    register_stack_strategy(HiddenStateStrategy(runtime, reason))


class HiddenStateStrategy(StackStrategy):
    """Hidden mode for a plain MHA/GQA pool, if everything it needs is there; else KV mode."""

    def __init__(self, runtime: Runtime, reason: str | None) -> None:
        self._runtime = runtime
        self._reason = reason

    def matches(self, kvcache: Any, components: Any) -> bool:
        if type(kvcache) is MHATokenToKVPool and components == {ComponentType.FULL}:
            return True
        names = ", ".join(sorted(component.name for component in components))
        self._runtime.use_kv_mode(
            self._reason or f"the KV pool is a {type(kvcache).__name__} ({names})"
        )
        return False

    def build(self, *, kvcache: Any, params: Any, server_args: Any, **kwargs: Any) -> Any:
        assert self._runtime.config is not None
        reason = self._reason or refusal(self._runtime, kvcache, server_args)
        # Every rank gets to each agreement, whatever it found: one rank's refusal is everyone's,
        # and none may enter the probe's forward pass alone.
        (start,) = on_all_ranks(params.tp_cache_group, reason is None)
        (start,) = on_all_ranks(params.pp_cache_group, start)
        parts = partitioning(self._runtime, kvcache) if start else None
        if parts is not None:
            reason = self._does_not_pay(parts)  # the same on every rank
            start = reason is None
        (start,) = on_all_ranks(params.pp_cache_group, start)
        if params.pp_size > 1 and parts is not None:
            parts = parts.without_recompute("first layers are in another pipeline stage")
        probe = projections = plan = exchange = None
        generic = GenericProjector(ProjectionBatch(ForwardMode.EXTEND))
        projector = Projector(generic, PagedPool(kvcache), kvcache.layer_num)
        if start:
            try:
                probe = observe(self._runtime.runner, kvcache)
                compare(probe, projector, kvcache)
            except Exception as error:
                reason = _reason(error)
        codec = agree_on_codec(
            params.tp_cache_group,
            self._runtime.config.codec,
            probe if reason is None else None,
            projector,
            kvcache,
        )
        if probe is not None and codec is not None and parts is not None:
            try:
                exchange = make_exchange(probe, kvcache.page_size)
                plan = plan_pages(self._runtime, probe, codec, kvcache, parts, exchange)
            except Exception as error:
                reason = _reason(error)
        (planned,) = on_all_ranks(params.tp_cache_group, plan is not None)
        if planned and probe is not None:
            projections = LayerProjections(
                self._runtime, probe, projector, kvcache, params.tp_cache_group
            )
            try:
                projections.find()
                projections.check_writing()
            except Exception as error:
                reason = _reason(error)
        (agreed,) = on_all_ranks(params.tp_cache_group, start and reason is None)
        (agreed,) = on_all_ranks(params.pp_cache_group, agreed)
        if agreed and projections is not None:
            projections.settle()
            reason = projections.racing()
        elif reason is None:
            reason = "another tensor-parallel rank or pipeline stage refused"
        # Only now, and on every stage: from here on they must do the same.
        (agreed,) = on_all_ranks(params.pp_cache_group, reason is None)
        if not agreed and reason is None:
            reason = "another pipeline stage refused"
        [host_pages] = smallest(params.pp_cache_group, plan.pages.host if plan else 0)
        if reason is not None or probe is None or projections is None or plan is None:
            self._runtime.use_kv_mode(reason or "no probe")
            return _PlainKvStrategy().build(
                kvcache=kvcache, params=params, server_args=server_args, **kwargs
            )
        projections.measure()
        projections.follow_weights()
        plan = plan._replace(pages=plan.pages._replace(host=host_pages))
        return self._build_hidden(kvcache, params, probe, plan, projector, **kwargs)

    def _does_not_pay(self, parts: Partitioning) -> str | None:
        """Why plain KV pages are better than what the profile chose, or None."""
        config = self._runtime.config
        assert config is not None
        if config.mode == "hidden" or config.partition != "auto" or parts.layers("hidden"):
            return None
        return (
            f"the partition has no hidden states: {parts.describe()} (options 'mode': 'hidden' and "
            "'partition' insist)"
        )

    def _build_hidden(
        self,
        kvcache: Any,
        params: Any,
        probe: Probe,
        plan: PagePlan,
        projector: Projector,
        **kwargs: Any,
    ) -> Any:
        runtime, memory = self._runtime, get_memory()
        assert runtime.config is not None
        codec, layout, methods = plan.codec, plan.layout, plan.parts.methods
        hidden = [probe.layers[layer] for layer in plan.parts.layers("hidden")]
        runtime.use_hidden_mode()
        runtime.partitioning = plan.parts
        metrics.set_codec(runtime.config.codec, codec.name)
        runtime.page_fields = {
            "kind": "hidden",
            "partition": list(methods),
            "codec": codec.name,
            "first_layer": kvcache.start_layer,
        }
        ranks = get_tp_group()
        order = CollectiveOrder(kvcache.device) if ranks.world_size > 1 else None
        if not plan.kv.layers:
            runtime.page_fields["any_ranks"] = True
        elif ranks.world_size > 1:
            # Hidden states are the same on every rank; K and V are those of its own heads.
            runtime.page_fields["tp"] = [ranks.rank_in_group, ranks.world_size]
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
        reservable = self._reservable(params.token_to_kv_pool_allocator)
        capture = self._capture(kvcache, params, pool, hidden, plan, order)
        parks = PoolParking.fits(kvcache, codec.row_bytes)
        restored: dict[str, Callable[[int], RestoredLayer]] = {
            "hidden": lambda i: restored_layer(
                probe.layers[i],
                codec,
                projector,
                PoolParking(kvcache, i, codec.row_bytes) if parks else None,
            ),
            "kv": plan.kv.restored_layer,
            "recompute": lambda _: RestoredLayer("recompute", None),
        }
        pipeline = RestorePipeline(
            pool.kv_buffer,
            layout,
            [restored[method](layer) for layer, method in enumerate(methods)],
            plan.parts.chunk_tokens,
            kvcache.device,
            exchange=plan.exchange,
            order=order,
        )
        loads = LoadQueue(pool.arena, pipeline, plan.parts, plan.recomputer, kvcache.device)
        pool.use(capture, plan.kv, loads)
        logger.info(
            "hcache: restores take %.0f MB of device memory beside one projection of %d tokens",
            ring_bytes(layout, plan.parts.chunk_tokens, plan.parts.layers("hidden")) / 1e6,
            plan.parts.chunk_tokens,
        )
        anchor = PoolEntry(PoolName.KV, pool, kvcache, lambda layer: layer, True)
        group = HostPoolGroup([anchor])
        logger.info(
            "hcache: hidden mode: %s, %d bytes a %d-token page, codec %s, %d host pages, "
            "%d shadows",
            plan.parts.describe(),
            layout.page_bytes,
            params.page_size,
            codec.name,
            *plan.pages,
        )
        controller = HiddenStateController(
            params.token_to_kv_pool_allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            load_cache_event=kwargs["load_cache_event"],
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            storage_backend=kwargs["storage_backend"],
            prefetch_threshold=kwargs["prefetch_threshold"],
            model_name=kwargs["model_name"],
            storage_backend_extra_config=kwargs["storage_backend_extra_config"],
            enable_storage_metrics=kwargs["enable_storage_metrics"],
        )
        check = PageCheck(layout, codec, hidden, plan.kv, projector, kvcache, plan.exchange)
        checks = ServiceChecks(runtime, pool, capture, check, params.tp_cache_group)
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

    def _reservable(self, allocator: Any) -> ReservablePages | None:
        """The device's pages, some of which are to be reserved; None: restores are layer-wise."""
        assert self._runtime.config is not None
        if self._runtime.config.restore == "layerwise":
            return None
        problem = why_not_eager(allocator, resolved(self._runtime.runner.server_args))
        if problem is None:
            return ReservablePages(allocator)
        logger.warning("hcache: restores are layer-wise, not eager: %s", problem)
        return None

    def _capture(
        self,
        kvcache: Any,
        params: Any,
        pool: HiddenStatePool,
        layers: Sequence[AttentionLayer],
        plan: PagePlan,
        order: CollectiveOrder | None,
    ) -> StagedCapture:
        """Start to capture what ``layers`` receive in every forward pass."""
        hooks = plan.hooks
        if hooks is None:
            hooks = HiddenCapture([(layer.module, [layer.projection]) for layer in layers])
        else:
            hooks.watch_only(layer.projection for layer in layers)
        segments = [layer.index for layer in layers]
        capture = StagedCapture(pool.arena, pool.kv_buffer, plan.staging, segments)
        hooks.use(capture, tokens_only=plan.recomputer is not None, order=order)
        invalidate_on_allocation(params.token_to_kv_pool_allocator, hooks)
        self._runtime.on_weights_changed.append(capture.ledger.forget)
        self._runtime.runner.hcache_capture = hooks
        logger.info(
            "hcache: capture: staging of %d tokens, %.0f MB of device memory",
            plan.staging.places,
            plan.staging.device_bytes / 1e6,
        )
        return capture


def _reason(error: Exception) -> str:
    """What ``error`` has against hidden mode; one that we did not mean goes to the log."""
    if isinstance(error, SelfCheckFailed):
        return str(error)
    logger.error("hcache: the self-check broke", exc_info=error)
    return f"the self-check broke: {type(error).__name__}: {error}"


def restored_layer(
    layer: AttentionLayer, codec: Codec, projector: Projector, parking: PoolParking | None
) -> RestoredLayer:
    """How a layer whose hidden states are stored comes back."""

    def fill(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        rows = codec.decode(segments.view(-1, codec.row_bytes))
        projector.project_to_pool(layer, rows, positions, slots)

    return RestoredLayer("hidden", fill, parking)
