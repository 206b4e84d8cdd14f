"""How many exceptions ``exp4`` needs for K, V and hidden states, beside other ways to choose bases.

    python -m bench.segment_codec [--models gqa paired] [--only-models] [--out FOLDER]

- synthetic K of pages of 16 and 64 tokens, 64 to 1024 values wide: normal values whose channels
  have scales of their own (lognormal, sigma 1); of which 1/64 stand out, 50 times; of which 4 are
  shifted by 100; all of that
- with ``--models`` K before and after RoPE, V and hidden states of fixture models or checkpoints;
  with ``--only-models`` nothing else, in ``segment_codec_models``
- ways to choose: a window of exponents per unit (exp4: 14 and the most frequent one outside; the 15
  most frequent), per token, per channel, per 16 channels. An exception costs a byte everywhere; a
  window costs one. Units of hidden states are rows
- share of plain bytes that the unit with the most exceptions needs; exp4 gives each unit 0.766
- what 3 and 4 bits for exponents would make of float16
- speed on this CPU, beside a plain copy

Ends with status 1 if a unit does not fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.fixtures.models import chosen
from bench.fixtures.text import corpus, encoder
from bench.harness.program import failing
from bench.harness.report import OUT, markdown, write
from hcache_backend.units import units_per_group
from hcache_kernels.codecs.exp4.reference import WINDOW, decode_units, encode_units, form_of
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

VALUES = 1 << 21
"""Of each synthetic case."""
SHAPES = [(tokens, width) for tokens in (16, 64) for width in (64, 128, 256, 512, 1024)]
KINDS = ("scales", "outliers", "offsets", "all")
WAYS = {
    "exp4": "14 and one",
    "top": "15 most frequent",
    "token": "per token",
    "channel": "per channel",
    "channels": "per 16 channels",
}
MODEL_TOKENS = 1024
Row = dict[str, Any]


def synthetic(kind: str, units: int, tokens: int, width: int, seed: int) -> torch.Tensor:
    """K of a kind of :data:`KINDS`: float32 ``[units, tokens, width]``."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(units, tokens, width, generator=source)

    def chosen_channels(count: int) -> torch.Tensor:
        order = torch.rand(units, width, generator=source).argsort(1)
        return torch.zeros(units, width).scatter_(1, order[:, :count], 1.0)[:, None]

    if kind in ("scales", "all"):
        values *= torch.randn(units, 1, width, generator=source).exp()
    if kind in ("outliers", "all"):
        values *= 1 + 49 * chosen_channels(width // 64)
    if kind in ("offsets", "all"):
        values += 100 * chosen_channels(4)
    return values


def model_parts(folder: Path | str) -> Iterator[tuple[str, int, torch.Tensor]]:
    """K, V and hidden states of every layer of a model on one text.

    Yields:
        Of what, of which layer, and bfloat16 ``[tokens, width]``.
    """
    stub_torchvision()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    text = "".join(line for file in corpus().held_out for line in file)
    ids = encoder(Path(folder))(text[: 20 * MODEL_TOKENS])[:MODEL_TOKENS]
    seen: dict[tuple[str, int], torch.Tensor] = {}

    def keep(layer: int, before: str, after: str) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: torch.Tensor) -> None:
            seen[before, layer] = inputs[0][0]
            seen[after, layer] = output[0]

        return hook

    for layer, block in enumerate(model.model.layers):
        attention = block.self_attn
        attention.k_proj.register_forward_hook(keep(layer, "hidden states", "K before RoPE"))
        attention.v_proj.register_forward_hook(keep(layer, "hidden states", "V"))
    with torch.no_grad():
        cache = model(torch.tensor([ids]), use_cache=True).past_key_values
    for layer in range(len(model.model.layers)):
        k = cache.layers[layer].keys[0]  # [heads, tokens, head_dim]
        seen["K after RoPE", layer] = k.transpose(0, 1).flatten(1)
    for (part, layer), values in seen.items():
        yield part, layer, values


