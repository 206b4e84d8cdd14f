"""K and V of a history with two layers in the place of one, half of the layers in pairs.

Pairs are MiniCache's fixed ones, or chosen for every history as Krul does: from the attention of
its last tokens.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from bench.accuracy.engine import KV, Engine, History, LayerProbe
from bench.harness.methods import PAGE_SIZE
from hcache_backend.config import KrulOption
from hcache_backend.krul.pair_forms import MergedPair, changes_of_merges
from hcache_backend.krul.pairs import Pair, attention_sums, closest_pairs
from hcache_kernels.codecs import Codec, Cut, UnsupportedRows

Choice = Callable[[Engine, History], Sequence[Pair]]
PAIRED = 0.5  # share of the layers that are in pairs, as MiniCache has it


def fixed(layers: int) -> list[Pair]:
    """Every two neighbours in the deeper half of the layers (MiniCache); as many as others make."""
    pairs = math.ceil(PAIRED * layers / 2)
    return [(low, low + 1) for low in range(layers - 2 * pairs, layers, 2)]


def by_attention(engine: Engine, history: History) -> list[Pair]:
    """The layers whose last tokens attend most alike."""
    probes = [
        LayerProbe(q, kv, layer.kernel.scaling)
        for q, kv, layer in zip(history.queries, history.kv, engine.layers, strict=True)
    ]
    distances = attention_sums(probes).distances
    # Of any layers: a server also asks a threshold which of them may be merged.
    return closest_pairs(distances, range(len(distances)), PAIRED)


CHOICES: dict[str, Choice] = {
    "MiniCache's pairs": lambda engine, _: fixed(len(engine.layers)),
    "pairs by attention": by_attention,
}


def merge_changes(engine: Engine, history: History) -> torch.Tensor:
    """How much a merge of each two layers changes K and V, as a server finds out at its start:
    float32 ``[layers, layers]``."""
    form = MergedPair(engine.page_cut, engine.kv_shape[1], engine.dtype)
    units = [_units(form.cut, planes) for planes in history.kv]
    return changes_of_merges(form, units)


def mergeable(engine: Engine) -> dict[str, float] | None:
    """How many pairs of layers a server may merge by default, of how many, and the change of K or V
    by the merge that changes least; None if merges do not take the type of K and V."""
    try:
        changes = merge_changes(engine, engine.at_start())
    except UnsupportedRows:
        return None
    above = changes[torch.ones_like(changes).triu(1).bool()]
    few = int((above <= KrulOption().error).sum())
    return {"may_be_merged": few, "pairs": len(above), "least_change": float(above.min())}


@dataclass
class PairedLayers:
    """Keeps K and V of histories in pages with pairs of layers. ``chosen`` counts the histories
    that had each pair."""

    engine: Engine
    form: Codec
    choose: Choice
    chosen: Counter[str] = field(default_factory=Counter)

    def restore(self, history: History) -> int:
        """Write K and V to the pool as they come back; returns how many tokens do not fit into
        pages and were kept as they are."""
        kv = list(history.kv)
        lost = torch.zeros(len(history.slots) // PAGE_SIZE, dtype=torch.bool)
        for first, second in self.choose(self.engine, history):
            kv[first], kv[second], fits = _round_trip(self.form, kv[first], kv[second])
            lost |= ~fits
            self.chosen[f"{first}, {second}"] += 1
        for layer, planes in zip(self.engine.layers, kv, strict=True):
            self.engine.pool.store(layer.kernel, history.slots, *planes)
        return int(lost.sum()) * PAGE_SIZE


def _round_trip(form: Codec, first: KV, second: KV) -> tuple[KV, KV, torch.Tensor]:
    """Two layers as they come back, pages that do not fit as they were; and which pages fit."""
    units = [_units(form.cut, planes) for planes in (first, second)]
    encoded, fits = form.encode_units(torch.cat(units, dim=1))
    back, both = [], form.decode_units(encoded).split(2, dim=1)
    for planes, exact, decoded in zip((first, second), units, both, strict=True):
        kept = torch.where(fits[:, None, None, None, None], decoded, exact)
        k, v = (kept[:, part].reshape(planes[0].shape).to(planes[0].device) for part in (0, 1))
        back.append((k, v))
    return back[0], back[1], fits


def _units(cut: Cut, planes: KV) -> torch.Tensor:
    """``[pages, 2, pieces, tokens, width]`` of K and V of whole pages, on the CPU."""
    shape = (-1, cut.pieces, cut.tokens, cut.width)
    return torch.stack([plane.cpu().reshape(shape) for plane in planes], dim=1)
