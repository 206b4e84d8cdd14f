"""Restores whose front is recomputed while L3 brings the back, computed for an H100 or H200.

    python -m bench.depth [--out FOLDER]

Seconds, no GPU: everything follows from the cost model and the preset of ``hcache plan``, but for
the share of the peak FLOP/s that a prefill reaches. Prints a table; writes depth.json and
depth.png. The floor is what L3, bus and processor take if all three are busy from start to end.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness.report import COLOURS, OUT, markdown, picture, write
from bench.paper import MODELS as PAPER_MODELS
from bench.staircase import depth_costs
from hcache_backend.page import READ_BATCHES
from hcache_backend.partition.costs import LayerCosts, Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.pipeline import simulate
from hcache_backend.partition.plan import PartitionPlan
from hcache_backend.partition.presets import PRESETS, SSD_BYTES_PER_SECOND, preset_profile
from hcache_backend.partition.profile import Profile, Rate
from hcache_backend.partition.restore import Restore
from hcache_kernels.codecs import make_codec

Row = dict[str, Any]

PRESET = "h100"
"""An H200 has the same FLOP/s and the same bus."""
PREFILL_SHARE = 0.55
"""Share of the peak FLOP/s that a prefill reaches on it (assumed; a projection reaches more)."""
PAGE = 64
LENGTHS = (2048, 8192, 32768)
TABLE_TOKENS = 8192
DRAWN = ("Llama-3-8B", "Qwen3-32B", "Llama-3-70B TP4", "Llama-2-7B")
DOTS = {
    "recompute_ms": ("computed", "computed", "x"),
    "read_ms": ("all read, restored meanwhile", "ours, all read", "o"),
    "depth_ms": ("front recomputed meanwhile", "ours", "o"),
    "codec_ms": ("the same with exp4", "exp4", "o"),
}
"""What is drawn: label, colour and marker."""
FLOOR_TOKENS = 8
"""The floor counts pages of so many tokens, so that nothing is lost to the size of a page."""
SLICE_PAGES = 8
"""Pages that are recomputed together at most by two pointers..."""
POINTER_BATCHES = 16
"""...and batches of them that L3 would read the whole hit in."""
CODEC_SHARE = make_codec("exp4", 65536, torch.bfloat16).row_bytes / (
    65536 * torch.bfloat16.itemsize
)
"""Bytes of the lossless codec ``exp4`` over bytes in bfloat16."""


def _gqa(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, mlp_width: int
) -> ModelShape:
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        value_dim=128,
        mlp_width=mlp_width,
    )


MODELS = {
    "Llama-3-8B": (_gqa("llama", 32, 4096, 32, 8, 14336), 1),
    "Qwen3-8B": (_gqa("qwen3", 36, 4096, 32, 8, 12288), 1),
    "Qwen3-32B": (_gqa("qwen3", 64, 5120, 64, 8, 25600), 1),
    "Llama-3-70B TP4": (_gqa("llama", 80, 8192, 64, 8, 28672), 4),
    "Llama-2-7B": (PAPER_MODELS["Llama-2-7B"], 1),
}
"""Shape and tensor-parallel ranks by name."""
L3 = {
    "host memory": None,
    "1 SSD": SSD_BYTES_PER_SECOND,
    "100 Gb/s": 12e9,
    "4 SSDs": 4 * SSD_BYTES_PER_SECOND,
    "400 Gb/s RDMA": 48e9,
}
"""Bytes per second that are read; networks lose 4% to their protocols."""


class Setting(NamedTuple):
    """A hit.

    Attributes:
        model: A key of :data:`MODELS`.
        l3: A key of :data:`L3`.
        tokens: Its length; nothing is before it.
    """

    model: str
    l3: str
    tokens: int

    def profile(self, share: float = 1.0) -> Profile:
        """The machine, with segments of ``share`` of their bytes."""
        profile, rate = preset_profile(PRESET), L3[self.l3]
        prefill = Rate(per_second=PREFILL_SHARE * PRESETS[PRESET].flops)
        bus = Rate(per_second=profile.kv_load.per_second / share)
        l3 = Rate(per_second=rate / share) if rate is not None else None
        rates = {"l3": l3, "hidden_copy": bus, "kv_load": bus, "dense": prefill}
        return profile.model_copy(update={**rates, "attention": prefill})


def compute() -> list[Row]:
    """A row for every model, L3 and length."""
    return [
        restore(Setting(model, l3, tokens)) for tokens in LENGTHS for model in MODELS for l3 in L3
    ]


def restore(setting: Setting) -> Row:
    """Milliseconds of a hit by the pure methods and with the best depth.

    ``kv``: HiCache's path for K and V, L3 to host memory and then to the device. ``read``: all own
    pages are read, and restored meanwhile. ``depth``: front pages and first layers are recomputed
    meanwhile. ``codec``: the same with a lossless codec. ``pointers``: by :func:`two_pointers`.
    """
    (model, tp), tokens, profile = MODELS[setting.model], setting.tokens, setting.profile()
    pure = Restore(profile, model, Partition(0, 0, model.layers), tp, paper=True)
    ones = pure.costs(tokens, 0, "first")
    row: Row = {
        **setting._asdict(),
        "kv_ms": 1e3 * simulate(ones, Partition(0, 0, model.layers)),
        "recompute_ms": 1e3 * simulate(ones, Partition(model.layers, 0, 0)),
    }
    for name, share in (("depth", 1.0), ("codec", CODEC_SHARE)):
        profile = setting.profile(share)
        stored = PartitionPlan(profile, model, tokens, tp, "auto").stored
        costs = depth_costs(profile, model, stored, tokens // PAGE, PAGE, tp=tp)
        if name == "depth":
            row["read_ms"] = 1e3 * float(costs.seconds(READ_BATCHES)[0, 0])
            row["pointers_ms"] = 1e3 * two_pointers(setting, stored)
        depth, seconds = costs.best(READ_BATCHES)
        fine = depth_costs(profile, model, stored, tokens // FLOOR_TOKENS, FLOOR_TOKENS, tp=tp)
        row |= {
            f"{name}_ms": 1e3 * seconds,
            f"{name}_floor_ms": 1e3 * float(fine.busy().min()),
            f"{name}_tokens": depth.pages * PAGE,
            f"{name}_layers": depth.layers,
        }
    return row


def two_pointers(setting: Setting, stored: Partition) -> float:
    """Seconds if no split is fixed: a slice of the front after the other is recomputed, and L3 read
    from the back batch by batch, until they meet.

    Nobody waits for the other side. A slice is as long as it may be to end before L3 would have
    read all that is left: else a slow processor would hold up a fast L3.
    """
    (model, tp), profile = MODELS[setting.model], setting.profile()
    total = setting.tokens // PAGE
    batch = max(1, total // POINTER_BATCHES)

    def costs(pages: int, before: int = 0) -> LayerCosts:
        return Restore(profile, model, stored, tp).costs(pages * PAGE, before * PAGE, "first")

    page = costs(1)
    project = page.c_h * stored.hidden
    reading = page.reading(stored) or page.transfer(stored)
    bus = page.transfer(stored) if page.reading(stored) else 0.0
    front, back = 0, total
    recomputed = read = copied = 0.0

    def ends_in_time(pages: int) -> bool:
        """Whether the processor has recomputed a slice, and projects what is read, before L3 has
        read all that is left."""
        here = costs(pages, front).recomputation(model.layers)
        left = total - front - pages
        return recomputed + here + left * project <= read + (back - front - pages) * reading

    while front < back:
        slices = range(min(SLICE_PAGES, back - front), 0, -1) if recomputed <= read else ()
        pages = next(filter(ends_in_time, slices), 0)
        if pages:
            recomputed += costs(pages, front).recomputation(model.layers)
            front += pages
        else:
            pages = min(batch, back - front)
            back -= pages
            read += pages * reading
            copied = max(copied, read) + pages * bus
    return max(recomputed + (total - front) * project, copied)


def table_lines(results: list[Row]) -> str:
    """Speed over HiCache's path for K and V, and over the better of that and recomputing."""
    heads = (
        "model, L3",
        "KV path, ms",
        "recompute, ms",
        "all read, x",
        "with depth, x",
        "and codec, x",
        "over the better, x",
        "tokens + layers",
        "of the floor",
        "two pointers, of the floor",
    )
    return markdown(heads, [_cells(row) for row in results if row["tokens"] == TABLE_TOKENS])


