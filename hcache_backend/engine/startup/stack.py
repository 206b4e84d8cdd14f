"""HiCache's stack over own pages: host pool, capture, restores and controller, put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackBuildResult
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_memory

from hcache_backend.arena import Ids
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.engine.arguments import kv_fields, resolved
from hcache_backend.engine.capture_hooks import invalidate_on_allocation
from hcache_backend.engine.controller import OwnPagesController
from hcache_backend.engine.eager_loads import EagerLoads
from hcache_backend.engine.hidden_controller import HiddenStateController
from hcache_backend.engine.host_pool import HiddenStatePool, OwnPagesPool
from hcache_backend.engine.kv_pages.controller import KVController
from hcache_backend.engine.kv_pages.node_pairs import NodePairs
from hcache_backend.engine.loads import LoadQueue
from hcache_backend.engine.ranks import attention_ranks
from hcache_backend.engine.recompute.rows import RecomputedRows
from hcache_backend.engine.recompute.slices import SliceBudget
from hcache_backend.engine.reservable_pages import ReservablePages
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.service_check import KVChecks, ServiceChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.engine.startup.attach import warn_of_small_host_pool
from hcache_backend.engine.startup.codec_choice import asked_codec
from hcache_backend.engine.startup.hit_machine import judge_other_hits
from hcache_backend.engine.startup.page_plan import (
    HiddenPagePlan,
    PagePlan,
    kv_bytes_per_token,
)
from hcache_backend.engine.startup.refusals import allocator_refusal, eager_refusal
from hcache_backend.krul.paired_layout import PairedLayout
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.layers import PoolParking, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.restore.ring import ring_bytes

logger = logging.getLogger("hcache")


@dataclass
class Stack:
    """Puts the stack of a server together. It is used once.

    Args:
        params: What SGLang gives a stack strategy...
        arguments: ...and what it gives by name.
    """

    runtime: Runtime
    kvcache: Any
    params: Any
    arguments: Mapping[str, Any]

    def build_kv(self, plan: PagePlan, recomputer: Recomputer | None) -> StackBuildResult:
        """What HiCache works with where own pages hold K and V, by the plan of all ranks.

        ``recomputer``: for front pages of hits, while the others are read.
        """
        pool = OwnPagesPool(**self._pool_arguments(plan))
        restored = [plan.kv.restored_layer(layer) for layer in plan.kv.layers]
        pipeline = RestorePipeline(
            pool.kv_buffer, plan.layout, restored, plan.methods.chunk_tokens, self.kvcache.device
        )
        loads = LoadQueue(pool.arena, pipeline, plan.methods, recomputer, self.kvcache.device)
        params = self.params
        reservable = _reservable(self.runtime, params.token_to_kv_pool_allocator, hidden=False)
        result = self._joined(KVController, pool, pipeline, loads, reservable)
        checks = KVChecks(self.runtime, pool, plan.kv, params.tp_cache_group)
        pool.on_freed.append(checks.freed)
        pool.on_backed_up.append(checks.transferred)
        pool.on_loaded.append(checks.transferred)
        stages, ranks = self._stages(plan, lambda pages: True), attention_ranks()
        node_pairs, layout = None, plan.layout
        if plan.probe is not None and plan.choice is not None and isinstance(layout, PairedLayout):
            every = params.tp_cache_group, ranks.world_size
            node_pairs = NodePairs(plan.probe, plan.choice, layout, *every)
        result.cache_controller.check_by(checks, stages, node_pairs)
        return result

    def build_hidden(self, plan: HiddenPagePlan, projector: Projector) -> StackBuildResult:
        """What HiCache works with in hidden mode, by the plan that every rank agreed on."""
        runtime, kvcache, layout = self.runtime, self.kvcache, plan.layout
        pool = HiddenStatePool(
            stamp=lambda page: layout.stamp(page, runtime.page_namespace(), runtime.writer),
            keeps_unfit=plan.recomputer is not None,
            **self._pool_arguments(plan),
        )
        order = CollectiveOrder(kvcache.device) if attention_ranks().world_size > 1 else None
        allocator = self.params.token_to_kv_pool_allocator
        # Before capture wraps the allocator: what is handed out of a reservation is allocated, too.
        reservable = _reservable(runtime, allocator, hidden=True)
        capture = _start_capture(runtime, allocator, pool, plan, order)
        pipeline = RestorePipeline(
            pool.kv_buffer,
            layout,
            restored_layers(kvcache, plan, projector),
            plan.methods.chunk_tokens,
            kvcache.device,
            exchange=plan.exchange,
            order=order,
        )
        loads = LoadQueue(pool.arena, pipeline, plan.methods, plan.recomputer, kvcache.device)
        loads.on_failed.append(runtime.cannot_restore)
        loads.slowdown = runtime.slowdown
        pool.follow(capture)
        rows = partial(RecomputedRows, capture, plan.staging, plan.capture_hooks)
        result = self._joined(HiddenStateController, pool, pipeline, loads, reservable, rows)
        checks = ServiceChecks(
            runtime,
            pool,
            plan.hidden_layers,
            plan.codec,
            projector,
            exchange=plan.exchange,
            order=order,
            group=self.params.tp_cache_group,
        )
        pool.on_freed.append(checks.freed)
        pool.on_backed_up.append(checks.backed_up)
        # Not of loads: a restore may recompute first layers whose K and V are stored.
        kv_checks = KVChecks(runtime, pool, plan.kv, self.params.tp_cache_group)
        if plan.kv.layers:
            pool.on_freed.append(kv_checks.freed)
            pool.on_backed_up.append(kv_checks.transferred)
        result.cache_controller.use_hidden_states(
            capture, checks, kv_checks, self._stages(plan, pool.arena.whole)
        )
        return result

    def _stages(self, plan: PagePlan, whole: Callable[[Ids], bool | None]) -> StagePages:
        runtime = self.runtime
        return StagePages(
            plan.pages.host, whole, lambda: runtime.distrust is None, runtime.lose_trust
        )

    def _pool_arguments(self, plan: PagePlan) -> dict[str, Any]:
        return {
            "device_pool": self.kvcache,
            "page_size": self.params.page_size,
            "layout": get_memory().hicache_mem_layout,
            "page_layout": plan.layout,
            "pages": plan.pages,
            "kv": plan.kv,
            "pin_memory": self.kvcache.device != "cpu",
            "allocator_type": get_allocator_type(),
        }

    def _joined(
        self,
        controller_class: type[OwnPagesController],
        pool: OwnPagesPool,
        pipeline: RestorePipeline,
        loads: LoadQueue,
        reservable: ReservablePages | None,
        new_rows: Callable[[], RecomputedRows] | None = None,
    ) -> StackBuildResult:
        params, memory, config = self.params, get_memory(), self.runtime.config
        assert config is not None
        allocator = params.token_to_kv_pool_allocator
        pool.use(loads)
        device = int(self.kvcache.size), kv_bytes_per_token(self.kvcache)
        warn_of_small_host_pool(pool.size, device[0], pool.size_per_token, device[1])
        # Known before the controller attaches L3:
        self.runtime.eager = reservable is not None
        self.runtime.on_other_l3.append(partial(judge_other_hits, self.runtime))
        entry = PoolEntry(PoolName.KV, pool, self.kvcache, lambda layer: layer, True)
        group = HostPoolGroup([entry])
        controller = controller_class(
            allocator,
            group,
            params.page_size,
            params.tp_cache_group,
            attn_cp_group=params.attn_cp_cache_group,
            attn_tp_group=params.attn_tp_cache_group,
            pp_group=params.pp_cache_group,
            write_policy=memory.hicache_write_policy,
            io_backend=memory.hicache_io_backend,
            **{name: self.arguments[name] for name in _CONTROLLER_ARGUMENTS},
        )
        eager = None
        if reservable is not None:
            most = max(1, int(self.kvcache.size // params.page_size * config.restore_share))
            methods = loads.methods
            budget = SliceBudget(
                config.recompute_ms / 1e3,
                methods.chunk_tokens,
                methods.layer,
                known=methods.profile is not None,
            )
            loads.seconds_to_read = self.runtime.seconds_to_read
            loads.seconds_to_compute = self.runtime.seconds_to_compute
            eager = EagerLoads(reservable, pool, pipeline, loads, most, budget, new_rows)
            self.runtime.on_weights_changed.append(eager.give_back)
        controller.use_own_pages(self.runtime, pool, loads, eager)
        return StackBuildResult(
            host_pool_group=group,
            cache_controller=controller,
            component_host_pools={ComponentType.FULL: pool},
            pools_desc="own pages",
        )


_CONTROLLER_ARGUMENTS = (
    "load_cache_event",
    "storage_backend",
    "prefetch_threshold",
    "model_name",
    "storage_backend_extra_config",
    "enable_storage_metrics",
)


def use_hidden_mode(runtime: Runtime, kvcache: Any, plan: HiddenPagePlan) -> None:
    """Say what pages look like: in their namespace, in metrics and in the log."""
    runtime.layer_methods = plan.methods
    codec = plan.codec.name
    if plan.kv.layers and plan.kv.codec != codec:
        codec += f", {plan.kv.codec} of K and V"
    runtime.use_codec(codec, asked_codec(runtime, plan.codec.dtype))
    runtime.use_own_pages({**_page_fields(runtime, kvcache, plan), "codec": plan.codec.name})
    chunk_tokens = plan.methods.chunk_tokens
    logger.info(
        "hcache: hidden mode: %s, %d bytes per %d-token page, codec %s, %d host pages, %d shadows, "
        "%.0f MB of device memory for restores",
        plan.methods.describe(),
        plan.layout.page_bytes,
        plan.layout.page_size,
        codec,
        plan.pages.host,
        plan.pages.shadows,
        ring_bytes(plan.layout, chunk_tokens, plan.methods.layers("hidden")) / 1e6,
    )
    if not plan.codec.is_view and plan.recomputer is None:
        runtime.unused["pages that the codec cannot encode"] = "they cannot be recomputed"


def use_kv_mode(runtime: Runtime, kvcache: Any, plan: PagePlan, reason: str) -> None:
    """Say what pages look like, and the ``reason`` why they hold no hidden states."""
    runtime.layer_methods = plan.methods
    runtime.use_codec(plan.kv.codec, asked_codec(runtime, kvcache.k_buffer[0].dtype))
    runtime.use_own_pages(_page_fields(runtime, kvcache, plan), reason)
    logger.info(
        "hcache: own pages: %s, %d bytes per %d-token page, codec %s, %d host pages",
        plan.methods.describe(),
        plan.layout.page_bytes,
        plan.layout.page_size,
        plan.kv.codec,
        plan.pages.host,
    )


def _page_fields(runtime: Runtime, kvcache: Any, plan: PagePlan) -> dict[str, object]:
    """What the namespace of own pages holds besides the weights."""
    fields: dict[str, object] = {
        "kind": "own",
        "partition": list(plan.methods.methods),
        "first_layer": kvcache.start_layer,
        "layout": plan.layout.form,
    }
    if plan.kv.layers:
        fields |= kv_fields(runtime.runner)
    ranks = attention_ranks()
    if not plan.kv.layers or plan.layout.share.of == ranks.world_size:
        fields["any_ranks"] = True
    else:  # K and V are those of a rank's own heads, and these are no share
        fields["tp"] = [ranks.rank_in_group, ranks.world_size]
    return fields


def _reservable(runtime: Runtime, allocator: Any, *, hidden: bool) -> ReservablePages | None:
    """The device's pages, some of which are to be reserved; None: restores are layer-wise."""
    assert runtime.config is not None
    args = resolved(runtime.runner.server_args)
    if runtime.config.restore == "layerwise":
        reason: str | None = "option 'restore'"
    else:
        reason = eager_refusal(args, allocator.device, hidden=hidden) or allocator_refusal(
            allocator
        )
    if reason is None:
        return ReservablePages(allocator)
    runtime.unused["restores while L3 is read"] = reason
    return None


def _start_capture(
    runtime: Runtime,
    allocator: Any,
    pool: HiddenStatePool,
    plan: HiddenPagePlan,
    order: CollectiveOrder | None,
) -> StagedCapture:
    """Capture what the layers that are stored as hidden states receive in every forward pass."""
    hooks = plan.capture_hooks
    segments = [layer.index for layer in plan.hidden_layers]
    capture = StagedCapture(pool.arena, pool.kv_buffer, plan.staging, segments, plan.codec)
    hooks.use(capture, tokens_only=plan.recomputer is not None, order=order)
    invalidate_on_allocation(allocator, hooks)
    runtime.on_weights_changed.append(capture.ledger.forget)
    logger.debug(
        "hcache: capture: staging of %d tokens, %.0f MB of device memory",
        plan.staging.places,
        Staging.bytes_for(plan.staging.layers, plan.staging.row_bytes, plan.staging.places) / 1e6,
    )
    return capture


def restored_layers(
    kvcache: Any, plan: HiddenPagePlan, projector: Projector
) -> list[RestoredLayer]:
    """How each layer comes back."""
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
