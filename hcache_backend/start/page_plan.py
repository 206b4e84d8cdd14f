"""The layout, codec and number of this server's pages, and what hidden states pass through; all
host and device memory is within the user's limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_memory

from hcache_backend.arena import Arena
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.checks.comparison import first_problem
from hcache_backend.checks.probe import Probe
from hcache_backend.config import HCacheConfig
from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Shard
from hcache_backend.host.segments import KVSegments, page_layout
from hcache_backend.metrics import logger
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.paged_pool import planes_of
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import Group, Refused, all_or_none
from hcache_backend.restore.exchange import CollectiveOrder, Exchange, shard_of_rank
from hcache_backend.restore.layers import MOST_EXCHANGES, RestoredLayer, divided
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.restore.ring import ring_bytes
from hcache_backend.sglang.arguments import drafted_tokens, kv_fields, packed_drafts, resolved
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.host_pool import HostPages
from hcache_backend.sglang.runtime import Forwards, Runtime
from hcache_backend.streams import free_memory
from hcache_kernels.codecs import Codec, UnsupportedRows, make_codec

if TYPE_CHECKING:
    from hcache_backend.krul.plugin import Krul

# most of the device's free memory that staging takes: SGLang left it for activations and graphs
_STAGING_SHARE = 1 / 4
_DECODE_TOKENS = 256  # larger decode steps are captured layer by layer; staging need not hold two
# of the probe's tokens; warn if a codec, which stays in use, cannot hold more: hardly any hits then
_UNENCODABLE_SHARE = 0.1


@dataclass
class PagePlan:
    """Layout and number of own pages, and what hidden states pass through."""

    kvcache: Any
    methods: Restore
    shard: Shard  # part of a page that this rank holds
    groups: int  # of heads, that K and V of a page divide into, over all ranks
    _: KW_ONLY
    kv_codec: str = "none"
    plugin: Krul | None = None  # divides pages and encodes K and V in the place of kv_codec
    runner: Any = None  # SGLang's ModelRunner; for capture, like layers
    layers: tuple[AttentionLayer, ...] = ()  # of this stage
    codec: Codec | None = None  # of hidden states; None: K and V only, no layer is captured
    recomputer: Recomputer | None = None  # None: layers cannot or need not be recomputed
    exchange: Exchange | None = None  # of ranks that share a page's tokens; None: pages are whole
    drafts: Sequence[Any] = ()  # pools of draft layers whose K and V are layers of the pages, too
    hooks: HiddenCapture | None = None  # those that CUDA graphs were recorded with, if any
    host_share: float = 1.0  # of --hicache-size for these pages; side pools get the rest
    forwards: Forwards = field(default_factory=Forwards)
    # Shows the plug-in the model, by which it divides each node; None: all are alike.
    observer: Recomputer | None = field(init=False, default=None)
    kv: KVSegments = field(init=False)
    layout: PageLayout = field(init=False)
    pages: HostPages = field(init=False)  # from find_room
    staging: Staging = field(init=False)  # of captured rows, likewise
    # Memory of a projection on a GPU, from take_projections, so that restores take none in service:
    # decoded rows, and their product. None: rows are not encoded, or it runs on a CPU.
    rows: torch.Tensor | None = field(init=False, default=None)
    product: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        tokens, stored = int(self.kvcache.page_size), self.methods.layers("kv")
        if self.plugin is not None:
            self.kv = self.plugin.segments(self.kvcache, stored, tokens, self.groups)
        else:
            how = self.shard, self.groups, self.kv_codec, self.drafts
            self.kv = KVSegments(self.kvcache, stored, tokens, *how)
        self.layout = page_layout(tokens, self.methods, self.kv, self.codec, self.shard)

    @cached_property
    def capture_hooks(self) -> HiddenCapture:
        """Hooks that capture hidden states: those of recorded CUDA graphs, or new ones. From the
        first access the model has them, and only projections are watched."""
        layers = self.hidden_layers
        hooks = self.hooks or HiddenCapture([(layer.module, ()) for layer in layers])
        hooks.watch_only(layer.projection for layer in layers)
        hooks.staging, self.forwards.capture = self.staging, hooks
        return hooks

    @property
    def arriving(self) -> list[range]:
        """Groups of layers that pass through the ring of restores together."""
        if self.kv.shares_tokens:
            return [*divided(self.kv.layers, MOST_EXCHANGES)]
        return [range(layer, layer + 1) for layer in self.methods.layers("hidden")]

    @property
    def ring_bytes(self) -> int:
        """Device memory of the ring of restores, at least 1."""
        return ring_bytes(self.layout, self.methods.chunk_tokens, self.arriving)

    @property
    def hidden_layers(self) -> list[AttentionLayer]:
        return [self.layers[index] for index in self.methods.layers("hidden")]

    def fields(self, runner: Any) -> dict[str, object]:
        """Fields of the namespace of these pages besides the weights. ``runner``: SGLang's."""
        fields: dict[str, object] = {
            "kind": "own",
            "partition": list(self.methods.methods),
            "first_layer": self.kvcache.start_layer,
            "layout": self.layout.form,
        }
        if self.kv.layers:
            fields |= kv_fields(runner)
        if self.codec is not None:
            fields["codec"] = self.codec.name
        ranks = attention_ranks()
        if not self.kv.layers or self.kv.latent or self.layout.shard.of == ranks.world_size:
            fields["any_ranks"] = True
        else:  # K and V are of a rank's own heads, which are no shard
            fields["tp"] = [ranks.rank_in_group, ranks.world_size]
        return fields

    def restored_layers(self, projector: Projector) -> list[RestoredLayer]:
        """How each layer comes back."""

        def fill(
            layer: AttentionLayer, _: range, segments: torch.Tensor, *where: torch.Tensor
        ) -> None:
            """:data:`.Fill`; ``where``: positions and slots."""
            assert self.codec is not None
            rows = self.codec.decode(segments.view(-1, self.codec.row_bytes), self.rows)
            projector.project_to_pool(layer, rows, *where, product=self.product)

        restored = [RestoredLayer("recompute")] * len(self.layout.segment_bytes)
        for layer in self.hidden_layers:
            restored[layer.index] = RestoredLayer("hidden", partial(fill, layer))
        for index in self.kv.layers:
            restored[index] = self.kv.restored_layer(index)
        return restored

    def capture(self, arena: Arena, memory: torch.Tensor) -> StagedCapture:
        """Capture of hidden states into the pages of ``arena``, whose bytes are ``memory``."""
        assert self.codec is not None
        segments = [layer.index for layer in self.hidden_layers]
        return StagedCapture(arena, memory, self.staging, segments, self.codec)

    def pipeline(
        self, memory: torch.Tensor, projector: Projector, order: CollectiveOrder | None
    ) -> RestorePipeline:
        """Restores of these pages, whose bytes are ``memory``."""
        layers, most = self.restored_layers(projector), self.methods.chunk_tokens
        device, exchange = self.kvcache.device, self.exchange
        return RestorePipeline(memory, self.layout, layers, most, device, exchange, order)

    def find_room(self) -> None:
        """Divide host memory, and take staging for capture; Refused without room."""
        memory, codec, device = get_memory(), self.codec, self.kvcache.device
        size, ratio = memory.hicache_size * self.host_share, memory.hicache_ratio
        given = self.kvcache, self.layout, size, ratio, host_memory_budget_bytes()
        self.pages = plan_host_pages(*given, with_shadows=codec is not None)
        if codec is not None:
            recorded = self.hooks.staging if self.hooks is not None else None
            hidden = len(self.methods.layers("hidden")), codec.hidden_size, codec.dtype
            self.staging = recorded or take_staging(self.runner, *hidden, device)
        # Try the ring's room: freed memory stays in torch's cache until it is needed.
        try:
            torch.empty(self.ring_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise Refused(f"no device memory for restores: {error}") from None

    def take_projections(self, projector: Projector) -> None:
        """Take device memory of projections by ``projector``; Refused without room."""
        codec, device = self.codec, torch.device(self.kvcache.device)
        if codec is None or device.type != "cuda":
            return
        taken = partial(torch.empty, dtype=codec.dtype, device=device)
        tokens = max(self.methods.chunk_tokens, self.layout.page_size)
        try:
            self.rows = None if codec.is_view else taken((tokens, codec.hidden_size))
            self.product = taken(tokens * projector.product_columns)
        except torch.OutOfMemoryError as error:
            raise Refused(f"no device memory for projections: {error}") from None


def make_exchange(what: str, rows: Sequence[torch.Tensor], page_size: int) -> Exchange | None:
    """The exchange of token shards between ranks, which all call it; None if pages are whole.
    Refused on every rank if ``rows`` differ, or shards do not get across."""
    ranks = attention_ranks()
    number, shards = shard_of_rank(ranks.rank_in_group, ranks.world_size, page_size)
    if shards == 1:
        return None
    device = rows[0].device
    first = ranks.rank_in_group - number
    exchange = Exchange.between(ranks.ranks[first : first + shards], device)
    problem = exchange.check(device)
    flat = torch.cat([each.flatten() for each in rows]).view(torch.uint8).cpu().numpy()
    gathered = ranks.all_gather_object((problem, xxhash.xxh3_64_intdigest(flat.data)))
    problem = first_problem(problem for problem, _ in gathered)
    if problem is None and len({digest for _, digest in gathered}) > 1:
        problem = f"{what} differ between tensor-parallel ranks"
    if problem is not None:
        raise Refused(problem)
    return exchange


def page_plugin(config: HCacheConfig | None) -> Krul | None:
    """The plug-in that option ``codec`` names: it decides on its own how layers share a page."""
    if config is None or config.codec != "krul":
        return None
    from hcache_backend.krul.plugin import Krul

    return Krul(config.krul)


def asked_codec(runtime: Runtime, dtype: torch.dtype) -> str:
    """The codec that option ``codec`` means for values of ``dtype``."""
    assert runtime.config is not None
    asked, smallest = runtime.config.codec, "exp3" if dtype == torch.bfloat16 else "none"
    return smallest if asked == "auto" else asked


def wanted_codec(runtime: Runtime, runner: Any) -> Codec:
    """The codec of hidden states; the probe finds out later if it serves this model."""
    width, dtype = runner.model_config.hidden_size, runner.dtype
    try:
        return make_codec(asked_codec(runtime, dtype), width, dtype)
    except UnsupportedRows:
        return make_codec("none", width, dtype)


def kv_codec(runtime: Runtime, kvcache: Any, shard: Shard, groups: int, stages: int) -> str:
    """The codec of K and V, by the option and their shape alone; logs a fallback to ``none``."""
    try:
        return _encoding_segments(runtime, kvcache, shard, groups, stages).codec
    except UnsupportedRows as error:
        assert runtime.config is not None
        level = logging.INFO if runtime.config.codec == "auto" else logging.WARNING
        logger.log(level, "hcache: K and V are stored as they are (codec 'none'): %s", error)
        return "none"


def encoded_share(runtime: Runtime, kvcache: Any, stages: int) -> float:
    """Encoded bytes of K and V relative to plain ones; 1.0 without a codec."""
    try:
        kv = _encoding_segments(runtime, kvcache, WHOLE, 1, stages)
    except UnsupportedRows:
        return 1.0
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], WHOLE)
    return sum(layout.segment_bytes) / (len(kv.layers) * kv.plain_bytes)


