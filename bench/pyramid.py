"""Krul's recomputation pyramid beside the staircase that a restore chooses, computed.

    python -m bench.pyramid [--out FOLDER]

Seconds, no GPU: everything follows from the cost model of ``hcache plan``. Krul (section 6) loads K
and V from host memory while first tokens are recomputed: in the first layer most, linearly fewer
towards the last one. A restore of this package recomputes front pages, and first layers of the
pages behind them (``bench/staircase.py``). The setting is the paper's: LLaMA-7B,
4,096 tokens, an A100 on PCIe 4, once with the rates of the preset and once with the FLOP/s at which
the paper's 2:3 of recomputing and loading end together. Prints a table; writes pyramid.json and
pyramid.png.

Pyramids are modelled in their favour: loading and recomputing wait for each other nowhere. Their
cuts are as the paper says, behind a whole layer; ``ends_early`` has them end with K and V.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.harness.report import COLOURS, OUT, grouped_bars, markdown, picture, write
from bench.paper import MODELS
from bench.staircase import depth_costs, layer_work
from hcache_backend.format.units import units_per_group
from hcache_backend.krul.pair_forms import PairSlot
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.presets import preset_profile
from hcache_backend.partition.profile import Profile, Rate
from hcache_backend.partition.restore import READ_BATCHES
from hcache_kernels.codecs import Cut

Row = dict[str, Any]
Numbers = npt.NDArray[np.float64]

MODEL = MODELS["Llama-2-7B"]
"""LLaMA-7B has the same shape."""
PRESET = "a100-80g"
TOKENS = 4096
PAGE = 64
RECOMPUTED = 0.4
"""Share of the tokens that Krul recomputes: 2:3 (section 8.3)."""
STEPS = 40
"""Shares of recomputed tokens, and slopes of a pyramid, that are tried."""
PAIRED = 0.5
"""Share of the layers that are in pairs, as in MiniCache and in the paper's comparison with it."""


class Pyramids(NamedTuple):
    """How many tokens are recomputed: a number that is linear in that of the layer.

    Attributes:
        mean: Shares of the tokens over all layers, ``[n]``.
        slope: Share in the first layer less that in the last one, ``[n]``.
    """

    mean: Numbers
    slope: Numbers

    @property
    def tokens(self) -> Numbers:
        """In every layer, ``[n, layers]``."""
        place = 0.5 - np.arange(MODEL.layers) / (MODEL.layers - 1)
        return np.round(TOKENS * (self.mean[:, None] + self.slope[:, None] * place))

    def busy(self, profile: Profile, *, ends_early: bool = False) -> Numbers:
        """Seconds of the bus or of the processor, whichever works longer, ``[n]``."""
        work = layer_work(MODEL, 1, gathers=profile.gathers)
        load = ((TOKENS - self.tokens) * work.kv_bytes).sum(1) / profile.kv_load.per_second
        return np.maximum(load, recomputation(profile, self.tokens, ends_early=ends_early))


def recomputation(profile: Profile, tokens: Numbers, *, ends_early: bool) -> Numbers:
    """Seconds to recompute the first ``tokens[:, layer]`` tokens in each layer, ``[n]``.

    With ``ends_early`` tokens that the next layer does not need end with their K and V.
    """
    work = layer_work(MODEL, 1, gathers=profile.gathers)
    last = np.zeros_like(tokens)
    if ends_early:
        further = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        last, tokens = tokens - further, further
    dense = (tokens * work.dense).sum(1) / profile.dense.per_second
    attention = (tokens**2 / 2 * work.attention).sum(1) / profile.attention.per_second
    return dense + attention + (last * work.last).sum(1) / profile.projection.per_second


def pyramids() -> Pyramids:
    """All that are tried: none has fewer than no tokens, or more than all, in a layer."""
    mean, slope = (np.ravel(part) for part in np.mgrid[0 : STEPS + 1, 0 : STEPS + 1] / STEPS)
    return Pyramids(mean, 2 * np.minimum(mean, 1 - mean) * slope)


