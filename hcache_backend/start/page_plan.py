"""The layout, codec and number of this server's pages, and what hidden states pass through; all
host and device memory is within the user's limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import xxhash
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_bytes
from sglang.srt.runtime_context import get_memory

from hcache_backend.arena import Arena
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.checks.comparison import first_problem
from hcache_backend.checks.self_check import ObservedPass
from hcache_backend.config import HCacheConfig
from hcache_backend.format.page import PageLayout, StoredLayer
from hcache_backend.format.units import WHOLE, Shard
from hcache_backend.host.layout import Layout
from hcache_backend.host.segments import KVSegments
from hcache_backend.metrics import logger
from hcache_backend.plan.restore import Partition
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.paged_pool import index_keys_of, planes_of
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import Group, Refused, all_or_none
from hcache_backend.restore.exchange import CollectiveOrder, Exchange, shard_of_rank
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import Recomputer
from hcache_backend.sglang.arguments import drafted_tokens, kv_fields, packed_drafts, resolved
from hcache_backend.sglang.groups import attention_ranks
from hcache_backend.sglang.host_pool import HostPages
from hcache_backend.start.capabilities import Server
from hcache_backend.streams import free_memory
from hcache_kernels.codecs import Codec, UnsupportedRows, make_codec

if TYPE_CHECKING:
    from hcache_backend.krul.plugin import Krul

# most of the device's free memory that staging takes: SGLang left it for activations and graphs
_STAGING_SHARE = 1 / 4
_DECODE_TOKENS = 256  # larger decode steps are captured layer by layer; staging need not hold two
# of the self-check's tokens; warn if a codec, which stays in use, cannot hold more: hardly any hits
# then
_UNENCODABLE_SHARE = 0.1


@dataclass(frozen=True)
class PagePlan:
    """Own pages of this server: their layout, and the memory that was found for them."""

    layout: Layout
    host: HostPages
    plugin: Krul | None = None  # divides the pages of each node; None: all are alike
    recomputer: Recomputer | None = None  # None: layers cannot or need not be recomputed

    @property
    def device_bytes(self) -> int:
        """Device memory of restores."""
        return self.layout.ring_bytes

    def restored_layers(self, projector: Projector) -> list[RestoredLayer]:
        """How each layer comes back, by layer. ``projector`` is for layers of hidden states."""
        restored = [RestoredLayer("recompute")] * len(self.layout.page.segment_bytes)
        for index in self.layout.kv.layers:
            restored[index] = self.layout.kv.restored_layer(index)
        return restored

    def pipeline(
        self, memory: torch.Tensor, projector: Projector, order: CollectiveOrder | None
    ) -> RestorePipeline:
        """Restores of these pages, whose bytes are ``memory``. ``order``: of their collectives."""
        layout, layers = self.layout, self.restored_layers(projector)
        most, device = layout.methods.chunk_tokens, layout.kvcache.device
        return RestorePipeline(memory, layout.page, layers, most, device, layout.exchange, order)


class ProjectionMemory(NamedTuple):
    """Device memory of one projection on a GPU, so that restores take none in service."""

    rows: torch.Tensor | None = None  # decoded, [tokens, hidden]; None: rows are not encoded
    product: torch.Tensor | None = None  # flat, of K and V of the widest layer


@dataclass(frozen=True, kw_only=True)
class HiddenPlan(PagePlan):
    """The same with hidden states. They are captured by ``hooks``, and pass through ``staging``."""

    staging: Staging
    hooks: HiddenCapture
    projection: ProjectionMemory

    @property
    def codec(self) -> Codec:
        """The codec of hidden states."""
        assert self.layout.codec is not None
        return self.layout.codec

    @property
    def device_bytes(self) -> int:
        projection_bytes = sum(part.nbytes for part in self.projection if part is not None)
        return super().device_bytes + projection_bytes

    def restored_layers(self, projector: Projector) -> list[RestoredLayer]:
        """How each layer comes back; hidden states are decoded and projected to the pool."""

        def decode_and_project(
            layer: AttentionLayer,
            _: range,
            segments: torch.Tensor,
            positions: torch.Tensor,
            slots: torch.Tensor,
        ) -> None:
            rows, product = self.projection  # memory for these; None: it is allocated
            rows = self.codec.decode(segments.view(-1, self.codec.row_bytes), rows)
            projector.project_to_pool(layer, rows, positions, slots, product=product)

        restored = super().restored_layers(projector)
        for layer in self.layout.hidden_layers:
            restored[layer.index] = RestoredLayer("hidden", partial(decode_and_project, layer))
        return restored

    def capture(self, arena: Arena, memory: torch.Tensor) -> StagedCapture:
        """Capture of hidden states into the pages of ``arena``, whose bytes are ``memory``."""
        segments = [layer.index for layer in self.layout.hidden_layers]
        return StagedCapture(arena, memory, self.staging, segments, self.codec)


def find_room(layout: Layout, host_share: float = 1.0) -> HostPages:
    """The number of host pages and shadows for ``layout``; raises Refused if host memory, or device
    memory for restores, is too small. ``host_share`` of --hicache-size is for these pages."""
    memory, device = get_memory(), layout.kvcache.device
    size, ratio = memory.hicache_size * host_share, memory.hicache_ratio
    host = plan_host_pages(
        layout.kvcache,
        layout.page,
        size,
        ratio,
        host_memory_budget_bytes(),
        with_shadows=layout.codec is not None,
    )
    # Freed memory stays in torch's cache until it is needed.
    try:
        torch.empty(layout.ring_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise Refused(f"no device memory for restores: {error}") from None
    return host


def projection_memory(layout: Layout, codec: Codec, projector: Projector) -> ProjectionMemory:
    """Device memory for the longest projection, none on a CPU; raises Refused without room."""
    device = torch.device(layout.kvcache.device)
    if device.type != "cuda":
        return ProjectionMemory()
    allocate = partial(torch.empty, dtype=codec.dtype, device=device)
    tokens = max(layout.methods.chunk_tokens, layout.page.page_size)
    try:
        rows = None if codec.is_view else allocate((tokens, codec.hidden_size))
        return ProjectionMemory(rows, allocate(tokens * projector.product_columns))
    except torch.OutOfMemoryError as error:
        raise Refused(f"no device memory for projections: {error}") from None


def namespace_fields(layout: Layout, runner: Any) -> dict[str, object]:
    """What a namespace depends on besides the weights: no page of other fields can be used."""
    fields: dict[str, object] = {
        "kind": "own",
        "partition": list(layout.methods.methods),
        "first_layer": layout.kvcache.start_layer,
        "layout": layout.page.form,
    }
    if layout.kv.layers:
        fields |= kv_fields(runner)
    if layout.codec is not None:
        fields["codec"] = layout.codec.name
    ranks = attention_ranks()
    if not layout.kv.layers or layout.kv.latent or layout.page.shard.of == ranks.world_size:
        fields["any_ranks"] = True
    else:  # K and V are of a rank's own heads, which are no shard
        fields["tp"] = [ranks.rank_in_group, ranks.world_size]
    return fields


def make_exchange(what: str, must_agree: Sequence[torch.Tensor], page_size: int) -> Exchange | None:
    """The exchange of token shards between ranks, which all call it; None if pages are whole.
    Raises Refused on every rank if tensors ``must_agree`` (``what``, for the message) differ
    between ranks, or a trial exchange fails."""
    ranks = attention_ranks()
    number, shards = shard_of_rank(ranks.rank_in_group, ranks.world_size, page_size)
    if shards == 1:
        return None
    device = must_agree[0].device
    first = ranks.rank_in_group - number
    exchange = Exchange.between(ranks.ranks[first : first + shards], device)
    problem = exchange.check(device)
    flat = torch.cat([each.flatten() for each in must_agree]).view(torch.uint8).cpu().numpy()
    gathered = ranks.all_gather_object((problem, xxhash.xxh3_64_intdigest(flat.data)))
    problem = first_problem(problem for problem, _ in gathered)
    if problem is None and len({digest for _, digest in gathered}) > 1:
        problem = f"{what} differ between tensor-parallel ranks"
    if problem is not None:
        raise Refused(problem)
    return exchange


def page_plugin(config: HCacheConfig) -> Krul | None:
    """The plug-in that option ``codec`` names: it decides on its own how layers share a page."""
    if config.codec != "krul":
        return None
    from hcache_backend.krul.plugin import Krul

    return Krul(config.krul)


def codec_of_option(config: HCacheConfig, dtype: torch.dtype) -> str:
    """The codec that option ``codec`` means for values of ``dtype``."""
    smallest = "exp3" if dtype == torch.bfloat16 else "none"
    return smallest if config.codec == "auto" else config.codec


def wanted_codec(config: HCacheConfig, runner: Any) -> Codec:
    """The codec of hidden states; the self-check finds out later if it serves this model."""
    width, dtype = runner.model_config.hidden_size, runner.dtype
    try:
        return make_codec(codec_of_option(config, dtype), width, dtype)
    except UnsupportedRows:
        return make_codec("none", width, dtype)


def kv_codec(server: Server, shard: Shard, groups: int, stages: int) -> str:
    """The codec of K and V by the option; "none" (logged) if it does not take their shape."""
    try:
        return _encoding_segments(server, shard, groups, stages).codec
    except UnsupportedRows as error:
        level = logging.INFO if server.asks("codec", "auto") else logging.WARNING
        logger.log(level, "hcache: K and V are stored as they are (codec 'none'): %s", error)
        return "none"


def encoded_share(server: Server, stages: int) -> float:
    """Encoded bytes of K and V relative to plain ones; 1.0 without a codec."""
    try:
        kv = _encoding_segments(server, WHOLE, 1, stages)
    except UnsupportedRows:
        return 1.0
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], WHOLE)
    return sum(layout.segment_bytes) / sum(map(kv.bytes_of, kv.layers))


def _encoding_segments(server: Server, shard: Shard, groups: int, stages: int) -> KVSegments:
    """What copies K and V of all layers, encoded by option ``codec``; raises UnsupportedRows."""
    config, kvcache = server.config, server.kvcache
    codec = codec_of_option(config, planes_of(kvcache, 0)[0].dtype)
    if codec != "none" and stages > 1:  # a stage cannot tell the others what it could not keep
        raise UnsupportedRows(f"codec {codec!r} takes no K and V of pipeline stages")
    plugin, drafts = page_plugin(config), packed_drafts(server.runner)
    if plugin is not None and drafts:
        raise UnsupportedRows(f"codec {codec!r} takes no draft layers")
    layers, size = range(kvcache.layer_num), kvcache.page_size
    if plugin is not None:
        return plugin.segments(kvcache, layers, size, groups // shard.of)
    return KVSegments(kvcache, layers, size, shard, groups, codec, drafts)


def choose_codec(
    group: Group, config: HCacheConfig, observed: ObservedPass, projector: Projector
) -> Codec:
    """The wanted codec of hidden states if all ranks of ``group`` can use it, or the exact one."""
    rows = observed.hidden[0]
    wanted = codec_of_option(config, rows.dtype)
    try:
        return all_or_none((group,), lambda: _checked_codec(wanted, observed, projector))
    except Refused as refused:
        why = "hidden states are stored as they are (codec 'none')"
        logger.warning("hcache: codec %r is not used, %s: %s", wanted, why, refused)
        return make_codec("none", rows.shape[1], rows.dtype)


def _checked_codec(name: str, observed: ObservedPass, projector: Projector) -> Codec:
    """The codec, if rows of the observed pass decode to the model's K and V; raises Refused
    otherwise."""
    try:
        codec = make_codec(name, observed.hidden[0].shape[1], observed.hidden[0].dtype)
    except UnsupportedRows as error:
        raise Refused(str(error)) from None
    fits = torch.ones(len(observed.positions), dtype=torch.bool, device=observed.positions.device)

    def problem_of(layer: AttentionLayer, hidden: torch.Tensor) -> str | None:
        """A message if encoded rows project to other K and V; clears ``fits`` of lost tokens."""
        encoded, encodable = codec.encode(hidden)
        fits.logical_and_(encodable)
        # Rows that are not encodable are not stored, so they cannot come back wrong.
        decoded = torch.where(encodable[:, None], codec.decode(encoded), hidden)
        return observed.layer_problem(layer, decoded, projector, codec.name)

    problem = first_problem(map(problem_of, observed.layers, observed.hidden))
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
    """Bytes of K and V, or of latents and index keys, of one token, all layers of this rank."""
    layers = range(kvcache.layer_num)
    keys = (index_keys_of(kvcache, layer) for layer in layers)
    index_key_bytes = sum(
        pages[0].nbytes // kvcache.page_size for pages in keys if pages is not None
    )
    planes = (plane for layer in layers for plane in planes_of(kvcache, layer))
    return index_key_bytes + sum(plane[0].nbytes for plane in planes)


def host_bytes(kvcache: Any, size_gb: float, ratio: float) -> float:
    """Bytes of host memory for HiCache: ``size_gb``, or if that is 0 ``ratio`` times the pool's."""
    return size_gb * 1e9 if size_gb > 0 else ratio * kvcache.size * kv_bytes_per_token(kvcache)


