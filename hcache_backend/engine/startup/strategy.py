"""Our stack strategy: HiCache asks it for host pool and controller of a plain KV pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackStrategy,
    _PlainKvStrategy,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.ranks import smallest
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.agreement import Refused, all_or_none
from hcache_backend.engine.startup.codec_choice import choose_codec
from hcache_backend.engine.startup.graphs import check_recording
from hcache_backend.engine.startup.layer_specs import LayerSpecs
from hcache_backend.engine.startup.page_plan import PagePlan, make_exchange
from hcache_backend.engine.startup.partition_choice import layer_methods
from hcache_backend.engine.startup.recompute_check import find_recomputer
from hcache_backend.engine.startup.refusals import refusal
from hcache_backend.engine.startup.self_check import attention_modules, compare, observe
from hcache_backend.engine.startup.stack import build_stack
from hcache_backend.projection.generic import ProjectionBatch
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.projection.projector import Projector

_Result = TypeVar("_Result")


class HiddenStateStrategy(StackStrategy):
    """Hidden mode for a plain MHA/GQA pool, if everything it needs is there; else KV mode.

    Args:
        runtime: State of this process.
        reason: Why hidden mode is already out of the question, or None.
    """

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
        marker = ProjectionBatch(ForwardMode.EXTEND)
        projector = Projector(marker, PagedPool(kvcache), kvcache.layer_num)
        try:
            plan = self._plan(kvcache, params, projector)
        except Refused as refused:  # on every rank of every stage
            self._runtime.use_kv_mode(str(refused))
            return _PlainKvStrategy().build(
                kvcache=kvcache, params=params, server_args=server_args, **kwargs
            )
        return build_stack(self._runtime, kvcache, params, plan, projector, **kwargs)

    def _plan(self, kvcache: Any, params: Any, projector: Projector) -> PagePlan:
        """Everything that hidden mode needs, proven on every rank of every stage.

        The K and V that the model writes in the probe stay in the pool to the last check.

        Raises:
            Refused: On every rank, at the same step; see :func:`all_or_none`.
        """
        runtime, runner = self._runtime, self._runtime.runner
        config, ranks, stages = runtime.config, params.tp_cache_group, params.pp_cache_group
        assert config is not None

        def step(work: Callable[[], _Result]) -> _Result:
            return all_or_none(work, ranks, stages)

        step(lambda: self._check_server(kvcache))
        methods = step(lambda: self._choose_methods(kvcache))
        if params.pp_size > 1:  # the first layers are in another stage
            methods = methods.without_recompute()
        modules = step(lambda: attention_modules(runner.model, kvcache.layer_num))
        probe = step(lambda: observe(runner, modules))
        step(lambda: compare(probe, projector))
        codec = step(lambda: choose_codec(ranks, config.codec, probe, projector))
        exchange = step(lambda: make_exchange(probe, kvcache.page_size))
        recomputer = step(lambda: find_recomputer(runner, probe, kvcache, methods))
        if recomputer is None:
            methods = methods.without_recompute()
        hooks = step(lambda: check_recording(runner, codec))
        plan = step(
            lambda: PagePlan(kvcache, probe.layers, methods, recomputer, codec, exchange, hooks)
        )
        step(lambda: plan.find_room(runner))
        specs = LayerSpecs(runtime, probe, projector, ranks)
        step(specs.find)
        step(specs.check_writing)
        step(specs.settle)
        [host_pages] = smallest(stages, plan.pages.host)
        plan.pages = plan.pages._replace(host=host_pages)

        specs.measure()
        specs.follow_weights()
        return plan

    def _check_server(self, kvcache: Any) -> None:
        reason = self._reason or refusal(self._runtime, kvcache)
        if reason is not None:
            raise Refused(reason)

    def _choose_methods(self, kvcache: Any) -> LayerMethods:
        config, methods = self._runtime.config, layer_methods(self._runtime, kvcache)
        assert config is not None
        if config.mode == "auto" and config.partition == "auto" and not methods.layers("hidden"):
            raise Refused(
                f"the partition has no hidden states: {methods.describe()} (options 'mode': "
                "'hidden' and 'partition' insist)"
            )
        return methods
