"""HiCache's stack over own pages: the plan of the pages, checked; then host pool, capture,
restores and controller, put together. HiCache asks :class:`OwnPagesStrategy` for it.

SGLang records CUDA graphs before that, and a replay runs no Python hook. So staging and hooks exist
before (:func:`record_copies`). Copies leave the step's number beside each row, which shows a replay
that recorded no copy of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import StackStrategy
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.common import get_allocator_type
from sglang.srt.runtime_context import get_memory

from hcache_backend import metrics
from hcache_backend.capture.hooks import HiddenCapture, RecomputedRows
from hcache_backend.capture.staging import Capture, StagedCapture, Staging
from hcache_backend.checks.round_trip import CaptureCheck, check_copies, check_lossy, whole_pages
from hcache_backend.checks.self_check import (
    CHECK_TOKENS,
    LayerSpecs,
    ObservedPass,
    Recomputed,
    check_recompute,
    check_tokens,
    observe,
)
from hcache_backend.checks.service import KVChecks, ServiceChecks
from hcache_backend.config import HCacheConfig
from hcache_backend.format.units import WHOLE, Shard
from hcache_backend.host.layout import Layout
from hcache_backend.host.loads import LoadQueue
from hcache_backend.host.node_backups import CapturedBackups, NodeBackups
from hcache_backend.host.page_headers import PageHeaders
from hcache_backend.host.segments import KVSegments, head_groups, shard_of_heads
from hcache_backend.host.stages import StagePages
from hcache_backend.metrics import logger
from hcache_backend.plan.restore import CHUNK_TOKENS, Partition, Restore
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.prefetch.slices import SliceBudget
from hcache_backend.projection.paged_pool import PagedPool, full_attention, holds_latents, planes_of
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import Refused, all_or_none, smallest
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.sglang import hooks, passes
from hcache_backend.sglang.allocator import ReservablePages
from hcache_backend.sglang.arguments import (
    attention_groups,
    drafted_tokens,
    packed_drafts,
    storage_extra_config,
    warn_of_small_host_pool,
)
from hcache_backend.sglang.controller import OwnPagesController, Stack
from hcache_backend.sglang.groups import attention_ranks, new_stage_group
from hcache_backend.sglang.hook_registry import Hook, install
from hcache_backend.sglang.host_pool import HostPages, OwnPagesPool
from hcache_backend.sglang.passes import make_recomputer, run_again
from hcache_backend.sglang.runtime import Runtime, current
from hcache_backend.sglang.weights import LoadedWeights
from hcache_backend.start import page_plan
from hcache_backend.start.capabilities import (
    EAGER,
    HIDDEN,
    OWN_PAGES,
    RECOMPUTATION,
    Server,
    graphs_are_off,
    log_unused,
    refusal,
    refuse,
    set_metrics,
)
from hcache_backend.start.machine import judge_hits, layer_methods
from hcache_backend.start.page_plan import HiddenPlan, PagePlan, find_room
from hcache_backend.start.sides import share_of_size, strategy_of, with_our_pool

if TYPE_CHECKING:
    from hcache_backend.start.page_plan import Krul

_P = ParamSpec("_P")
_Result = TypeVar("_Result")

_RESERVED = 0.5  # largest share of the device's pages that hits being read may reserve
_STAGED_PASSES = 16  # at least as many as are under way between pipeline stages


class OwnPagesStrategy(StackStrategy):
    """Own pages for a plain MHA/GQA pool: with hidden states if possible and useful, otherwise of K
    and V; for a plain MLA pool of latents; of hybrid models for the full-attention layers.
    ``plain``, ``no_hidden``: known reasons against own pages, against hidden states, or None."""

    def __init__(self, runtime: Runtime, plain: str | None, no_hidden: str | None) -> None:
        self._runtime, self._plain, self._no_hidden = runtime, plain, no_hidden

    def matches(self, kvcache: Any, components: Any) -> bool:
        """True if a KV pool of this class can have own pages; otherwise pages are plain."""
        kind, full = type(kvcache), type(full_attention(kvcache))
        supported = full is MHATokenToKVPool or kind in (MLATokenToKVPool, DSATokenToKVPool)
        if supported and strategy_of(kvcache).matches(kvcache, components):
            return True
        names = ", ".join(sorted(component.name for component in components))
        why = self._plain or f"the KV pool is a {type(kvcache).__name__} ({names})"
        self._keep_plain(why, expected=True)
        return False

    def build(self, *, kvcache: Any, params: Any, **kwargs: Any) -> Any:
        """HiCache's stack with own pages; if anything refuses these, SGLang's stack as ever."""
        start = Start(self._runtime, kvcache, params)
        arguments = {"kvcache": kvcache, "params": params, **kwargs}
        try:
            start.step(refuse, OWN_PAGES, start.server, self._plain)
            plan = start.plan(self._no_hidden)
            with build_stack(self._runtime, start.server, params, plan, start.projector):
                stack = strategy_of(kvcache, own_pages=True).build(**arguments)
            if type(kvcache) is DSATokenToKVPool:
                stack.pool_declarations = ()  # our pages hold the indexer's keys
            log_unused(self._runtime)
            return stack
        except Refused as refused:
            expected = self._plain is None and refusal(OWN_PAGES, start.server) is not None
            self._keep_plain(str(refused), expected=expected or start.server.asks("mode", "plain"))
            return strategy_of(kvcache).build(**arguments)

    def _keep_plain(self, reason: str, *, expected: bool) -> None:
        capture_nothing(self._runtime)
        self._runtime.pages.use_plain_pages(reason, expected=expected)
        set_metrics(self._runtime)


class Start:
    """Decides what the pages of a server are, and checks it, on every rank of every stage. Each
    :meth:`step` succeeds on all, or raises Refused on all. Nothing is allocated or served yet."""

    smallest_page = 4  # of K and V, in headers

    def __init__(self, runtime: Runtime, kvcache: Any, params: Any) -> None:
        assert runtime.options.config is not None
        self._runtime, self._config, self._runner = runtime, runtime.options.config, runtime.runner
        self._kvcache, self._params = full_attention(kvcache), params  # of a hybrid model one pool
        self._host_share = share_of_size(kvcache, params)  # of --hicache-size, for own pages
        self.server = Server(runtime.runner, self._config, self._kvcache)
        self.projector = Projector(PagedPool(self._kvcache), self._kvcache.layer_num)

    def step(self, work: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        """The result of ``work`` if it succeeds on all ranks; otherwise raises Refused on all."""
        groups = self._params.tp_cache_group, self._params.pp_cache_group
        return all_or_none(groups, lambda: work(*args, **kwargs))

    def plan(self, no_hidden: str | None) -> PagePlan:
        """The plan of hidden mode, otherwise of pages of K and V; ``no_hidden``: a known reason for
        these. Raises Refused on every rank if neither is possible."""
        reason: str | None = None
        try:
            plan: PagePlan = self._hidden_plan(no_hidden)
        except Refused as refused:
            reason = str(refused)
        if reason is not None:  # then no hook and no memory of hidden states are left
            capture_nothing(self._runtime)
            plan = self._kv_plan()
        [host_pages] = smallest(self._params.pp_cache_group, plan.host.host)
        plan = replace(plan, host=plan.host._replace(host=host_pages))
        use_own_pages(self._runtime, self._config, plan, reason)
        if reason is not None:
            plan = replace(plan, recomputer=self._page_recomputer(plan.layout))
        return plan

    def _hidden_plan(self, no_hidden: str | None) -> HiddenPlan:
        """The plan of pages with hidden states: each step checks one part of it. Raises Refused on
        every rank, also for ``no_hidden``, a known reason."""
        step, runtime, kvcache = self.step, self._runtime, self._kvcache
        ranks, stages, projector = self._params.tp_cache_group, self._params.pp_size, self.projector
        step(refuse, HIDDEN, self.server, no_hidden)
        methods = step(self._choose_methods)
        if stages > 1:  # the first layers are in another stage
            methods = methods.recomputing_first(0)
        observed = self._observe()
        step(observed.refuse_dependence, [f"{layer.name}." for layer in observed.layers])
        step(observed.compare, projector)
        codec = step(page_plan.choose_codec, ranks, self._config, observed, projector)
        exchange = step(
            page_plan.make_exchange, "hidden states", observed.hidden, kvcache.page_size
        )
        recomputer = None
        if methods.recomputable:
            recomputer = step(self._find_recomputer, observed, methods, all_layers_needed=False)
        methods = methods.recomputing_first(recomputer.layers if recomputer else 0)
        recorded = step(check_recording, runtime, observed.hidden[0])
        shard, kv_codec = _shard_of(exchange), "none"
        groups = self._head_groups(methods, shard)
        if methods.layers("kv"):
            kv_codec = step(page_plan.kv_codec, self.server, shard, groups, stages)
        plain = KVSegments(kvcache, methods.layers("kv"), kvcache.page_size, shard, groups)
        kv = KVSegments(kvcache, plain.layers, kvcache.page_size, shard, groups, kv_codec)
        layout = Layout(kvcache, methods, shard, kv, exchange, codec, observed.layers)
        layout = self._checked_layout(layout, replace(layout, kv=plain), lambda: observed.slots)
        host = step(find_room, layout)
        limit = int(self._runner.model_config.context_len)
        specs = LayerSpecs(runtime.weights, observed, projector, ranks, limit)
        runtime.pages.projection = specs.projection
        step(specs.find)
        specs.measure()
        step(specs.check_writing)
        step(specs.use_agreed)
        plan = step(self._with_hooks, layout, host, recomputer, recorded)
        self._check_capture(plan)
        specs.follow_weights()
        return plan

    def _with_hooks(
        self, layout: Layout, host: HostPages, recomputer: Recomputer | None, hooks: HiddenCapture
    ) -> HiddenPlan:
        """The plan of checked pages, with all that capture and projections need. ``hooks``: those
        that CUDA graphs were recorded with; without staging new ones are made. From now on the
        model has them, and only projections are watched."""
        codec, layers, device = layout.codec, layout.hidden_layers, layout.kvcache.device
        assert codec is not None
        staging = hooks.staging
        if staging is None:
            width, dtype = codec.hidden_size, codec.dtype
            staging = page_plan.take_staging(self._runner, len(layers), width, dtype, device)
        memory = page_plan.projection_memory(layout, codec, self.projector)
        if hooks.staging is None:
            hooks = HiddenCapture([(layer.module, ()) for layer in layers])
        hooks.watch_only(layer.projection for layer in layers)
        hooks.staging, self._runtime.forwards.capture = staging, hooks
        return HiddenPlan(
            layout=layout,
            host=host,
            recomputer=recomputer,
            staging=staging,
            hooks=hooks,
            projection=memory,
        )

    def _kv_plan(self) -> PagePlan:
        """Pages of K and V of all layers; raises Refused on every rank."""
        kvcache, ranks = self._kvcache, attention_ranks()
        chunk = min(CHUNK_TOKENS, int(kvcache.size))
        all_kv = Partition(0, 0, int(kvcache.layer_num))
        methods = Restore(None, None, all_kv, ranks.world_size, chunk, recomputable=0)
        shard, exchange = shard_of_heads(ranks.rank_in_group, ranks.world_size), None
        if holds_latents(kvcache):
            exchange = self._latent_exchange(ranks.world_size)
            shard = _shard_of(exchange)
        groups = self._head_groups(methods, shard)
        codec = self.step(page_plan.kv_codec, self.server, shard, groups, self._params.pp_size)
        plugin = page_plan.page_plugin(self._config) if codec != "none" else None
        layers, size, drafts = methods.layers("kv"), kvcache.page_size, packed_drafts(self._runner)
        segments = partial(KVSegments, kvcache, layers, size, shard, groups, drafts=drafts)
        layout = plain = Layout(kvcache, methods, shard, segments(), exchange)
        if plugin is not None:
            paired = plugin.segments(kvcache, layers, size, self._head_groups(methods, WHOLE))
            layout = replace(plain, shard=WHOLE, kv=paired)
        elif codec != "none":
            layout = replace(plain, kv=segments(codec))
        layout = self._checked_layout(layout, plain, self._write_check_tokens, plugin)
        plugin = plugin if layout.kv.by_header else None
        return PagePlan(layout, self.step(find_room, layout, self._host_share), plugin)

    def _write_check_tokens(self) -> torch.Tensor:
        """Have the model write K and V of the self-check's tokens to whole pages; returns their
        slots, int64 ``[n]``."""
        size = self._kvcache.page_size
        return run_again(self._runner, [-(-CHECK_TOKENS // size) * size])[0]

    def _latent_exchange(self, ranks: int) -> Exchange | None:
        """The exchange of latents, of which each of ``ranks`` keeps a part; None: all keep whole
        pages, also with data-parallel attention, whose groups run the model at their own times."""
        kvcache = self._kvcache
        if ranks == 1 or attention_groups(self.server.args) > 1:
            return None
        self.step(refuse, OWN_PAGES, self.server, install(hooks.EXCHANGE))
        slots = self.step(self._write_check_tokens)
        rows = [planes_of(kvcache, layer)[0][slots] for layer in range(kvcache.layer_num)]
        return self.step(page_plan.make_exchange, "latents", rows, int(kvcache.page_size))

    def _checked_layout(
        self,
        layout: Layout,
        plain: Layout,
        write_tokens: Callable[[], torch.Tensor],
        plugin: Krul | None = None,
    ) -> Layout:
        """Check that K and V come back by ``layout``; if its codec fails, by ``plain``, the same
        without a codec. Returns the checked layout; raises Refused on every rank. ``write_tokens``
        has the model write K and V of tokens, and returns their slots, int64 ``[n]``. ``plugin``
        chooses the layers that share a segment in ``layout``."""
        try:
            self.step(self._check_copies, layout)
            if layout.kv.lossless:
                return layout
            slots, most_change = self.step(write_tokens), 0.0
            pages = whole_pages(slots, layout.page.page_size)
            if plugin is not None:
                most_change, ranks = plugin.allowed_change, self._params.tp_cache_group
                chosen = self.step(plugin.choose_pairs, layout.kv, layout.page, pages, ranks)
                layout = replace(layout, chosen=chosen)
                if plugin.wants_model:
                    self._look_at_model(layout, plugin, slots)
            self.step(check_lossy, layout.kv, layout.page, pages, most_change)
        except Refused as refused:
            if layout.kv.codec == "none":
                raise
            why = "K and V are stored as they are (codec 'none')"
            logger.warning("hcache: codec %r is not used, %s: %s", layout.kv.codec, why, refused)
            layout = plain
            self.step(self._check_copies, layout)
        return layout

    def _check_copies(self, layout: Layout) -> None:
        """Raise Refused if K and V do not come back, or a page is hardly more than its header."""
        header, page = layout.page.header_bytes, layout.page.page_bytes
        if layout.codec is None and header * self.smallest_page > page:
            size = f"the {page} bytes of a page of {layout.page.page_size} tokens (--page-size)"
            raise Refused(f"of {size} its header would take {header}")
        for variant in layout.page.variants if layout.kv.layers else ():
            check_copies(variant, layout.kv)

    def _look_at_model(self, layout: Layout, plugin: Krul, slots: torch.Tensor) -> None:
        """Let ``plugin`` run the model to choose pairs; first on self-check tokens in ``slots``."""

        def tried_observer() -> Recomputer:
            refuse(HIDDEN, self.server, install(hooks.HIDDEN))
            recomputer = make_recomputer(self._runner, layout.kvcache, layout.methods.chunk_tokens)
            ids = check_tokens(self._runner.model_config.vocab_size, len(slots))
            plugin.try_model(recomputer, ids, slots)
            return recomputer

        try:
            # SGLang's state of a batch (of LoRA adapters, say) would be that of another one.
            self.step(refuse, HIDDEN, self.server)
            plugin.observer = self.step(tried_observer)
        except Refused as refused:
            logger.warning("hcache: all pages have one layout: %s", refused)

    def _check_capture(self, plan: HiddenPlan) -> None:
        """Try capture and restore of a few pages, also by CUDA graphs; Refused if K or V differ."""
        kvcache, projector, ranks = self._kvcache, self.projector, self._params.tp_cache_group
        order = CollectiveOrder(kvcache.device) if attention_ranks().world_size > 1 else None
        check = self.step(CaptureCheck, plan, projector, order)
        run = partial(passes.prefill_and_decode, self._runner, check.tokens, ranks)
        for graphs, by_layer in ((False, True), (False, False), (True, False)):
            run_pass = partial(run, graphs=graphs)
            self.step(check.capture, run_pass, seen=not graphs, by_layer=by_layer)
            self.step(check.restore, projector)

    def _observe(self) -> ObservedPass:
        """Run the self-check's tokens through the model, and note what its attention modules do."""
        modules = self.step(passes.attention_modules, self._runner.model, self._kvcache.layer_num)
        learn_calls = not holds_latents(self._kvcache)  # nothing is projected to latents
        run = partial(passes.run_prompts, self._runner, [CHECK_TOKENS])
        return self.step(observe, run, modules, learn_calls=learn_calls)

    def _page_recomputer(self, layout: Layout) -> Recomputer | None:
        """What recomputes the first pages of a hit while the others are read from L3. None: all
        pages are read from L3, and ``runtime.options.unused`` has the reason."""
        unused, reason = self._runtime.options.unused, None
        self._runtime.pages.recomputation = None
        unused.pop(RECOMPUTATION, None)
        if layout.kv.by_header:
            reason = f"codec {layout.kv.codec!r} divides each page itself"
        elif refusal(EAGER, replace(self.server, exchanges=layout.exchange is not None)):
            return None  # on every rank of every stage
        try:
            self.step(refuse, RECOMPUTATION, self.server, reason)
            observed = self._observe()
        except Refused as refused:
            unused[RECOMPUTATION] = str(refused)
            return None
        return self.step(self._find_recomputer, observed, layout.methods, all_layers_needed=True)

    def _find_recomputer(
        self, observed: ObservedPass, methods: Restore, *, all_layers_needed: bool
    ) -> Recomputer | None:
        """The recomputer of layers, the same on every tensor-parallel rank; None if there is none.
        All ranks call it; K and V of the observed pass must still be in the pool. The report gets
        the exactness, or the reason for None."""
        runtime, runner, kvcache = self._runtime, self._runner, self._kvcache
        group, layers = attention_ranks().cpu_group, int(kvcache.layer_num)
        substitute = self.server.substitute

        def attention() -> AttentionBackend | None:
            """The substitute for the server's attention backend; None: the server's own is used."""
            refuse(RECOMPUTATION, self.server)
            observed.refuse_dependence()
            refuse(RECOMPUTATION, self.server, install(hooks.RECOMPUTE))
            return None if substitute is None else passes.make_attention(runner, substitute)

        def exactness_of_layers() -> Recomputed:
            with passes.attending_by(runner, other_attention):
                return check_recompute(
                    partial(run_again, runner),
                    int(runner.req_to_token_pool.size),
                    observed,
                    recomputer,
                    kvcache,
                    other_attention=other_attention is not None,
                )

        try:
            # All ranks or none: ranks run the model together.
            other_attention = all_or_none((group,), attention)
            recomputer = make_recomputer(runner, kvcache, methods.chunk_tokens, other_attention)
            result = all_or_none((group,), exactness_of_layers)
            [recomputer.layers] = smallest(group, result.layers)
            all_exact = recomputer.layers == layers
            if all_layers_needed and not all_exact:
                elsewhere = "a layer of another tensor-parallel rank is not exact"
                raise Refused(result.problem or elsewhere)
        except Refused as refused:
            runtime.options.unused[RECOMPUTATION] = str(refused)
            return None
        reason = result.problem or "other tensor-parallel ranks"
        limits = "" if all_exact else f"the first {recomputer.layers} layers only ({reason}); "
        if substitute is not None:
            limits = f"by attention backend {substitute!r}; " + limits
            why = f"{self.server.attention!r} waits for the GPU before every prefill"
            logger.info(f"hcache: attention backend {substitute!r} recomputes, because {why}")
        runtime.pages.recomputation = limits + result.exactness
        logger.debug("hcache: exactness: recomputed layers: %s", runtime.pages.recomputation)
        return recomputer

    def _choose_methods(self) -> Restore:
        """How each layer is stored; Refused if by the chosen partition none has hidden states."""
        config, methods = self._config, layer_methods(self._runtime, self._kvcache)
        chosen = config.mode == "auto" and config.partition == "auto"
        if not methods.layers("hidden") and (chosen or not methods.layers("recompute")):
            why = f"the partition has no hidden states: {methods.describe()}"
            raise Refused(f"{why} (override with mode: hidden or partition)")
        return methods

    def _head_groups(self, methods: Restore, shard: Shard) -> int:
        """Number of groups of heads, each with units of its own, into which K and V are divided."""
        if not methods.layers("kv"):
            return shard.of
        extra = storage_extra_config(self.server.args)
        return head_groups(extra.get("tp_lcm_size"), shard, attention_ranks().world_size)