def host_tokens(
    kvcache: Any, hidden: StoredLayer, shard: Shard, kv_share: float, stored: Partition, size: float
) -> float:
    """Tokens that ``size`` bytes of host memory hold by partition ``stored``, besides the hidden
    states of the device's tokens. Headers count: in a small page they are as large as its
    tokens."""
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
    wanted_bytes = host_bytes(kvcache, size_gb, ratio)
    option = f"--hicache-size {size_gb} (GB)" if size_gb > 0 else f"--hicache-ratio {ratio}"

    def option_for(size: float, more: int) -> str:
        """The option that gives at most ``size`` bytes (``more``: 0), or at least so many (1)."""
        if size_gb > 0:
            return f"--hicache-size {int(size // 1e9) + more}"
        hundredths = int(100 * size / kvcache.size / kv_bytes_per_token(kvcache)) + more
        return f"--hicache-ratio {hundredths / 100:.2f}"

    host = int(wanted_bytes // layout.stride) - shadows
    if host < 1:
        size, least = _gigabytes(wanted_bytes, max(1, shadows) * layout.stride)
        whose = "the hidden states of the tokens on the device alone take"
        raise Refused(
            f"{option} gives {size} GB of host memory, and "
            f"{whose if shadows else 'one page takes'} {least} GB; "
            f"{option_for((shadows + 1) * layout.stride, 1)} is the least that will do"
        )
    if wanted_bytes > budget_bytes:
        wanted, available = _gigabytes(wanted_bytes, budget_bytes)
        raise Refused(
            f"{option} asks for {wanted} GB of host memory and {available} GB are there; "
            f"{option_for(budget_bytes, 0)} is the most that fits"
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
        size, room = _gigabytes(wanted, free)
        raise Refused(
            f"staging of {capacity} tokens takes {size} GB of the {room} GB of device memory that "
            f"SGLang left, more than 1/{round(1 / _STAGING_SHARE)} (a lower --mem-fraction-static "
            "leaves more; a smaller --chunked-prefill-size or largest CUDA graph wants less)"
        )
    try:
        return Staging(layers, width, dtype, capacity, device)
    except torch.OutOfMemoryError as error:
        raise Refused(f"no device memory for staging: {error}") from None
