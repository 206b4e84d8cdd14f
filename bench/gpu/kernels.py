"""The kernels against what the device can do. Needs only torch and triton (matplotlib: a picture).

    python bench/gpu/kernels.py [--models Llama-2-7B ...] [--rows 256 1024 ...]

- projection: ``project_kv`` both ways, the bare GEMM of the same shape (the faster of both weight
  layouts) and the same operation composed of torch's; medians of CUDA events, cold L2 cache
- codecs, and gathering and scattering parts of pages in pinned memory: kernels_transfers.py
- correctness of both ways on the same random data, against float64

Prints tables and whether the goals are met, and writes ``bench/results/DEVICE/kernels.json`` and
``kernels.png``. ``--dry-run`` runs everything on tiny shapes under Triton's interpreter instead:
its times mean nothing, and it writes nothing unless ``--results`` names a folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--rows", type=int, nargs="*", help="only these numbers of tokens")
    parser.add_argument("--dry-run", action="store_true", help="tiny, interpreted, on the CPU")
    parser.add_argument("--results", type=Path, help="folder for the device's results")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, below
    find_package()

    import kernels_projection
    import kernels_report
    import kernels_transfers
    import torch
    import triton

    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run does without")
    device = "interpreter" if options.dry_run else torch.cuda.get_device_name()
    projections = kernels_projection.measure(options.dry_run, options.models, options.rows)
    transfers = kernels_transfers.measure(options.dry_run)
    goals = kernels_report.projection_goals(projections)
    goals += kernels_transfers.transfer_goals(transfers)
    kernels_report.print_projections(projections)
    kernels_transfers.print_transfers(transfers)
    kernels_report.print_goals(goals)

    folder = options.results
    if folder is None and not options.dry_run:
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        folder = ROOT / "bench" / "results" / slug
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "device": device,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "goals": goals,
            "projection": projections,
            "transfers": transfers,
        }
        (folder / "kernels.json").write_text(json.dumps(content, indent=1))
        kernels_report.draw(device, projections, folder / "kernels.png")
    wrong = [row for row in [*projections, *transfers] if not row["right"]]
    return 1 if wrong else 0


def find_package() -> None:
    """Make the kernels importable from the checkout where the package is not installed."""
    if importlib.util.find_spec("hcache_kernels") is not None:
        return
    folder = ROOT / "kernels"
    spec = importlib.util.spec_from_file_location(
        "hcache_kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["hcache_kernels"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    sys.exit(main())
