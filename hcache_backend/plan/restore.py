"""The cost model of a restore (paper sections 3.2, 4.1): partitions, the time of one layer by each
method, the pipeline's simulation, and the search for the fastest partition."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

if TYPE_CHECKING:  # the programs of bench/gpu have no pydantic
    from hcache_backend.plan.model_shape import ModelShape, Sides
    from hcache_backend.plan.profile import Profile

RUN_AHEAD = 3  # segments of a long restore in the ring: one is projected, one waits, one arrives
FIRST_PIECES = 4  # pieces that the first layer of a restore comes in at most
FIRST_PIECE_TOKENS = 1024  # least tokens of a piece: a projection of fewer is not worth its launch
CHUNK_TOKENS = 8192  # of a server's projections: bounds the device memory of a restore

L3Path = Literal["overlapped", "first", "none"]
"""Reading of L3. ``overlapped``: during the restore (the paper), so a transfer is as slow as the
slower of L3 and bus. ``first``: before it (HiCache's prefetch). ``none``: not at all."""
LEAST_PART = 1 / 8  # least share of a hit that is read during recomputation; below it all is read

LayerMethod = Literal["recompute", "hidden", "kv"]
LAYER_METHODS: tuple[LayerMethod, ...] = get_args(LayerMethod)
_FASTER = 1 - 1e-9  # quotients closer to 1 are the rounding of sums


@dataclass(frozen=True)
class Partition:
    """Numbers of layers by method: the first ones, the next ones, the last ones. Recomputation
    needs no bus, so later hidden states arrive meanwhile. KV needs no computation, so it fills the
    bus during the last projections (section 4.1)."""

    recompute: int
    hidden: int
    kv: int

    @property
    def layers(self) -> int:
        return self.recompute + self.hidden + self.kv

    @property
    def methods(self) -> set[LayerMethod]:
        return {method for method in LAYER_METHODS if getattr(self, method)}

    def method(self, layer: int) -> LayerMethod:
        if layer < self.recompute:
            return "recompute"
        return "hidden" if layer < self.recompute + self.hidden else "kv"

    def bytes_per_token(self, model: ModelShape) -> int:
        """Stored bytes of a token in all layers; latents (as ``kv``) come with index keys."""
        index = model.index_bytes if self.kv else 0
        return self.hidden * model.hidden_bytes + self.kv * model.kv_bytes + index

    def recomputing(self, first: int) -> Partition:
        """This partition with the first ``first`` layers recomputed, although they are stored."""
        hidden = max(0, min(self.hidden, self.recompute + self.hidden - first))
        return Partition(first, hidden, self.layers - first - hidden)


def describe(partition: Partition, latent: object = None) -> str:
    """The methods in words, in the order of the layers; a true ``latent`` stands for MLA."""
    words = "recomputed", "from hidden states", f"loaded as {'latents' if latent else 'KV'}"
    parts = zip((partition.recompute, partition.hidden, partition.kv), words, strict=True)
    return ", ".join(f"{n} layer{'s' if n > 1 else ''} {word}" for n, word in parts if n)


class LayerCosts(NamedTuple):
    """Seconds of one layer of all tokens of a restore."""

    io_h: float  # transfer of hidden states
    io_kv: float  # transfer of K and V
    c_h: float  # projection of hidden states to K and V
    c_tok: float  # recomputation from the layer's input
    l3_h: float = 0.0  # reading hidden states from L3 before the restore
    l3_kv: float = 0.0
    c_tok_last: float | None = None  # the last one ends with K and V; None: as in the paper

    def slower_recomputation(self, times: float) -> LayerCosts:
        last = None if self.c_tok_last is None else times * self.c_tok_last
        return self._replace(c_tok=times * self.c_tok, c_tok_last=last)

    def recomputation(self, layers: int) -> float:
        """Seconds to recompute the first ``layers`` layers."""
        if layers == 0 or self.c_tok_last is None:
            return layers * self.c_tok
        return (layers - 1) * self.c_tok + self.c_tok_last

    def reading(self, partition: Partition) -> float:
        return self.l3_h * partition.hidden + self.l3_kv * partition.kv

    def transfer(self, partition: Partition) -> float:
        return self.io_h * partition.hidden + self.io_kv * partition.kv

    def compute(self, partition: Partition) -> float:
        return self.recomputation(partition.recompute) + self.c_h * partition.hidden

    def least(self, partition: Partition) -> float:
        """Lower bound: seconds of the slower stream (the paper's objective, section 4.1.2)."""
        return self.reading(partition) + max(self.compute(partition), self.transfer(partition))


Objective = Callable[[LayerCosts, Partition], float]  # seconds, at least LayerCosts.least


def simulate(
    costs: LayerCosts,
    partition: Partition,
    ring: int | None = None,
    chunks: int = 1,
    pieces: int = 1,
) -> float:
    """Seconds of a restore on two streams, of transfers and of compute, each in layer order.

    Args:
        ring: Segments that the device has memory for; None: all. A transfer waits until the segment
            ``ring`` before it leaves that memory: by its projection, or for KV by its transfer.
        chunks: Segments of one layer; long restores arrive and are projected in parts.
        pieces: Parts of the first layer, if no layer is recomputed before it.
    """
    transfer = compute = costs.reading(partition)  # when each stream has done its work so far
    compute += costs.recomputation(partition.recompute)
    io_h, io_kv, c_h = costs.io_h / chunks, costs.io_kv / chunks, costs.c_h / chunks
    hidden, segments = partition.hidden * chunks, (partition.hidden + partition.kv) * chunks
    room = segments if ring is None else ring
    parts = 1 if partition.recompute else -(-pieces // chunks)  # of the first segment
    left: list[float] = []  # when each segment leaves the ring
    for index in range(segments):
        start = transfer if index < room else max(transfer, left[index - room])
        if index < hidden:
            transfer = start + io_h
            start = max(compute, transfer - io_h * (1 - 1 / parts))
            # Pieces go one after the other, at the pace of the slower stream.
            compute = max(start + c_h, transfer + c_h / parts)
            parts = 1  # other segments are projected whole
            left.append(compute)
        else:
            transfer = start + io_kv
            left.append(transfer)
    return max(compute, transfer)


def search(
    costs: LayerCosts,
    layers: int,
    objective: Objective = simulate,
    methods: Collection[LayerMethod] = LAYER_METHODS,
    allowed: Callable[[Partition], bool] = lambda partition: True,
) -> Partition:
    """The ``allowed`` partition of ``layers`` layers by ``methods`` with the least ``objective``
    (seconds). Ties go to the least recomputation, then to the most hidden states."""
    usable = set(methods)
    partitions = (
        Partition(recompute, hidden, layers - recompute - hidden)
        for recompute in range(layers + 1)
        for hidden in range(layers - recompute, -1, -1)
    )
    candidates = (one for one in partitions if one.methods <= usable and allowed(one))
    return _fastest(costs, candidates, objective)


def recompute_layers(
    costs: LayerCosts, partition: Partition, objective: Objective = simulate
) -> int:
    """Number of first layers that a restore of the stored ``partition`` recomputes: at least those
    not stored. Ties go to the smallest number."""
    numbers = range(partition.recompute, partition.layers + 1)
    choices = (partition.recomputing(first) for first in numbers)
    return _fastest(costs, choices, objective).recompute


def _fastest(costs: LayerCosts, partitions: Iterable[Partition], objective: Objective) -> Partition:
    """The first of the fastest; no simulation if the lower bound shows a partition is slower."""
    best, limit = None, math.inf
    for partition in partitions:
        if costs.least(partition) < limit:
            seconds = objective(costs, partition)
            if best is None or seconds < limit:
                best, limit = partition, seconds * _FASTER
    assert best is not None
    return best


def side_by_side(one: float, other: float, share: float = 1.0) -> float:
    """Seconds of work that two do together. Alone they take ``one`` or ``other`` (infinity:
    impossible), and the other one does at most ``share`` of it."""
    if not share or math.inf in (one, other):
        return min(one, other) if share == 1.0 else one
    return max(one * other / (one + other), one * (1 - share)) if one else 0.0


def completion_seconds(reading: float, recomputing: float, share: float = 1.0) -> float:
    """Seconds to have a hit whose back is read while its front, at most ``share``, is
    recomputed. ``reading`` and ``recomputing`` are seconds for all of it (infinity: impossible). If
    less than :data:`LEAST_PART` would be read, all of it is read and nothing is recomputed."""
    worth_it = side_by_side(reading, recomputing) > LEAST_PART * reading
    return side_by_side(reading, recomputing, share) if worth_it else reading


class SidesSeconds(NamedTuple):
    reading: float
    copying: float


@dataclass(frozen=True)
class Restore:
    """Storage and restore of each layer of a model, and their times. Any thread."""

    profile: Profile | None  # None: not measured, so restores recompute only what they must
    shape: ModelShape | None  # in encoded bytes; None without a profile
    partition: Partition  # fixed while a server runs
    # Tensor-parallel. Several recompute only what they must, because recomputation and transfers
    # both have collectives.
    ranks: int = 1
    chunk_tokens: int = sys.maxsize  # most of a projection, and length of the pipeline's ring
    recomputable: int = sys.maxsize  # number of first layers that can be recomputed here
    # Count as the paper: all segments have room, the first layer comes in one piece, and the last
    # recomputed layer is computed whole.
    paper: bool = False
    # Of the layers of ``shape`` that are not in ``partition``; None: there are none.
    sides: Sides | None = None

    @property
    def methods(self) -> tuple[LayerMethod, ...]:
        """Method of each layer; ``kv`` if the partition recomputes a layer that cannot be."""
        methods = [self.partition.method(layer) for layer in range(self.partition.layers)]
        for layer in range(self.recomputable, self.partition.recompute):
            methods[layer] = "kv"
        return tuple(methods)

    def layers(self, method: LayerMethod) -> tuple[int, ...]:
        return tuple(i for i, used in enumerate(self.methods) if used == method)

    def recomputing_first(self, most: int) -> Restore:
        """The same hidden layers, and at most the first ``most`` layers recomputed."""
        return replace(self, recomputable=most)

    def describe(self) -> str:
        return describe(Partition(*(len(self.layers(method)) for method in LAYER_METHODS)))

    def costs(self, tokens: int, prefix: float = 0, l3: L3Path = "none") -> LayerCosts:
        """Costs of one layer of ``tokens`` tokens; ``prefix`` tokens before them are on the device.
        Needs a profile, of one rank's device and bus; all ranks share its L3, if there is one."""
        assert self.profile is not None and self.shape is not None
        profile, model, ranks = self.profile, self.shape, self.ranks
        # A rank holds its share of the KV heads, at least one; it projects whole latents.
        kv_share = 1.0 if model.latent else -(-model.kv_heads // ranks) / model.kv_heads
        hidden_share = 1 / ranks if profile.gathers else 1.0
        load_share = hidden_share if model.latent else kv_share
        kv_bytes = model.kv_bytes + model.index_bytes / model.layers
        projection = model.projection_flops * kv_share
        # A mean of all layers, of which those with sides do not attend to all tokens.
        attending = 1 - self.sides.layers / model.layers if self.sides else 1
        pairs = attending * (tokens * int(prefix) + tokens * tokens / 2)
        c_tok = profile.dense.time(tokens * model.dense_flops / ranks)
        c_tok += profile.attention.time(pairs * model.attention_flops / ranks)
        # The engine leaves out attention and MLP of the last recomputed layer; the paper does not.
        c_last = profile.projection.time(tokens * (model.query_flops / ranks + projection))
        costs = LayerCosts(
            io_h=profile.hidden_copy.time(tokens * model.hidden_bytes * hidden_share),
            io_kv=profile.kv_load.time(tokens * kv_bytes * load_share),
            c_h=profile.projection.time(tokens * projection),
            c_tok=c_tok,
            c_tok_last=None if self.paper else min(c_tok, c_last),
        )
        if profile.l3 is None or l3 == "none":
            return costs
        l3_h = profile.l3.time(tokens * model.hidden_bytes)
        l3_kv = profile.l3.time(tokens * kv_bytes)
        if l3 == "overlapped":
            return costs._replace(io_h=max(costs.io_h, l3_h), io_kv=max(costs.io_kv, l3_kv))
        return costs._replace(l3_h=l3_h, l3_kv=l3_kv)

    def seconds(self, tokens: int, l3: L3Path = "none") -> float:
        """Seconds of a restore of ``tokens`` tokens, counted as in the paper."""
        sides = sum(self.sides_seconds(l3)) if self.partition.kv else 0
        return simulate(self.costs(tokens, prefix=0, l3=l3), self.partition) + sides

    def sides_seconds(self, l3: L3Path) -> SidesSeconds:
        """Seconds to read the window or state behind a hit's pages, and bring it to the device."""
        assert self.profile is not None
        if self.sides is None:
            return SidesSeconds(0, 0)
        size, disk = self.sides.size, None if l3 == "none" else self.profile.l3
        reading = disk.time(size) if disk else 0
        return SidesSeconds(reading, copying=self.profile.kv_load.time(size / self.ranks))

    def recompute(self, tokens: int, prefix: float) -> float:
        """Seconds to recompute all layers of pages, of ``tokens`` tokens after ``prefix``. Without
        a profile the number has no unit and shows only the growth."""
        if self.profile is None:
            return float(tokens)
        return self.costs(tokens, prefix).c_tok * self.partition.layers

    def prefill(self, tokens: int, prefix: float) -> float:
        """Seconds to compute all layers of the model, of ``tokens`` tokens after ``prefix``."""
        assert self.shape is not None
        return self.costs(tokens, prefix).c_tok * self.shape.layers

    def read(self, tokens: int, prefix: float) -> float:
        """Seconds to read ``tokens`` tokens from our store."""
        assert self.profile is not None and self.profile.l3 is not None and self.shape is not None
        return self.profile.l3.time(tokens * self.partition.bytes_per_token(self.shape))

    def load(self, tokens: int, prefix: float) -> float:
        """Seconds of a restore from host memory: the longest that a batch waits for it."""
        return self.seconds(tokens)

    def first_layers(self, tokens: int, prefix: int, slowdown: float = 1.0) -> int:
        """Number of first layers that a restore from host memory recomputes. ``slowdown``: seconds
        of recomputation relative to the profile. At infinity, with several ranks or without a
        profile, only layers that are not stored."""
        least = min(self.partition.recompute, self.recomputable)
        if not self.recomputable or self.profile is None or self.shape is None or not tokens:
            return least
        if self.ranks > 1 or slowdown == math.inf:
            return least
        costs = self.costs(tokens, prefix).slower_recomputation(slowdown)
        first = recompute_layers(costs, self.partition, self.pipeline(tokens))
        return min(first, self.recomputable)

    def fastest(
        self,
        tokens: int,
        l3: L3Path,
        methods: Collection[LayerMethod] | None = None,
        allowed: Callable[[Partition], bool] = lambda partition: True,
    ) -> Partition:
        """The ``allowed`` partition whose restores of ``tokens`` tokens are the fastest.
        ``methods`` None: those that servers store. Servers store every layer, because hits in host
        memory want the first ones, and a restore may still recompute them."""
        assert self.shape is not None
        hidden = self.shape.hidden_is_smaller and not self.sides
        stored: set[LayerMethod] = {"hidden", "kv"} if hidden else {"kv"}
        costs, layers = self.costs(tokens, prefix=0, l3=l3), self.partition.layers
        return search(costs, layers, self.pipeline(tokens), methods or stored, allowed)

    def pipeline(self, tokens: int) -> Objective:
        """:func:`simulate` for a restore of ``tokens`` tokens: with room on the device for some
        segments, and layers in chunks and pieces; in the paper room for all, and whole layers."""
        if self.paper:
            return simulate
        pieces = min(FIRST_PIECES, tokens // FIRST_PIECE_TOKENS) if self.ranks == 1 else 1
        ring = RUN_AHEAD * self.chunk_tokens // min(tokens, self.chunk_tokens)
        chunks = -(-tokens // self.chunk_tokens)
        return partial(simulate, ring=ring, chunks=chunks, pieces=max(1, pieces))
