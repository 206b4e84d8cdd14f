"""The paper's Table 3 and figures 11, 12 and 13, from the cost model and the simulated pipeline.

Everything here is computed from the presets (``hcache_backend.partition.presets``), with one
compute share and one bus share for all of it. What the paper's text says of a figure stands beside
it; its bars themselves are pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hcache_backend.partition.costs import LayerCosts, layer_costs
from hcache_backend.partition.layers import Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.presets import COMPUTE_SHARE, PRESETS, preset_profile
from hcache_backend.partition.profile import Profile, Rate
from hcache_backend.partition.solver import closed_form, objective_with, search
from hcache_backend.partition.timeline import finish
from hcache_backend.partition.token_wise import TILE, TokenSplit, search_tokens, token_wise_makespan

Row = dict[str, Any]
TOKENS = 1024
"""History of the paper's experiments where it says how long it is (6.2.2, 6.3.2)."""


def _mha(family: str, layers: int, heads: int, mlp_width: int, *, gated: bool) -> ModelShape:
    return ModelShape(
        family=family,
        layers=layers,
        hidden=128 * heads,
        heads=heads,
        kv_heads=heads,
        head_dim=128,
        value_dim=128,
        mlp_width=mlp_width,
        gated=gated,
    )


MODELS = {
    "Llama-2-7B": _mha("llama", 32, 32, 11008, gated=True),
    "Llama-2-13B": _mha("llama", 40, 40, 13824, gated=True),
    "OPT-30B": _mha("opt", 48, 56, 28672, gated=False),
}


class Setting(NamedTuple):
    """A restore on a machine.

    Attributes:
        model: A key of :data:`MODELS`.
        preset: A key of the presets.
        ssds: SSDs that L3 is striped over; 0: host memory.
        tp: Tensor-parallel ranks.
        tokens: Tokens that are restored.
    """

    model: str
    preset: str = "a100-40g"
    ssds: int = 0
    tp: int = 1
    tokens: int = TOKENS

    def __str__(self) -> str:
        device = PRESETS[self.preset].name + (f" x {self.tp}" if self.tp > 1 else "")
        storage = f"{self.ssds} SSD{'s' if self.ssds > 1 else ''}" if self.ssds else "DRAM"
        return f"{self.model}, {device}, {storage}"


def table_3() -> Iterator[Row]:
    """Schedules and bytes a token (6.1.3), and the schedule of section 6.3.2."""
    cases = (
        (Setting("Llama-2-7B", ssds=4), Partition(0, 31, 1), 256 / 132),
        (Setting("Llama-2-13B", ssds=4), Partition(0, 36, 4), 400 / 210),
        (Setting("OPT-30B", ssds=4, tp=4), Partition(8, 40, 0), 672 / 280),
        (Setting("Llama-2-13B", ssds=1), Partition(9, 31, 0), None),
    )
    for setting, paper, paper_ratio in cases:
        model = MODELS[setting.model]
        costs = _costs(setting)
        found, closed = search(costs, model.layers), closed_form(costs, model.layers)
        assert closed is not None
        yield {
            "setting": str(setting),
            "paper": _counts(paper),
            "ours": _counts(found),
            "closed_form": _counts(closed),
            "paper_kv_bytes_of_ours": paper_ratio,
            "kv_bytes_of_ours": model.layers * model.kv_bytes / found.bytes_per_token(model),
        }


def figure_11() -> dict[str, list[Row]]:
    """Restoration speed on other platforms, with other SSDs, and of other lengths (6.2)."""
    # Those whose memory holds the weights; the text does not say which model ran where.
    platforms = [
        *(Setting("Llama-2-7B", name) for name in ("a100-40g", "a30", "rtx4090", "l20", "h800")),
        *(Setting("Llama-2-13B", name) for name in ("a100-40g", "l20", "h800")),
        Setting("OPT-30B", "a100-40g", tp=4),
        Setting("OPT-30B", "h800"),
    ]
    ssds = [
        *(Setting(f"Llama-2-{size}", ssds=n) for size in ("7B", "13B") for n in (1, 2, 3, 4)),
        *(Setting("OPT-30B", ssds=n, tp=4) for n in (4, 8, 12, 16)),
    ]
    lengths = [
        Setting(name, ssds=4, tp=4 if name == "OPT-30B" else 1, tokens=1024 << doubled)
        for name in MODELS
        for doubled in range(5)
    ]
    return {
        "platforms": list(_speeds(platforms)),
        "ssds": list(_speeds(ssds)),
        "lengths": list(_speeds(lengths)),
    }


