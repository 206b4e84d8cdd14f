"""What a GPU should be asked next: real SGLang servers, method by method, in a budget of time.

    bench/gpu/serve.sh [--budget 500] [--model Llama-2-7B] [--methods hcache-hidden file ...]

Needs SGLang and this package with aiohttp; nothing from the network. The model has the shape of a
published one and random weights; it has no tokenizer.

Each method is one server, with SGLang's own defaults: scheduling overlaps with the GPU, decode
steps replay graphs, and attention is by the backend that SGLang chooses. Hidden mode is forced,
first for the method on which everything depends, so a server that refuses it fails. Asked are:

- two prompts of 4,096 tokens at once, three times
- 64 requests at once that generate 128 tokens, three times
- both again, with L3 alone having them: the prompts, and the pages that decode steps filled
- four requests that decode, alone and while one of the prompts comes back from L3: what copies and
  slices of recomputation cost them

A step fails if a history does not come back whole. ``out/DEVICE/serve.json`` is written after every
server, beside each one's own file, and has their rows; ``serve.tar`` has all of them. Exit status
1: a step failed.

``--dry-run`` asks less of a tiny model on the CPU engine, in float32, where tokens must also be the
same after a restore. A CPU has neither graphs nor another attention backend, and its streams are
threads, so only a GPU shows whether capture works in decode graphs, whether copies overlap with the
forward pass, and how long anything takes. In 16 bits tokens may differ by rounding: the tables say
how many are the same, for KV pages too.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench.gpu import program, steps
from bench.gpu.serve_models import MODELS
from bench.gpu.serve_requests import METHODS_SERVED
from bench.gpu.steps import Step
from bench.harness.server import unwind_when_terminated

METHODS = ("hcache-hidden", "file", "recompute", "hcache-hidden-eager", "hcache-kv-eager")


def main() -> int:
    parser = steps.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="Llama-2-7B", help="whose shape")
    parser.add_argument("--methods", nargs="*", choices=METHODS_SERVED, default=METHODS)
    parser.add_argument("--dir", type=Path, help="for weights and L3; a folder in that of TMPDIR")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    if find_spec("sglang") is None:
        parser.error("SGLang is not installed here; bench/gpu/first.sh does without")
    unwind_when_terminated()
    dry = ["--dry-run"] if options.dry_run else []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hcache-") as scratch:
        model = str(Path(scratch) / options.model)
        chosen = [
            Step("weights", "bench.gpu.serve_models", [options.model, model, *dry], 3, writes=False)
        ]
        for number, method in enumerate(options.methods):
            arguments, share = [method, model, *dry], 4 if number else 8  # the first one compiles
            chosen.append(Step(f"serve-{method}", "bench.gpu.serve_requests", arguments, share))
        return steps.run_all("serve", chosen, options, TMPDIR=scratch)


if __name__ == "__main__":
    sys.exit(main())
