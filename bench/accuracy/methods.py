"""Ways to keep the K and V of a history: the bytes that each keeps, and how it puts K and V back.

To add one: a function that makes it from an :class:`Engine`, in :data:`MAKERS`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.accuracy import pairs
from bench.accuracy.engine import Engine, History
from bench.harness.methods import PAGE_SIZE
from hcache_backend.krul.pair_forms import PairSlot
from hcache_backend.restore.recompute import TokenSpan
from hcache_kernels.codecs import (
    CODECS,
    SEGMENT_CODECS,
    Codec,
    UnsupportedRows,
    make_codec,
    make_segment_codec,
)

EXACT = "exact"


@dataclass(frozen=True)
class Method:
    """A way to keep K and V.

    Attributes:
        bytes_per_token: Of all layers.
        restore: Writes K and V of a history to the pool, which has lost them; returns how many
            tokens could not be kept so, and were computed again or kept as they are.
        pairs: How many histories had which layers in pairs; None: it makes none.
    """

    name: str
    bytes_per_token: int
    restore: Callable[[History], int]
    pairs: Mapping[str, int] | None = None


def exact(engine: Engine) -> Iterator[Method]:
    """K and V as the model wrote them (KV pages)."""

    def restore(history: History) -> int:
        for layer, kv in zip(engine.layers, history.kv, strict=True):
            engine.pool.store(layer.kernel, history.slots, *kv)
        return 0

    yield Method(EXACT, engine.kv_bytes * len(engine.layers), restore)


def encoded(engine: Engine) -> Iterator[Method]:
    """K and V in pages, through every codec that holds them."""
    shape = engine.page_cut, engine.kv_shape[1], engine.dtype
    for codec in _possible(SEGMENT_CODECS, lambda name: make_segment_codec(name, *shape)):
        size = codec.segment_bytes * len(engine.layers) // PAGE_SIZE
        yield Method(f"KV, {codec.name}", size, partial(_restore_encoded, engine, codec))


def paired(engine: Engine) -> Iterator[Method]:
    """K and V in pages with half of the layers in pairs: merged, and for comparison in ``int8``."""
    try:
        slot = PairSlot(engine.page_cut, engine.kv_shape[1], engine.dtype)
        forms = [*slot.forms.values()]  # merged comes first
    except UnsupportedRows:
        return
    layers = len(engine.layers)
    number = len(pairs.fixed(layers))  # as every choice makes
    for label, choose in pairs.CHOICES.items():
        for form in forms if choose is pairs.by_attention else forms[:1]:
            page = (layers - 2 * number) * engine.kv_bytes * PAGE_SIZE + number * form.segment_bytes
            kept = pairs.PairedLayers(engine, form, choose)
            name = f"KV, {label}, {form.name}"
            yield Method(name, page // PAGE_SIZE, kept.restore, pairs=kept.chosen)


def recomputed(engine: Engine) -> Iterator[Method]:
    """All layers by the package's recomputation, as a restore computes its first layers."""

    recomputer = engine.recomputer
    if recomputer is None:
        return

    def restore(history: History) -> int:
        span = TokenSpan(np.array(history.ids, dtype=np.int64), history.slots[:0])
        recomputer.recompute(len(engine.layers), history.slots, [span])
        return 0

    yield Method("recomputed", 0, restore)


def hidden(engine: Engine) -> Iterator[Method]:
    """All layers projected from hidden states, through every codec that holds them."""
    for codec in _possible(CODECS, lambda n: make_codec(n, engine.hidden_size, engine.dtype)):
        restore = partial(_restore_hidden, engine, codec)
        yield Method(f"hidden, {codec.name}", codec.row_bytes * len(engine.layers), restore)


MAKERS = (exact, encoded, paired, recomputed, hidden)


def _possible(names: Collection[str], make: Callable[[str], Codec]) -> Iterator[Codec]:
    for name in names:
        try:
            yield make(name)
        except UnsupportedRows:
            continue  # a server would store with codec none instead


def _restore_encoded(engine: Engine, codec: Codec, history: History) -> int:
    lost = torch.zeros(
        len(history.slots) // PAGE_SIZE, dtype=torch.bool, device=history.slots.device
    )
    pages = torch.arange(len(lost), device=lost.device)
    for layer, planes in zip(engine.layers, history.kv, strict=True):
        memory = lost.new_empty((len(pages), codec.segment_bytes), dtype=torch.uint8)
        fits = codec.encode_pages(planes, pages, memory, pages, 0)
        lost |= ~fits
        back = [plane.clone() for plane in planes]
        # A server keeps pages that do not fit as they are.
        codec.decode_pages(memory[fits], back, pages[fits])
        engine.pool.store(layer.kernel, history.slots, *back)
    return int(lost.sum()) * PAGE_SIZE


def _restore_hidden(engine: Engine, codec: Codec, history: History) -> int:
    lost = torch.zeros_like(history.slots, dtype=torch.bool)
    for layer, rows in zip(engine.layers, history.hidden, strict=True):
        encoded, ok = codec.encode(rows)
        lost |= ~ok
        # A server does not store rows that the codec cannot hold: they are computed again.
        back = torch.where(ok[:, None], codec.decode(encoded), rows)
        engine.projector.project_to_pool(layer, back, history.positions, history.slots)
    return int(lost.sum())
