"""Restores from a folder of pages while they are being read. Needs only torch and triton.

    python -m bench.gpu.eager [--dir FOLDER] [--tokens 4096] [--rates 0 8 4 2] [--layers N]

Pages of Llama-2-7B's shape, 64 tokens each, stand in files; they are read with O_DIRECT into pinned
memory by eight threads, and go through the restore pipeline that the server uses:

- layer-wise: hidden states; all pages are read, then all are restored
- eager: hidden states; in the server's read batches, each restored while the next one is read
- eager, GDS: the same, but read straight into device memory: by GPUDirect Storage through KvikIO
  (`pip install kvikio-cu13`) where it works. The row says where bytes pass through host memory all
  the same (compat), or why it was skipped. The server cannot do this: HiCache wants pages in host
  memory first. It shows what that costs
- kv: K and V; all pages are read, then copied

``--rates`` in GB/s slow the reading down; 0 is the disk as it is. One more rate is measured: where
reading and restoring hidden states take equally long. K and V are compared with those of the
forward pass after every restore. Times are medians of five, from the first read to the last layer.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import program
from bench.gpu.eager_methods import Scene, with_gds
from bench.gpu.program import Device, Results, Row
from bench.gpu.restore_methods import History
from bench.gpu.restore_models import build
from bench.gpu.shapes import LLAMA_7B, PAGE
from bench.harness.report import markdown

REPEATS = 5


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--dir", type=Path, help="where pages are written; a temporary folder")
    parser.add_argument("--tokens", type=int, default=4096, help="of the history")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--rates", type=float, nargs="*", default=(0.0, 8.0, 4.0, 2.0))
    options, device, results = program.start(parser, "eager")
    if options.dry_run:
        options.tokens, options.rates = 20 * PAGE, [0.0]
    if options.tokens % PAGE:
        parser.error(f"--tokens {options.tokens}: must be a multiple of {PAGE}")
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hcache-bench-") as folder:
        measure(device, Path(folder), options, results)
    print(table(results.of()))
    return results.finish(draw)


def measure(device: Device, folder: Path, options: Any, results: Results) -> None:
    """One row per rate and method."""
    shape = LLAMA_7B.tiny() if device.dry_run else LLAMA_7B
    if options.layers:
        shape = replace(shape, layers=options.layers)
    with torch.inference_mode():
        layers = build(shape, device.kind, device.dtype)
        history = History(device, shape, layers, [options.tokens])
        scene = Scene(device, history, "hidden", folder / "hidden")
        hidden, kv = (
            scene.through_host(),
            Scene(device, history, "kv", folder / "kv").through_host(),
        )
        straight, gds = with_gds(scene)
        methods = {"layer-wise": hidden, "eager": hidden, "eager, GDS": straight, "kv": kv}
        alone = statistics.median(hidden.timed(hidden.restore_all) for _ in range(REPEATS))
        balanced = scene.bytes / alone / 1e9
        for rate in sorted({*options.rates, balanced}, key=lambda rate: rate or float("inf")):
            for method, restores in methods.items():
                row = {
                    "model": shape.name,
                    "layers": shape.layers,
                    "tokens": options.tokens,
                    "gb_s": rate or None,
                    "balanced": rate == balanced,
                    "method": method,
                    "gds": gds if restores and restores is straight else None,
                    "skipped": None if restores else gds,
                }
                said = f"{rate or 'no limit of'} GB/s, {method}"
                if restores is None:
                    results.add(row, said)
                    continue
                restores.rate = rate * 1e9
                restore = restores.eager if method.startswith("eager") else restores.layerwise
                times, right = [], True
                for _ in range(1 if device.dry_run else REPEATS):
                    restores.poison()
                    times.append(1e3 * restores.timed(restore))
                    right = right and history.is_right()
                read = statistics.median(restores.timed(restores.read) for _ in range(3))
                row |= {
                    "ms": statistics.median(times),
                    "read_ms": 1e3 * read,
                    "restore_ms": 1e3 * alone if restores is hidden else None,
                    "bytes": restores.scene.bytes,
                    "right": right,
                }
                results.add(row, said)
        for restores in {hidden, kv, *([straight] if straight else [])}:
            restores.close()
    device.release()


def table(rows: list[Row]) -> str:
    """One line per row."""
    heads = ("GB/s", "method", "ms", "read, ms", "restore, ms", "right", "GDS, or why skipped")
    parts = ("method", "ms", "read_ms", "restore_ms", "right")
    return markdown(
        heads,
        (
            (
                f"{row['gb_s']:.1f}{' =' if row['balanced'] else ''}"
                if row["gb_s"]
                else "no limit",
                *(row.get(part) for part in parts),
                row["skipped"] or row["gds"],
            )
            for row in rows
        ),
    )


def draw(results: Row) -> Any:
    """Time by the rate of reading."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    rates = list(dict.fromkeys(row["gb_s"] for row in rows))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        if mine[0]["skipped"]:
            label = f"{method}: skipped, {mine[0]['skipped']}"
            axes.plot([], [], " ", label=label)
            continue
        label = f"{method} ({mine[0]['gds']})" if mine[0]["gds"] else method
        axes.plot(range(len(rates)), [row["ms"] for row in mine], marker="o", label=label)
    axes.set_xticks(range(len(rates)), [f"{rate:.1f}" if rate else "no limit" for rate in rates])
    axes.set_xlabel("reading, GB/s")
    axes.set_ylabel("first read to last layer, ms")
    axes.set_yscale("log")
    axes.set_title(f"Restores of {rows[0]['tokens']} tokens from a folder, {results['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(main())