def histograms(exponents: torch.Tensor, bins: int = 256) -> torch.Tensor:
    """How often each exponent occurs in each row of ``[rows, n]``: int64 ``[rows, bins]``."""
    numbers = exponents.int() + bins * torch.arange(len(exponents), dtype=torch.int32)[:, None]
    return torch.bincount(numbers.flatten(), minlength=bins * len(exponents)).view(-1, bins)


def outside_window(counts: torch.Tensor, window: int) -> torch.Tensor:
    """Values outside the window that holds most, of each row of histograms."""
    up_to = torch.nn.functional.pad(counts.cumsum(1), (1, 0))
    return up_to[:, -1] - (up_to[:, window:] - up_to[:, :-window]).amax(1)


def needed(values: torch.Tensor) -> dict[str, Row]:
    """Exceptions of units by each of :data:`WAYS`.

    Args:
        values: bfloat16 ``[units, tokens, width]``.

    Returns:
        Exceptions in percent of the values, mean and of the worst unit; and the share of plain
        bytes that this unit needs.
    """
    units, tokens, width = values.shape
    n = tokens * width
    exponents = values.view(torch.int16) >> 7 & 0xFF
    counts = histograms(exponents.flatten(1))
    ways = {"top": (n - counts.topk(WINDOW + 1).values.sum(1), 1)}
    by_channel = exponents.transpose(1, 2)
    rows_of = {
        "token": exponents,
        "channel": by_channel,
        "channels": by_channel.unflatten(1, (-1, 16)).flatten(2),
    }
    for name, rows in rows_of.items() if tokens > 1 else ():
        found = outside_window(histograms(rows.flatten(0, 1)), WINDOW + 1)
        ways[name] = found.view(units, -1).sum(1), rows.shape[1]
    encoded, fits = encode_units(values.flatten(1))
    ways["exp4"] = _exceptions(encoded, n), 2
    found_of = {
        name: {
            "mean": 100 * found.double().mean().item() / n,
            "most": 100 * found.max().item() / n,
            "share": (1.5 * n + found.max().item() + windows) / (2 * n),
        }
        for name, (found, windows) in ways.items()
    }
    found_of["exp4"]["unfit"] = int((~fits).sum())
    return found_of


