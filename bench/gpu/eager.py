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
reading and restoring hidden states take equally long. K and V are compared with the projection's
after every restore. Times are medians of five, from the first read to the last layer.

Prints a table and writes ``out/DEVICE/eager.json`` and
``eager.png``. ``--dry-run`` runs it on tiny shapes on the CPU, with a stand-in for KvikIO: its
times mean nothing, and it writes nothing unless ``--out`` names a folder.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu import eager_report, program
from bench.gpu.devices import Device
from bench.gpu.eager_methods import PAGE, Scene, with_gds
from bench.gpu.program import Results
from bench.gpu.restore_models import SHAPES

REPEATS = 5


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--dir", type=Path, help="where pages are written; a temporary folder")
    parser.add_argument("--tokens", type=int, default=4096, help="of the history")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--rates", type=float, nargs="*", default=(0.0, 8.0, 4.0, 2.0))
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    if options.dry_run:
        options.tokens, options.rates = 20 * PAGE, [0.0]
    if options.tokens % PAGE:
        parser.error(f"--tokens {options.tokens}: must be a multiple of {PAGE}")
    device = Device(options.dry_run)
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hcache-bench-") as folder:
        results = Results("eager", device.name, options)
        measure(device, Path(folder), options, results)
    print(eager_report.table(results.of()))
    return results.finish(eager_report.draw)


def measure(device: Device, folder: Path, options: Any, results: Results) -> None:
    """One row per rate and method."""
    shape = SHAPES[0].tiny() if device.dry_run else SHAPES[0]
    if options.layers:
        shape = replace(shape, layers=options.layers)
    with torch.inference_mode():
        scenes = {
            kind: Scene(device, shape, options.tokens, kind, folder / kind)
            for kind in ("hidden", "kv")
        }
        hidden, kv = (scene.through_host() for scene in scenes.values())
        straight, gds = with_gds(scenes["hidden"])
        methods = {"layer-wise": hidden, "eager": hidden, "eager, GDS": straight, "kv": kv}
        alone = statistics.median(hidden.timed(hidden.restore_all) for _ in range(REPEATS))
        balanced = scenes["hidden"].bytes / alone / 1e9
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
                    right = right and restores.scene.is_right()
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


if __name__ == "__main__":
    sys.exit(main())
