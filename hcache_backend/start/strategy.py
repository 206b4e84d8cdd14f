"""Our stack strategy: HiCache asks it for host pool and controller of a plain KV pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import (
    StackStrategy,
    _PlainKvStrategy,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from hcache_backend import metrics
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.config import HCacheConfig
from hcache_backend.format.units import WHOLE, Share
from hcache_backend.host.page_layout import head_groups, share_of_heads
from hcache_backend.plan.costs import Partition
from hcache_backend.plan.restore import CHUNK_TOKENS, Restore
from hcache_backend.projection.generic import ProjectionBatch
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import smallest
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.sglang.arguments import resolved, storage_extra_config
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.hooks import HIDDEN, install
from hcache_backend.sglang.recompute_batch import make_recomputer
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.agreement import Refused, all_or_none
from hcache_backend.start.capture_check import CaptureCheck
from hcache_backend.start.codec_choice import (
    check_lossy,
    choose_codec,
    hidden_as_they_are,
    kv_codec,
    whole_pages,
)
from hcache_backend.start.copy_check import check_copies
from hcache_backend.start.graphs import check_recording
from hcache_backend.start.layer_specs import LayerSpecs
from hcache_backend.start.page_plan import PagePlan, make_exchange
from hcache_backend.start.page_plugin import page_plugin
from hcache_backend.start.partition_choice import layer_methods
from hcache_backend.start.recompute_check import find_recomputer
from hcache_backend.start.refusals import (
    eager_refusal,
    module_refusal,
    own_pages_refusal,
    refusal,
)
from hcache_backend.start.self_check import (
    PROBE_TOKENS,
    attention_modules,
    compare,
    observe,
    probe_tokens,
    run_again,
)
from hcache_backend.start.stack import (
    Stack,
    restored_layers,
    use_own_pages,
)

logger = logging.getLogger("hcache")

_Result = TypeVar("_Result")

_SMALLEST_PAGE = 4  # least bytes of an own page of K and V, in headers


class OwnPagesStrategy(StackStrategy):
    """Own pages for a plain MHA/GQA pool: with hidden states if possible and useful, otherwise of K
    and V. Without own pages SGLang's plain ones.

    ``plain``, ``no_hidden``: known reasons against own pages, against hidden states, or None.
    """

    def __init__(self, runtime: Runtime, plain: str | None, no_hidden: str | None) -> None:
        self._runtime = runtime
        self._plain = plain
        self._no_hidden = no_hidden

    def matches(self, kvcache: Any, components: Any) -> bool:
        if type(kvcache) is MHATokenToKVPool and components == {ComponentType.FULL}:
            return True
        names = ", ".join(sorted(component.name for component in components))
        self._capture_nothing()
        self._runtime.use_plain_pages(
            self._plain or f"the KV pool is a {type(kvcache).__name__} ({names})"
        )
        return False

    def build(self, *, kvcache: Any, params: Any, server_args: Any, **kwargs: Any) -> Any:
        runtime = self._runtime
        try:
            self._step(params, partial(self._refuse, own_pages_refusal, self._plain, kvcache))
            marker = ProjectionBatch(ForwardMode.EXTEND)
            projector = Projector(marker, PagedPool(kvcache), kvcache.layer_num)
            plan, reason = self._plan_or_reason(kvcache, params, projector)
            if plan is None:
                plan = self._kv_plan(kvcache, params)
            use_own_pages(runtime, kvcache, plan, reason)
            if reason is not None:
                plan.recomputer = self._page_recomputer(kvcache, params, plan)
            stack = Stack(runtime, kvcache, params, kwargs).build(plan, projector)
            runtime.say_unused()
            return stack
        except Refused as refused:
            self._capture_nothing()
            runtime.use_plain_pages(str(refused))
            return _PlainKvStrategy().build(
                kvcache=kvcache, params=params, server_args=server_args, **kwargs
            )

    def _step(self, params: Any, work: Callable[[], _Result]) -> _Result:
        return all_or_none(work, params.tp_cache_group, params.pp_cache_group)

    def _refuse(
        self, refusal: Callable[[Runtime, Any], str | None], known: str | None, kvcache: Any
    ) -> None:
        reason = known or refusal(self._runtime, kvcache)
        if reason is not None:
            raise Refused(reason)

    def _plan_or_reason(
        self, kvcache: Any, params: Any, projector: Projector
    ) -> tuple[PagePlan | None, str | None]:
        """The plan of hidden mode, or why it is refused on every rank of every stage; then no hook
        and no memory of it are left."""
        try:
            return self._hidden_plan(kvcache, params, projector), None
        except Refused as refused:
            self._capture_nothing()
            return None, str(refused)

    def _capture_nothing(self) -> None:
        runner = self._runtime.runner
        hooks: HiddenCapture | None = getattr(runner, "hcache_capture", None)
        if hooks is None:
            return
        runner.hcache_capture = None
        # Recorded graphs read the places of a step from this memory in every replay.
        runner.hcache_recorded = hooks.staging
        with metrics.harmless("staging_not_freed", "staging keeps its memory on the device"):
            hooks.remove()

    def _kv_plan(self, kvcache: Any, params: Any) -> PagePlan:
        """Pages of K and V of all layers. Raises Refused on every rank if there is no room, the
        header is too large, or K and V do not come back."""
        chunk = min(CHUNK_TOKENS, int(kvcache.size))
        everything = Partition(0, 0, int(kvcache.layer_num))
        ranks = attention_ranks()
        methods = Restore(None, None, everything, ranks.world_size, chunk, recomputable=0)
        of_heads = share_of_heads(ranks.rank_in_group, ranks.world_size)
        groups = self._head_groups(methods, of_heads)
        codec = self._step(
            params, lambda: kv_codec(self._runtime, kvcache, of_heads, groups, params.pp_size)
        )

        def make(of_kv: str) -> PagePlan:
            plugin = page_plugin(self._config) if of_kv != "none" else None
            share = of_heads if plugin is None else WHOLE
            groups = self._head_groups(methods, share)
            plan = PagePlan(kvcache, methods, share, groups, kv_codec=of_kv, plugin=plugin)
            header, page = plan.layout.header_bytes, plan.layout.page_bytes
            if header * _SMALLEST_PAGE > page:
                raise Refused(
                    f"of the {page} bytes of a page of {kvcache.page_size} tokens (--page-size) "
                    f"its header would take {header}"
                )
            return plan

        runner = self._runtime.runner
        size = int(kvcache.page_size)
        tokens = -(-PROBE_TOKENS // size) * size
        plan = self._tried(params, make, codec, lambda: run_again(runner, [tokens])[0])
        [host_pages] = smallest(params.pp_cache_group, plan.pages.host)
        plan.pages = plan.pages._replace(host=host_pages)
        return plan

    def _page_recomputer(self, kvcache: Any, params: Any, plan: PagePlan) -> Recomputer | None:
        """Recomputer of whole pages of K and V while others are read; None: all are read."""
        runtime, runner = self._runtime, self._runtime.runner
        assert runtime.config is not None
        runtime.recomputation = None
        args = resolved(runner.server_args)
        if plan.kv.by_header:
            runtime.recomputation = f"none: codec {plan.kv.codec!r} divides each page itself"
            return None
        if runtime.config.restore == "layerwise" or eager_refusal(
            args, kvcache.device, hidden=False
        ):
            return None  # on every rank of every stage
        try:
            self._step(params, partial(self._refuse, module_refusal, None, kvcache))
            modules = self._step(params, lambda: attention_modules(runner.model, kvcache.layer_num))
            probe = self._step(params, lambda: observe(runner, modules))
        except Refused as refused:
            runtime.recomputation = f"none: {refused}"
            return None
        find = partial(find_recomputer, runtime, probe, kvcache, plan.methods, whole=True)
        return self._step(params, find)

    def _tried(
        self,
        params: Any,
        make: Callable[[str], PagePlan],
        codec: str,
        written: Callable[[], torch.Tensor],
    ) -> PagePlan:
        """A plan with room, from which K and V come back: by ``codec``, otherwise as they are.

        ``make`` makes the plan with a codec of K and V. ``written`` has the model write them, if it
        has not, and returns their slots, int64 ``[n]``. Raises Refused on every rank.
        """
        try:
            plan = self._step(params, lambda: _copying(make(codec)))
            if not plan.kv.lossless:
                slots = self._step(params, written)
                pages = whole_pages(slots, plan.layout.page_size)
                change, plugin = 0.0, plan.plugin
                if plugin is not None:
                    change, group = plugin.allowed_change, params.tp_cache_group
                    plan.layout = self._step(
                        params, lambda: _valid(plugin.settle, plan.kv, plan.layout, pages, group)
                    )
                    if plugin.wants_model:
                        self._look_at_model(params, plan, slots)
                check = partial(check_lossy, plan.kv, plan.layout, pages, change)
                self._step(params, check)
        except Refused as refused:
            if codec == "none":
                raise
            logger.warning(
                "hcache: codec %r is not used, K and V are stored as they are (codec 'none'): %s",
                codec,
                refused,
            )
            plan = self._step(params, lambda: _copying(make("none")))
        self._step(params, plan.find_room)
        return plan

    def _look_at_model(self, params: Any, plan: PagePlan, slots: torch.Tensor) -> None:
        """Let the plan's plug-in look at the model, in which K and V of the self-check's tokens are
        in ``slots`` (int64 ``[n]``)."""
        runner, plugin = self._runtime.runner, plan.plugin
        assert plugin is not None

        def observer() -> Recomputer:
            missing = install(HIDDEN)
            if missing is not None:
                raise Refused(missing)
            recomputer = make_recomputer(runner, plan.kvcache, plan.methods.chunk_tokens)
            ids = probe_tokens(runner.model_config.vocab_size, len(slots))
            _valid(plugin.try_model, recomputer, ids, slots)
            return recomputer

        try:
            # SGLang's state of a batch (of LoRA adapters, say) would be that of another one.
            self._step(params, partial(self._refuse, refusal, None, plan.kvcache))
            plan.observer = self._step(params, observer)
        except Refused as refused:
            logger.warning("hcache: all pages have one layout: %s", refused)

    @property
    def _config(self) -> HCacheConfig:
        config = self._runtime.config
        assert config is not None
        return config

    def _hidden_plan(self, kvcache: Any, params: Any, projector: Projector) -> PagePlan:
        """Everything that hidden mode needs, proven on every rank of every stage. K and V of the
        probe stay in the pool to the last check. Raises Refused on every rank, at the same step."""
        runtime, runner = self._runtime, self._runtime.runner
        ranks, stages = params.tp_cache_group, params.pp_cache_group

        step = partial(self._step, params)
        step(partial(self._refuse, refusal, self._no_hidden, kvcache))
        methods = step(lambda: self._choose_methods(kvcache))
        if params.pp_size > 1:  # the first layers are in another stage
            methods = methods.recomputing_first(0)
        modules = step(lambda: attention_modules(runner.model, kvcache.layer_num))
        probe = step(lambda: observe(runner, modules))
        step(lambda: probe.refuse_dependence([f"{layer.name}." for layer in probe.layers]))
        step(lambda: compare(probe, projector))
        codec = step(lambda: choose_codec(ranks, runtime, probe, projector))
        exchange = step(lambda: make_exchange(probe, kvcache.page_size))
        recomputer = None
        if methods.recomputable:
            find = partial(find_recomputer, runtime, probe, kvcache, methods, whole=False)
            recomputer = step(find)
        methods = methods.recomputing_first(recomputer.layers if recomputer else 0)
        hooks = step(lambda: check_recording(runner, probe.hidden[0]))
        share = Share(exchange.number, exchange.shares) if exchange is not None else WHOLE
        groups = self._head_groups(methods, share)
        of_kv = "none"
        if methods.layers("kv"):
            of_kv = step(lambda: kv_codec(runtime, kvcache, share, groups, params.pp_size))

        def make(of_kv: str) -> PagePlan:
            return PagePlan(
                kvcache,
                methods,
                share,
                groups,
                kv_codec=of_kv,
                runner=runner,
                layers=probe.layers,
                codec=codec,
                recomputer=recomputer,
                exchange=exchange,
                hooks=hooks,
            )

        def check_capture(plan: PagePlan) -> None:
            check = step(lambda: CaptureCheck(plan, ranks))
            pipeline = step(lambda: check.make_pipeline(restored_layers(kvcache, plan, projector)))
            for graphs, by_layer in ((False, True), (False, False), (True, False)):
                step(partial(check.save, runner, graphs=graphs, by_layer=by_layer))
                step(lambda: check.restore(pipeline, projector))

        plan = self._tried(params, make, of_kv, lambda: probe.slots)
        specs = LayerSpecs(runtime, probe, projector, ranks)
        step(specs.find)
        specs.measure()
        step(specs.check_writing)
        step(specs.settle)
        try:
            check_capture(plan)
        except Refused as refused:
            if codec.is_view:
                raise
            # The next plan reuses its hooks and its staging.
            hooks = plan.capture_hooks
            codec = hidden_as_they_are(codec.name, codec.hidden_size, codec.dtype, refused)
            plan = self._tried(params, make, of_kv, lambda: probe.slots)
            check_capture(plan)
        [host_pages] = smallest(stages, plan.pages.host)
        plan.pages = plan.pages._replace(host=host_pages)

        specs.follow_weights()
        return plan

    def _head_groups(self, methods: Restore, share: Share) -> int:
        if not methods.layers("kv"):
            return share.of
        extra = storage_extra_config(resolved(self._runtime.runner.server_args))
        return head_groups(extra.get("tp_lcm_size"), share, attention_ranks().world_size)

    def _choose_methods(self, kvcache: Any) -> Restore:
        config, methods = self._runtime.config, layer_methods(self._runtime, kvcache)
        assert config is not None
        chosen = config.mode == "auto" and config.partition == "auto"
        if not methods.layers("hidden") and (chosen or not methods.layers("recompute")):
            raise Refused(
                f"the partition has no hidden states: {methods.describe()} (override with mode: "
                "hidden or partition)"
            )
        return methods


def _valid(ask: Callable[..., _Result], *arguments: Any) -> _Result:
    """``ask`` a plug-in; a ValueError becomes Refused."""
    try:
        return ask(*arguments)
    except ValueError as error:
        raise Refused(str(error)) from None


def _copying(plan: PagePlan) -> PagePlan:
    """``plan``; raises Refused if K and V do not come back from it."""
    if plan.kv.layers:
        check_copies(plan)
    return plan