def implied_compute_share(setting: Setting, over_kv: float) -> float:
    """The share of the peak FLOP/s with which hidden states and KV are so much faster than KV."""
    costs = _costs(setting)
    return COMPUTE_SHARE * costs.c_h / costs.io_h / _projection_cost(over_kv)


def implied_recompute_cost(over_kv: float, over_recompute: float) -> float:
    """``c_tok / c_h`` where hidden states and KV are so much faster than either pure method."""
    return 2 / over_kv * over_recompute / _projection_cost(over_kv)


def recompute_cost(setting: Setting) -> float:
    """``c_tok / c_h`` by FLOPs."""
    costs = _costs(setting)
    return costs.c_tok / costs.c_h


def over_kv_with(setting: Setting, compute_share: float) -> float:
    """How much faster than KV a restore is with another compute share."""
    model = MODELS[setting.model]
    profile = _with_compute_share(preset_profile(setting.preset, setting.ssds), compute_share)
    costs = layer_costs(profile, model, setting.tokens, tp=setting.tp)
    return finish(costs, Partition(0, 0, model.layers)) / finish(costs, search(costs, model.layers))


def _projection_cost(over_kv: float) -> float:
    """``x = c_h / io_h`` where the projection is the slower part.

    In the time of all hidden states on the bus, KV takes 2 and the two together ``2 x / (1 + x)``.
    """
    took = 2 / over_kv
    return took / (2 - took)


def figure_12() -> Iterator[Row]:
    """The bubble-free scheduler against hidden states alone and against no hidden states (6.3.1).

    The text does not name the three settings. These are its extremes: one SSD is what it calls slow
    I/O, an A30 is what it calls low computation capability.
    """
    cases = (
        ("compute-sufficient", Setting("Llama-2-7B", ssds=1)),
        ("compute-sufficient", Setting("Llama-2-13B", ssds=1)),
        ("balanced", Setting("Llama-2-7B", ssds=4)),
        ("balanced", Setting("Llama-2-13B", ssds=4)),
        ("IO-sufficient", Setting("Llama-2-7B", "a30")),
    )
    for kind, setting in cases:
        found = _methods(setting)
        hcache = found["hcache"]
        yield {
            "kind": kind,
            "setting": str(setting),
            "ms": {name: seconds * 1e3 for name, seconds in found.items()},
            "over_hidden_only": found["hidden"] / hcache,
            "over_naive_hybrid": found["naive hybrid"] / hcache,
            "over_kv": found["kv"] / hcache,
            "hidden_only_over_kv": found["kv"] / found["hidden"],
        }


BALANCED_SHARE = 0.63
"""Compute share that the paper's 24 GB/s for the 7B model stand for (see presets), the lower of the
two that it gives. With it 31 + 9 layers end together, as they do in the paper's profile."""


