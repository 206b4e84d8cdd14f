"""What a GPU should be asked first: six steps, the most telling first, within a budget of time.

    bench/gpu/first.sh [--budget 600] [--only overlap tests ...]

Needs torch, triton, numpy, pytest and xxhash; neither SGLang nor anything from the network.

- overlap: whether copies run beside matrix products, by the programs of the gather kernel
- tests: ``pytest -m gpu`` of kernels, and of capture and restores with recorded graphs
- restore: 4,096 and 1,024 tokens of Llama-2-7B by every method
- capture: decode graphs of 16 and 64 requests, a prefill graph, eager prefill
- kernels: at 1,024 and 4,096 rows
- order: streams that are late and memory that is freed early

Each step is a process of its own. One that fails, or uses up its share of the time that is left,
does not stop the next one. ``out/DEVICE/first.json`` is written after every step, beside the steps'
own files, and has their rows. ``--dry-run`` goes through everything on the CPU in a minute or two:
its times mean nothing. Exit status 1: a step failed, or something was wrong.
"""

from __future__ import annotations

import sys

from bench.gpu import program, steps
from bench.gpu.steps import Step

TESTS = "-m gpu -q -p no:cacheprovider --tb=short tests/kernels tests/gpu"
MODEL = "--models Llama-2-7B"
STEPS = {
    # name: (module, arguments on a GPU, weight in the budget)
    "overlap": ("bench.gpu.overlap", "", 2),
    "tests": ("pytest", TESTS, 4),
    "restore": ("bench.gpu.restore", f"{MODEL} --tokens 4096 1024 --rates 0", 4),
    "capture": ("bench.gpu.capture", f"{MODEL} --batches 16 64", 4),
    "kernels": ("bench.gpu.kernels", f"{MODEL} Qwen3-8B --rows 1024 4096", 4),
    "order": ("bench.gpu.order", "", 1),
}


def main() -> int:
    parser = steps.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS), help="steps")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    chosen = []
    for name, (module, arguments, share) in STEPS.items():
        if name in options.only:
            tests = module == "pytest"  # without a GPU they are collected, and skipped
            given = ["--dry-run"] if options.dry_run and not tests else arguments.split()
            chosen.append(Step(name, module, given, share, writes=not tests))
    return steps.run_all("first", chosen, options)


if __name__ == "__main__":
    sys.exit(main())
