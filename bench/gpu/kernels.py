"""The kernels against what the device can do. Needs only torch and triton (matplotlib: a picture).

    python -m bench.gpu.kernels [--models Llama-2-7B ...] [--rows 256 1024 ...]

- projection: ``project_kv`` both ways, the bare GEMM of the same shape (the faster of both weight
  layouts) and the same operation composed of torch's; medians of CUDA events, cold L2 cache
- codecs, gathering and scattering parts of pages in pinned memory, and both beside products:
  kernels_transfers.py
- correctness of both ways on the same random data, against float64

Prints tables and writes ``out/DEVICE/kernels.json`` and
``kernels.png``. ``--dry-run`` runs everything on tiny shapes under Triton's interpreter instead:
its times mean nothing, and it writes nothing unless ``--out`` names a folder.
"""

from __future__ import annotations

import sys

from bench.gpu import program
from bench.gpu.interpreted import interpret


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument(
        "--rows", type=int, nargs="*", help="only these numbers of tokens, multiples of 64"
    )
    options = parser.parse_args()
    if options.dry_run:
        interpret()
    program.require_device(parser, dry_run=options.dry_run)

    import torch

    from bench.gpu import kernels_projection, kernels_report, kernels_transfers

    device = "interpreter" if options.dry_run else torch.cuda.get_device_name()
    results = program.Results("kernels", device, options)
    kernels_projection.measure(options.dry_run, options.models, options.rows, results)
    kernels_transfers.measure(options.dry_run, options.rows, results)
    print(kernels_report.projection_table(results.of("projection")))
    print(f"\n{kernels_report.transfer_tables(results.of('transfers'))}")
    return results.finish(kernels_report.draw)


if __name__ == "__main__":
    sys.exit(main())