def _cells(row: Row) -> list[object]:
    kv = row["kv_ms"]
    return [
        f"{row['model']}, {row['l3']}",
        f"{kv:.0f}",
        f"{row['recompute_ms']:.0f}",
        *(kv / row[f"{name}_ms"] for name in ("read", "depth", "codec")),
        min(kv, row["recompute_ms"]) / row["codec_ms"],
        f"{row['codec_tokens']:,} + {row['codec_layers']}",
        row["codec_ms"] / row["codec_floor_ms"],
        row["pointers_ms"] / row["depth_floor_ms"],
    ]


def draw(results: list[Row]) -> Any:
    """Speed over HiCache's path for K and V by L3, a panel for each of :data:`DRAWN`."""
    rows_of = {
        model: [r for r in results if r["model"] == model and r["tokens"] == TABLE_TOKENS]
        for model in DRAWN
    }
    gains = [row["kv_ms"] / row["codec_ms"] for rows in rows_of.values() for row in rows]
    figure = picture(
        f"Computed: {TABLE_TOKENS:,} tokens come back {min(gains):.1f} to {max(gains):.1f} times "
        "as fast as by HiCache's path for K and V (H100 or H200)"
    )
    panels = figure.subplots(1, len(DRAWN), sharey=True)
    for axes, (model, rows) in zip(panels, rows_of.items(), strict=True):
        places = range(len(rows))
        for key, (label, colour, marker) in DOTS.items():
            speeds = [row["kv_ms"] / row[key] for row in rows]
            axes.plot(speeds, places, marker, color=COLOURS[colour], label=label, markersize=7)
        axes.axvline(1, color=COLOURS["file"], label="K and V, L3 then bus (HiCache)")
        axes.set_yticks(places, [row["l3"] for row in rows], fontsize=10)
        axes.set_title(model, fontsize=10)
        axes.set_xlabel("times as fast", fontsize=10)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].invert_yaxis()
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder for depth.json and depth.png")
    out = parser.parse_args().out
    results = compute()
    print(table_lines(results))
    write(out, "depth", results, draw)


if __name__ == "__main__":
    main()