def paired_bytes() -> float:
    """Bytes of pages with layers in pairs over those of plain ones."""
    width, dtype = MODEL.kv_heads * MODEL.head_dim, torch.bfloat16
    pieces = units_per_group(PAGE, width)
    pair = PairSlot(Cut(width, PAGE // pieces, pieces=pieces), MODEL.head_dim, dtype).slot_bytes
    return 1 - PAIRED + PAIRED * pair / (2 * PAGE * MODEL.kv_bytes)


def profiles() -> dict[str, Profile]:
    """The machines by name."""
    preset = preset_profile(PRESET)
    flat = Pyramids(np.array([RECOMPUTED]), np.zeros(1)).tokens
    load = (1 - RECOMPUTED) * MODEL.layers * TOKENS * MODEL.kv_bytes / preset.kv_load.per_second
    # The processor is done when the bus is.
    share = recomputation(preset, flat, ends_early=False).item() / load
    rate = Rate(per_second=share * preset.dense.per_second)
    rates = dict.fromkeys(("projection", "dense", "attention"), rate)
    return {"preset": preset, "2:3 in balance": preset.model_copy(update=rates)}


def compute() -> list[Row]:
    """Milliseconds on each machine, with plain K and V and with half of the layers in pairs."""
    return [
        restore(name, profile, share)
        for name, profile in profiles().items()
        for share in (1.0, paired_bytes())
    ]


def restore(machine: str, profile: Profile, share: float) -> Row:
    """One row: K and V have ``share`` of their plain bytes."""
    bus = Rate(per_second=profile.kv_load.per_second / share)
    profile = profile.model_copy(update={"kv_load": bus})
    stored = Partition(0, 0, MODEL.layers)
    costs = depth_costs(profile, MODEL, stored, TOKENS // PAGE, PAGE)
    depth, seconds = costs.best(READ_BATCHES)
    paper = Pyramids(np.array([RECOMPUTED, RECOMPUTED]), np.array([0.0, 2 * RECOMPUTED]))
    flat, steep = paper.busy(profile)
    tried = pyramids()
    every = tried.busy(profile)
    whole = np.full((1, MODEL.layers), float(TOKENS))
    milliseconds = {
        "recompute": recomputation(profile, whole, ends_early=True).item(),
        "load": costs.seconds(READ_BATCHES)[0, 0],
        "flat": flat,
        "pyramid": steep,
        "best_pyramid": every.min(),
        "early_pyramid": tried.busy(profile, ends_early=True).min(),
        "staircase": seconds,
    }
    kept = (1 - depth.pages * PAGE / TOKENS) * (1 - depth.layers / MODEL.layers)
    return {
        "machine": machine,
        "share": share,
        **{f"{name}_ms": 1e3 * float(value) for name, value in milliseconds.items()},
        "staircase_tokens": depth.pages * PAGE,
        "staircase_layers": depth.layers,
        "staircase_bytes": share * kept,
        "pyramid_bytes": share * (1 - RECOMPUTED),
    }


def table_lines(results: list[Row]) -> str:
    """Milliseconds by way and machine."""
    heads = (
        "machine, bytes of K and V",
        "recompute, ms",
        "load, ms",
        "2:3 in every layer",
        "2:3 pyramid",
        "best pyramid",
        "ends early",
        "staircase",
        "tokens + layers",
        "bytes kept, pyramid",
        "staircase",
    )
    names = ("recompute", "load", "flat", "pyramid", "best_pyramid", "early_pyramid", "staircase")
    return markdown(
        heads,
        [
            (
                f"{row['machine']}, {row['share']:.2f}",
                *(f"{row[f'{name}_ms']:.1f}" for name in names),
                f"{row['staircase_tokens']:,} + {row['staircase_layers']}",
                row["pyramid_bytes"],
                row["staircase_bytes"],
            )
            for row in results
        ],
    )


def draw(results: list[Row]) -> Any:
    """Milliseconds on each machine."""
    series = {
        "recompute": "recompute_ms",
        "load K and V": "load_ms",
        "2:3 in every layer": "flat_ms",
        "2:3 pyramid": "pyramid_ms",
        "best pyramid": "best_pyramid_ms",
        "staircase": "staircase_ms",
    }
    rows = [
        {**row, "name": f"{row['machine']}, {row['share']:.2f} of the bytes"} for row in results
    ]
    gains = [row["best_pyramid_ms"] / row["staircase_ms"] for row in rows]
    figure = picture(
        f"Computed: the staircase is {min(gains):.2f} to {max(gains):.2f} times as fast as the "
        "best pyramid"
    )
    axes = figure.subplots()
    title = f"{TOKENS:,} tokens of LLaMA-7B"
    names = ("computed", "file", "int8", "fp8", "pairs", "ours")
    colours = {label: COLOURS[name] for label, name in zip(series, names, strict=True)}
    grouped_bars(axes, title, rows, "name", series, "%.0f", colours)
    axes.set_ylabel("ms to restore", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for pyramid.json")
    out = parser.parse_args().out
    results = compute()
    print(table_lines(results))
    write(out, "pyramid", results, draw)


if __name__ == "__main__":
    main()