def _exceptions(encoded: torch.Tensor, n: int) -> torch.Tensor:
    """Codes 0 of each encoded unit."""
    packed = encoded[:, n : n + n // 2]
    return (packed & 0xF == 0).sum(1) + (packed >> 4 == 0).sum(1)


def float16_shares(values: torch.Tensor) -> Row:
    """Share of float16's bytes that the worst unit would need with short codes for exponents."""
    n = values[0].numel()
    counts = histograms((values.half().view(torch.int16) >> 10 & 0x1F).flatten(1), bins=32)
    return {
        str(bits): ((11 + bits) / 8 * n + 1 + outside_window(counts, 2**bits - 1).max().item())
        / (2 * n)
        for bits in (3, 4)
    }


def synthetic_rows() -> Iterator[Row]:
    for tokens, width in SHAPES:
        for seed, kind in enumerate(KINDS):
            units = VALUES // (tokens * width)
            values = synthetic(kind, units, tokens, width, seed)
            yield {
                "what": kind,
                "tokens": tokens,
                "width": width,
                "units": units,
                "ways": needed(values.bfloat16()),
                "float16": float16_shares(values),
            }


def model_rows(name: str, folder: Path | str) -> Iterator[Row]:
    """One row per part of a model, over all layers: units of pages of 64 tokens."""
    parts: dict[str, list[torch.Tensor]] = {}
    for part, _, values in model_parts(folder):
        parts.setdefault(part, []).append(values)
    for part, layers in parts.items():
        width = layers[0].shape[1]
        tokens = 1 if part == "hidden states" else 64 // units_per_group(64, width)
        values = torch.cat([layer.reshape(-1, tokens, width) for layer in layers])
        yield {
            "what": f"{name}: {part}",
            "tokens": tokens,
            "width": width,
            "units": len(values),
            "ways": needed(values),
            "float16": float16_shares(values),
        }


def speed() -> Row:
    """Encoding and decoding 16 units of 65,536 values in this process, beside a copy."""
    units = synthetic("scales", 16, 64, 1024, seed=0).bfloat16().flatten(1)
    encoded, _ = encode_units(units)
    target = torch.empty_like(units)
    took = {
        "encode": _seconds(lambda: encode_units(units)),
        "decode": _seconds(lambda: decode_units(encoded, units.shape[1])),
        "copy": _seconds(lambda: target.copy_(units)),
    }
    found = {f"{name}_gbs": 1e-9 * units.nbytes / seconds for name, seconds in took.items()}
    ratios = {f"{name}_of_copy": took[name] / took["copy"] for name in ("encode", "decode")}
    return {**found, **ratios, "threads": torch.get_num_threads()}


def _seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The shortest time that ``work`` took."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def table_lines(results: Mapping[str, Any]) -> str:
    """Exceptions of exp4, and shares of plain bytes by each way: the worst of the shapes."""
    heads = ("values", "units", "exceptions, %", "at most", "not fitting")
    groups: dict[str, list[Row]] = {}
    for row in results["rows"]:
        groups.setdefault(row["what"], []).append(row)
    lines = []
    for what, rows in groups.items():
        mine = [row["ways"]["exp4"] for row in rows]
        shares = (
            max((row["ways"][way]["share"] for row in rows if way in row["ways"]), default=None)
            for way in WAYS
        )
        float16 = (max(row["float16"][bits] for row in rows) for bits in ("3", "4"))
        lines.append(
            (
                what,
                f"{sum(row['units'] for row in rows):,}",
                f"{max(way['mean'] for way in mine):.2f}",
                f"{max(way['most'] for way in mine):.2f}",
                sum(way["unfit"] for way in mine),
                *(share and f"{share:.3f}" for share in (*shares, *float16)),
            )
        )
    return markdown((*heads, *WAYS.values(), "float16, 3 bits", "4 bits"), lines)


def draw(results: Mapping[str, Any]) -> Any:
    """Share of plain bytes that the worst unit of each kind of values needs."""
    from matplotlib.figure import Figure

    worst: dict[str, float] = {}
    for row in results["rows"]:
        share = row["ways"]["exp4"]["share"]
        worst[row["what"]] = max(share, worst.get(row["what"], 0.0))
    given = form_of(65536).size / 2 / 65536
    figure = Figure(figsize=(8.5, 1.2 + 0.32 * len(worst)), layout="constrained")
    axes = figure.subplots()
    axes.barh(list(worst), list(worst.values()), color="#4c72b0")
    for place, share in enumerate(worst.values()):
        axes.text(share, place, f" {share:.4f}", va="center", fontsize=9)
    axes.axvline(given, color="black", linewidth=0.8)
    axes.set_xlim(0.745, given + 0.006)
    axes.invert_yaxis()
    axes.set_xlabel("bytes that the worst unit needs, of plain; from 0.745 on", fontsize=9)
    fit = "All units fit" if max(worst.values()) <= given else "Some units do not fit"
    axes.set_title(f"{fit} into the {given:.3f} that exp4 gives each (the line)", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="*", default=[], help="fixture models (trained if missing) or folders"
    )
    parser.add_argument("--only-models", action="store_true", help="no synthetic K")
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder for segment_codec.json and .png"
    )
    options = parser.parse_args()
    with failing():
        models = [chosen(name, quick=False) for name in options.models]
    rows = [] if options.only_models else [*synthetic_rows()]
    for model in models:
        rows += model_rows(model.name, model.path)
    speeds = speed()
    results = {"rows": rows, "speed": speeds}
    print(table_lines(results))
    print("CPU: " + ", ".join(f"{name} {value:.2f}" for name, value in speeds.items()))
    name = "segment_codec_models" if options.only_models else "segment_codec"
    write(options.out, name, results, draw)
    if unfit := sum(row["ways"]["exp4"]["unfit"] for row in rows):
        sys.exit(f"{unfit} units do not fit")


if __name__ == "__main__":
    main()
