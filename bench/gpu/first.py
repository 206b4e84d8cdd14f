"""The first script for a GPU: six steps, the most telling first, within a budget of time.

    bench/gpu/first.sh [--budget 500] [--only tests overlap ...]

Needs torch, triton, numpy, pytest and xxhash; neither SGLang nor anything from the network.

- tests: ``pytest -m gpu`` of capture and restores with recorded graphs, of streams that are late,
  of memory that is freed early, and of kernels
- questions: parts of a server's start, the scheduler's time for a backup and for a load, matrix
  products beside a backup, and registering host memory
- overlap: whether copies run beside matrix products
- restore: 4,096 and 1,024 tokens of Llama-2-7B by every method
- capture: decode graphs of 16 and 64 requests, a prefill graph, eager prefill
- kernels: at 1,024 and 4,096 rows

Each step is a process of its own. ``out/DEVICE/first.json`` is written after every step, beside the
steps' own files, and has their rows; ``first.tar`` beside it has all of these files. ``OUT`` names
another folder than ``out``. ``--dry-run`` goes through everything on the CPU in a minute or two:
its times mean nothing. Exit status 1: a step failed, or something was wrong.
"""

import sys

from bench.gpu import program, steps
from bench.gpu.steps import Step

MODEL = "--models Llama-2-7B"
STEPS = {
    # name: (module, arguments on a GPU, weight in the budget)
    "tests": ("bench.gpu.tests", "", 6),
    "questions": ("bench.gpu.questions", "", 3),
    "overlap": ("bench.gpu.overlap", "", 2),
    "restore": ("bench.gpu.restore", f"{MODEL} --tokens 4096 1024 --rates 0", 4),
    "capture": ("bench.gpu.capture", f"{MODEL} --batches 16 64", 4),
    "kernels": ("bench.gpu.kernels", f"{MODEL} Qwen3-8B --rows 1024 4096", 4),
}


def main() -> int:
    parser = steps.parser(__doc__)
    parser.add_argument("--only", nargs="*", choices=STEPS, default=list(STEPS), help="steps")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    chosen = []
    for name, (module, arguments, share) in STEPS.items():
        if name in options.only:
            given = ["--dry-run"] if options.dry_run else arguments.split()
            chosen.append(Step(name, module, given, share))
    return steps.run_all("first", chosen, options)


if __name__ == "__main__":
    sys.exit(main())