def _shard_of(exchange: Exchange | None) -> Shard:
    """The share of every page's tokens that this rank keeps."""
    return WHOLE if exchange is None else Shard(exchange.number, exchange.shards)


def build_stack(
    runtime: Runtime, server: Server, params: Any, plan: PagePlan, projector: Projector
) -> AbstractContextManager[None]:
    """A context in which SGLang's strategy builds HiCache's components around our host pool and our
    controller. These, and what they need, are made here, as ``plan`` says."""
    layout, kvcache, config = plan.layout, plan.layout.kvcache, server.config
    weights, alone = runtime.weights, params.pp_size == 1
    ranks, allocator = attention_ranks(), params.token_to_kv_pool_allocator
    allocator = getattr(allocator, "full_attn_allocator", allocator)  # without that of windows
    hidden = plan if isinstance(plan, HiddenPlan) else None
    pool, order = _host_pool(weights, params, plan), None
    if ranks.world_size > 1 and (hidden is not None or layout.exchange is not None):
        order = runtime.forwards.order = CollectiveOrder(kvcache.device)
    reason = refusal(EAGER, replace(server, allocator=allocator, exchanges=order is not None))
    if reason is not None:
        runtime.options.unused[EAGER] = reason
    capture, new_rows = Capture(pool.arena), None
    backups: Callable[..., NodeBackups] = partial(NodeBackups, pool, capture)
    if hidden is not None:
        capture = staged = _start_capture(weights, pool, hidden, alone)
        new_rows = partial(RecomputedRows, staged, hidden.staging, hidden.hooks)
        backups = partial(CapturedBackups, pool, staged)
    pipeline, estimates = plan.pipeline(pool.kv_buffer, projector, order), runtime.l3.estimates
    loads = LoadQueue(
        pool.arena,
        pipeline,
        layout.methods,
        plan.recomputer,
        kvcache.device,
        estimates.slowdown,
        weights.cannot_restore,
        estimates.add_restore,
    )
    write_back = get_memory().hicache_write_policy == "write_back"
    pool.connect(loads, capture, frees_duplicates=write_back)
    token_bytes = page_plan.kv_bytes_per_token(kvcache)
    warn_of_small_host_pool(pool.size, int(kvcache.size), pool.size_per_token, token_bytes)
    layouts = eager = None
    if plan.plugin is not None:
        layouts = plan.plugin.backups(layout.page, params.tp_cache_group, ranks.world_size)
    if hidden is not None or reason is None:  # capture sees what is allocated
        free = ReservablePages(allocator, capture)
        if reason is None:
            eager = _eager_loads(runtime, config, free, pool, pipeline, loads, new_rows)
    kv_checks, checks = _service_checks(weights, config, pool, plan, projector, order)
    positions, writer = int(runtime.runner.model_config.context_len), runtime.writer
    headers = PageHeaders(weights, pool.arena, layout.page, hidden is not None, positions, writer)
    kv_alone = hidden is None and alone  # a quarantine for another reason leaves K and V right
    stack = Stack(
        runtime=runtime,
        pool=pool,
        loads=loads,
        eager=eager,
        stages=StagePages(weights, pool.arena, plan.host.host, new_stage_group),
        kv_checks=kv_checks,
        judge=partial(judge_hits, runtime, config),
        capture=capture,
        headers=headers,
        backups=partial(backups, layouts, alone),
        trusts=lambda: not kv_checks.failed if kv_alone else weights.quarantine is None,
        checks=checks,
    )
    return with_our_pool(kvcache, pool, partial(OwnPagesController, stack))