def _encoding_segments(
    runtime: Runtime, kvcache: Any, shard: Shard, groups: int, stages: int
) -> KVSegments:
    """K and V of all layers by option ``codec``; raises UnsupportedRows."""
    codec = asked_codec(runtime, planes_of(kvcache, 0)[0].dtype)
    if codec != "none" and stages > 1:  # a stage cannot tell the others what it could not keep
        raise UnsupportedRows(f"codec {codec!r} takes no K and V of pipeline stages")
    plugin, drafts = page_plugin(runtime.config), packed_drafts(runtime.runner)
    if plugin is not None and drafts:
        raise UnsupportedRows(f"codec {codec!r} takes no draft layers")
    every = kvcache, range(kvcache.layer_num), kvcache.page_size
    if plugin is not None:
        return plugin.segments(*every, groups // shard.of)
    return KVSegments(*every, shard, groups, codec, drafts)


def choose_codec(group: Group, runtime: Runtime, probe: Probe, projector: Projector) -> Codec:
    """The wanted codec of hidden states if all ranks of ``group`` can use it, or the exact one."""
    rows = probe.hidden[0]
    wanted = asked_codec(runtime, rows.dtype)
    try:
        return all_or_none((group,), lambda: _proven(wanted, probe, projector))
    except Refused as refused:
        return hidden_as_they_are(wanted, rows.shape[1], rows.dtype, refused)


def hidden_as_they_are(name: str, width: int, dtype: torch.dtype, refused: Refused) -> Codec:
    """The exact codec, because codec ``name`` was refused."""
    why = "hidden states are stored as they are (codec 'none')"
    logger.warning("hcache: codec %r is not used, %s: %s", name, why, refused)
    return make_codec("none", width, dtype)


def _proven(name: str, probe: Probe, projector: Projector) -> Codec:
    """The codec, if rows of the probe decode to the model's K and V; raises Refused otherwise."""
    try:
        codec = make_codec(name, probe.hidden[0].shape[1], probe.hidden[0].dtype)
    except UnsupportedRows as error:
        raise Refused(str(error)) from None
    fits = torch.ones(len(probe.positions), dtype=torch.bool, device=probe.positions.device)

    def problem_of(layer: AttentionLayer, hidden: torch.Tensor) -> str | None:
        encoded, ok = codec.encode(hidden)
        fits.logical_and_(ok)
        # Rows that are not ok are not stored, so they cannot come back wrong.
        back = torch.where(ok[:, None], codec.decode(encoded), hidden)
        return probe.problem(layer, back, projector, codec.name)

    problem = first_problem(map(problem_of, probe.layers, probe.hidden))
    if problem is not None:
        raise Refused(problem)
    lost, tried = int((~fits).sum()), len(fits)
    if lost == tried:
        raise Refused(f"it cannot hold one of the {lost} tokens of the self-check")
    if lost:
        text = (
            "hcache: codec %r cannot encode %d of the %d tokens that were tried; pages with such "
            "tokens do not go to L3 (option 'codec')"
        )
        level = logging.WARNING if lost > _UNENCODABLE_SHARE * tried else logging.INFO
        logger.log(level, text, codec.name, lost, tried)
    return codec


def kv_bytes_per_token(kvcache: Any) -> int:
    """Bytes of K and V, or latents, of one token, all layers of this rank."""
    layers = range(kvcache.layer_num)
    return sum(plane[0].nbytes for layer in layers for plane in planes_of(kvcache, layer))


def host_bytes(kvcache: Any, size_gb: float, ratio: float) -> float:
    """Bytes of host memory for HiCache; arguments as in :func:`plan_host_pages`."""
    return size_gb * 1e9 if size_gb > 0 else ratio * kvcache.size * kv_bytes_per_token(kvcache)


def host_tokens(
    kvcache: Any, hidden: StoredLayer, shard: Shard, kv_share: float, stored: Partition, size: float
) -> float:
    """Tokens that ``size`` bytes of host memory hold besides ``hidden`` states of the device's. The
    header of a small page takes as much as its tokens."""
    header = PageLayout(kvcache.page_size, (hidden,) * kvcache.layer_num, shard).header_bytes
    rows = stored.hidden * sum(segment.length_in(shard) for segment in hidden.segments)
    kv = stored.kv * kv_share * kv_bytes_per_token(kvcache) / kvcache.layer_num
    token = kv + (header + rows) / kvcache.page_size
    return size / token - (kvcache.size if stored.hidden else 0)


def plan_host_pages(
    kvcache: Any,
    layout: PageLayout,
    size_gb: float,
    ratio: float,
    budget_bytes: float,
    *,
    with_shadows: bool,
) -> HostPages:
    """Divide HiCache's host memory into pages and shadows; raises Refused if it is too little, or
    more than ``budget_bytes``. Without ``size_gb`` (0) ``ratio`` counts."""
    shadows = int(kvcache.k_buffer[0].shape[0]) // layout.page_size if with_shadows else 0
    given = host_bytes(kvcache, size_gb, ratio)
    option = f"--hicache-size {size_gb} (GB)" if size_gb > 0 else f"--hicache-ratio {ratio}"

    def named(size: float, more: int) -> str:
        """The option for ``size`` bytes, or the next larger value (``more``: 1)."""
        if size_gb > 0:
            return f"--hicache-size {int(size // 1e9) + more}"
        hundredths = int(100 * size / kvcache.size / kv_bytes_per_token(kvcache)) + more
        return f"--hicache-ratio {hundredths / 100:.2f}"

    host = int(given // layout.stride) - shadows
    if host < 1:
        there, taken = _gigabytes(given, max(1, shadows) * layout.stride)
        whose = "the hidden states of the tokens on the device alone take"
        raise Refused(
            f"{option} gives {there} GB of host memory, and "
            f"{whose if shadows else 'one page takes'} {taken} GB; "
            f"{named((shadows + 1) * layout.stride, 1)} is the least that will do"
        )
    if given > budget_bytes:
        wanted, there = _gigabytes(given, budget_bytes)
        raise Refused(
            f"{option} asks for {wanted} GB of host memory and {there} GB are there; "
            f"{named(budget_bytes, 0)} is the most that fits"
        )
    return HostPages(host, shadows)


def _gigabytes(*sizes: float) -> list[str]:
    """Sizes as GB, with two decimals or as many as tell them apart."""
    for digits in range(2, 10):
        shown = [f"{size / 1e9:.{digits}f}" for size in sizes]
        if len(set(shown)) == len(sizes):
            break
    return shown


def take_staging(
    runner: Any,
    layers: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device | str,
    recorded_tokens: int = 0,
) -> Staging:
    """Staging for ``layers`` captured ones, in the memory that SGLang left beside its KV pool.
    Raises Refused if that is too small. It holds two layers of the longest eager forward pass; two
    of the largest decode steps; all layers of ``recorded_tokens``, the largest CUDA graph, twice if
    memory allows, so that the second step need not wait for the first."""
    args = resolved(runner.server_args)
    decode = int(runner.max_running_requests) * drafted_tokens(args)
    chunk = args.chunked_prefill_size
    prefill = int(chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens)
    step = min(prefill + decode, int(runner.max_total_num_tokens))
    by_layer = -(-2 * step // layers) if layers else step
    capacity = max(by_layer, 2 * min(decode, _DECODE_TOKENS), recorded_tokens, 1)
    row_bytes = width * dtype.itemsize
    free, two_steps = free_memory(device), max(capacity, 2 * recorded_tokens)
    if Staging.bytes_for(layers, row_bytes, two_steps) <= free * _STAGING_SHARE:
        capacity = two_steps
    wanted = Staging.bytes_for(layers, row_bytes, capacity)
    if wanted > free * _STAGING_SHARE:
        took, left = _gigabytes(wanted, free)
        raise Refused(
            f"staging of {capacity} tokens takes {took} GB of the {left} GB of device memory that "
            f"SGLang left, more than 1/{round(1 / _STAGING_SHARE)} (a lower --mem-fraction-static "
            "leaves more; a smaller --chunked-prefill-size or largest CUDA graph wants less)"
        )
    try:
        return Staging(layers, width, dtype, capacity, device)
    except torch.OutOfMemoryError as error:
        raise Refused(f"no device memory for staging: {error}") from None