def figure_13() -> Iterator[Row]:
    """Splitting by tokens against splitting by layers (6.3.2): 13B, one SSD, 1024 tokens."""
    model = MODELS["Llama-2-13B"]
    for share in (COMPUTE_SHARE, BALANCED_SHARE):
        profile = _with_compute_share(preset_profile("a100-40g", 1), share)
        costs = layer_costs(profile, model, TOKENS)
        best = search(costs, model.layers)
        by_layers = finish(costs, best)
        row: Row = {
            "compute_share": share,
            "layers": {
                "best": {**_counts(best), "ms": by_layers * 1e3},
                "paper's": {"slower": finish(costs, Partition(9, 31, 0)) / by_layers - 1},
            },
        }
        for order, first in (("recomputed last", False), ("recomputed first", True)):
            splits = {
                "paper's naive": TokenSplit(230, 794, 0, first),
                "paper's rounded": TokenSplit(256, 768, 0, first),
                "best": search_tokens(profile, model, TOKENS, recompute_first=first),
            }
            row[order] = {
                name: {
                    "hidden": split.hidden,
                    "recompute": split.recompute,
                    "kv": split.kv,
                    "slower": token_wise_makespan(profile, model, split) / by_layers - 1,
                }
                for name, split in splits.items()
            }
        yield row


def long_context_gain() -> float:
    """How much faster than layers a split by tokens is at its best: 13B, one SSD, 16K tokens."""
    setting = Setting("Llama-2-13B", ssds=1, tokens=16384)
    model, profile = MODELS[setting.model], preset_profile(setting.preset, setting.ssds)
    costs = _costs(setting)
    splits = (
        TokenSplit(setting.tokens - hidden, hidden, 0, recompute_first=True)
        for hidden in range(0, setting.tokens + 1, TILE)
    )
    by_tokens = min(token_wise_makespan(profile, model, split) for split in splits)
    return finish(costs, search(costs, model.layers)) / by_tokens - 1


def rings() -> Iterator[Row]:
    """How deep the ring of device buffers must be: what the paper, which has room, leaves out."""
    for setting in (
        Setting("Llama-2-13B", ssds=1),
        Setting("Llama-2-13B", ssds=4),
        Setting("Llama-2-7B", "a30"),
    ):
        model = MODELS[setting.model]
        costs = _costs(setting)
        unlimited = search(costs, model.layers)
        fastest = finish(costs, unlimited)
        for ring in (2, 3, 4, 8, 12, 16, 24):
            found = search(costs, model.layers, objective_with(ring))
            yield {
                "setting": str(setting),
                "ring": ring,
                "unlimited": _counts(unlimited),
                "slower": finish(costs, unlimited, ring) / fastest - 1,
                "best": _counts(found),
                "best_slower": finish(costs, found, ring) / fastest - 1,
            }


def _costs(setting: Setting) -> LayerCosts:
    profile = preset_profile(setting.preset, setting.ssds)
    return layer_costs(profile, MODELS[setting.model], setting.tokens, tp=setting.tp)


def _methods(setting: Setting) -> dict[str, float]:
    """Seconds of a restore by the partition, by its ablations and by the pure methods."""
    costs, layers = _costs(setting), MODELS[setting.model].layers
    partitions = {
        "hcache": search(costs, layers),
        "hidden": Partition(0, layers, 0),
        "naive hybrid": search(costs, layers, methods=("recompute", "kv")),
        "kv": Partition(0, 0, layers),
        "recompute": Partition(layers, 0, 0),
    }
    return {name: finish(costs, partition) for name, partition in partitions.items()}


def _speeds(settings: Iterable[Setting]) -> Iterator[Row]:
    for setting in settings:
        found = _methods(setting)
        yield {
            "setting": str(setting),
            "model": setting.model,
            "device": PRESETS[setting.preset].name,
            "tp": setting.tp,
            "ssds": setting.ssds,
            "tokens": setting.tokens,
            "tokens_per_second": {
                name: setting.tokens / found[name] for name in ("hcache", "kv", "recompute")
            },
            "over_kv": found["kv"] / found["hcache"],
            "over_recompute": found["recompute"] / found["hcache"],
        }


def _with_compute_share(profile: Profile, share: float) -> Profile:
    rates = {
        name: Rate(per_second=getattr(profile, name).per_second * share / COMPUTE_SHARE)
        for name in ("projection", "dense", "attention")
    }
    return profile.model_copy(update=rates)


def _counts(partition: Partition) -> dict[str, int]:
    return {
        "hidden": partition.hidden,
        "kv": partition.kv,
        "recompute": partition.recompute,
    }