def _eager_loads(
    runtime: Runtime,
    config: HCacheConfig,
    free_pages: ReservablePages,
    pool: OwnPagesPool,
    pipeline: RestorePipeline,
    loads: LoadQueue,
    new_rows: Callable[[], RecomputedRows] | None,
) -> EagerLoads:
    """Restores of pages that arrive, and recomputation of others, while L3 is read. ``new_rows``
    takes hidden states of recomputed pages; None: pages have none."""
    methods = loads.methods
    budget = SliceBudget(
        config.recompute_ms / 1e3,
        methods.chunk_tokens,
        methods.recompute,
        in_seconds=methods.profile is not None,
    )
    most = max(1, int(pool.device_pool.size // pool.page_size * _RESERVED))
    l3, prefetches = runtime.l3, runtime.prefetches
    eager = EagerLoads(free_pages, pool, pipeline, loads, most, budget, l3, prefetches, new_rows)
    runtime.weights.on_weights_changed.append(eager.restores.give_all_back)
    return eager


def _service_checks(
    weights: LoadedWeights,
    config: HCacheConfig,
    pool: OwnPagesPool,
    plan: PagePlan,
    projector: Projector,
    order: CollectiveOrder | None,
) -> tuple[KVChecks, ServiceChecks | None]:
    """Start the checks of what ``pool`` backs up: K and V, hidden states (None: there are none)."""
    layout, codec, interval, checks = plan.layout, plan.layout.codec, config.check_every_pages, None
    kv_checks = KVChecks(weights, pool, interval, layout.kv)
    if layout.kv.layers:  # in hidden mode a load may recompute layers whose K and V are stored
        kv_checks.watch(loads=codec is None)
    if codec is not None:
        layers, exchange = layout.hidden_layers, layout.exchange
        checks = ServiceChecks(weights, pool, interval, layers, codec, projector, exchange, order)
        checks.watch()
    return kv_checks, checks


def _host_pool(weights: LoadedWeights, params: Any, plan: PagePlan) -> OwnPagesPool:
    """Our host pool, with pages as planned; allocates host memory."""
    layout = plan.layout
    return OwnPagesPool(
        layout.kvcache,
        params.page_size,
        get_memory().hicache_mem_layout,
        page_layout=layout.page,
        pages=plan.host,
        kv=layout.kv,
        pin_memory=layout.kvcache.device != "cpu",
        allocator_type=get_allocator_type(),
        namespace=weights.page_namespace,
    )


def use_own_pages(
    runtime: Runtime, config: HCacheConfig, plan: PagePlan, reason: str | None
) -> None:
    """Set namespace fields, metrics and log line of own pages. ``reason``: why pages have no hidden
    states; None: they have."""
    layout, pages, weights = plan.layout, runtime.pages, runtime.weights
    pages.layer_methods = layout.methods
    codec, dtype = layout.kv.codec, planes_of(layout.kvcache, 0)[0].dtype
    if layout.codec is not None:
        codec, dtype = layout.codec.name, layout.codec.dtype
        if layout.kv.layers and layout.kv.codec != codec:
            codec += f", {layout.kv.codec} of K and V"
    pages.codec = codec
    metrics.CODEC.set(page_plan.codec_of_option(config, dtype), codec)
    weights.page_fields = page_plan.namespace_fields(layout, runtime.runner)
    if layout.kv.drafts:
        weights.page_fields["draft"] = weights.draft_digest
    pages.use_own_pages(reason)
    mode = "own pages" if layout.codec is None else "hidden mode"
    logger.info(
        f"hcache: {mode}: {layout.methods.describe()}, {layout.page.page_bytes} bytes per "
        f"{layout.page.page_size}-token page, codec {codec}, {plan.host.host} host pages, "
        f"{plan.host.shadows} shadows, {plan.device_bytes / 1e6:.0f} MB of device memory for "
        "restores"
    )


def _start_capture(
    weights: LoadedWeights, pool: OwnPagesPool, plan: HiddenPlan, alone: bool
) -> StagedCapture:
    """Capture hidden states in every forward pass. ``alone``: there are no pipeline stages."""
    staging, capture = plan.staging, plan.capture(pool.arena, pool.kv_buffer)
    if not alone:
        capture.ledger.without_results = _STAGED_PASSES
    plan.hooks.use(capture, tokens_only=plan.recomputer is not None)
    weights.on_weights_changed.append(capture.ledger.forget)
    size = Staging.bytes_for(staging.layers, staging.row_bytes, staging.capacity) / 1e6
    text = "hcache: capture: staging of %d tokens, %.0f MB of device memory"
    logger.debug(text, staging.capacity, size)
    return capture


def capture_nothing(runtime: Runtime) -> None:
    """Remove the capture hooks of the model, and free their staging."""
    forwards = runtime.forwards
    # Recorded graphs read the targets of a step from this memory in every replay.
    forwards.recorded = forwards.capture.staging or forwards.recorded
    with metrics.catching("staging_not_freed", "staging keeps its memory on the device"):
        forwards.capture.remove()


def _before_graphs(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's recording of CUDA graphs."""
    record_copies(current(), runner)
    return original(runner, *args, **kwargs)


_GRAPHS = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"
GRAPH_HOOKS = [Hook(_GRAPHS, _before_graphs)]  # some versions lack the place


def record_copies(runtime: Runtime, runner: Any) -> None:
    """Make capture hooks and staging before SGLang records CUDA graphs, which then copy to it."""
    if runner.device == "cpu" or getattr(runner, "is_draft_worker", False) or graphs_are_off():
        return
    config = runtime.options.config
    assert config is not None
    try:
        kvcache = full_attention(runner.token_to_kv_pool)
        server = Server(runtime.runner, config, kvcache)
        if refusal(OWN_PAGES, server) or refusal(HIDDEN, server):
            return  # the reason is logged when the host pool is built
        if runtime.weights.present is None:  # --startup-weight-load-mode overlap
            raise Refused(
                "the weights are loaded after the graphs, and the partition depends on them"
            )
        hidden = layer_methods(runtime, kvcache).layers("hidden")
        all_layers = passes.attention_modules(runner.model, kvcache.layer_num)
        captured = [all_layers[layer] for layer in hidden]
        recorded = _largest_recorded_tokens(drafted_tokens(server.args))
        width, dtype, device = runner.model_config.hidden_size, runner.dtype, kvcache.device
        staging = page_plan.take_staging(runner, len(captured), width, dtype, device, recorded)
        hooks = HiddenCapture([(layer.module, layer.linears) for layer in captured])
        hooks.staging, runtime.forwards.capture = staging, hooks
    except Refused as refused:
        runtime.forwards.no_capture = str(refused)
    except Exception:
        logger.exception("hcache: CUDA graphs are recorded without copies of hidden states")


def check_recording(runtime: Runtime, hidden: torch.Tensor) -> HiddenCapture:
    """The capture hooks of the recorded CUDA graphs; hooks without staging if no graph is recorded.
    Raises Refused if graphs do not copy rows like those of ``hidden``, ``[n, hidden]``."""
    hooks, why = runtime.forwards.capture, runtime.forwards.no_capture
    if runtime.runner.device == "cpu" or graphs_are_off():
        return hooks
    if hooks.staging is None:
        raise Refused(f"CUDA graphs were recorded without our copies: {why}")
    copied = hooks.staging.width, hooks.staging.dtype
    if copied != (hidden.shape[1], hidden.dtype):
        rows = f"this model's rows are {hidden.shape[1]} of {hidden.dtype}"
        raise Refused("CUDA graphs copy {} values of {}, and {}".format(*copied, rows))
    return hooks


def _largest_recorded_tokens(per_request: int) -> int:
    """Most tokens of a recorded CUDA graph; ``per_request``: of a request in a decode step."""
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    sizes = [0]
    for phase, tokens in ((config.decode, per_request), (config.prefill, 1)):
        if phase.backend != "disabled":
            sizes += [tokens * size for size in (phase.max_bs or 0, *(phase.bs or ()))]
    return max(sizes)
