"""The second script for a GPU: real SGLang servers, method by method, in a budget of time.

    bench/gpu/serve.sh [--budget 500] [--model Llama-3-8B] [--methods hcache-eager file ...]

Needs SGLang and this package with aiohttp; nothing from the network. Models have the shape of
published ones and random weights, without a tokenizer. Both together take 30 GB of ``--dir``.

Each method is one server, with SGLang's own defaults. First comes Llama-3-8B (grouped-query
attention, bfloat16) with this package's own defaults, except that every hit is read (``min_gain``
0). Then comes Llama-2-7B (multi-head attention) by several methods. These force hidden mode, so a
server that refuses it fails. Requests are:

- two prompts of 4,096 tokens at once, and 64 requests at once that generate 128 tokens
- both again, with L3 alone having them: the prompts, and the pages that decode steps filled
- four requests that decode, alone and while one of the prompts comes back from L3

A step fails if a history does not come back whole, or if the server refuses to recompute layers:
the reason is printed, and the step still asks the rest. Later steps run all the same.
``out/DEVICE/serve.json`` is written after every server, beside each one's own file, and has their
rows; ``serve.tar`` has all of them. Exit status 1: a step failed.

``--dry-run`` asks less of a tiny model on the CPU engine, in float32, and tokens must also be the
same after a restore. In 16 bits tokens may differ by rounding: the tables count them, for KV pages
too. Only a GPU shows whether capture works in decode graphs, and whether copies overlap.
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bench.gpu import program, steps
from bench.gpu.shapes import LLAMA_7B, LLAMA_8B
from bench.gpu.steps import Step

METHODS = {
    LLAMA_8B.name: ("hcache-eager",),
    LLAMA_7B.name: ("hcache-hidden", "file", "recompute", "hcache-hidden-eager"),
}
"""Of the models that are served unless told otherwise, in order."""
NEEDED = ("sglang", "aiohttp", "pydantic", "transformers", "safetensors")


def main() -> int:
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:  # nothing that follows could be imported
        print(
            f"bench/gpu/serve.sh serves nothing: {', '.join(missing)} not installed in this Python;"
            " bench/gpu/first.sh needs none of it",
            file=sys.stderr,
        )
        return 2
    from bench.gpu.serve_models import MODELS
    from bench.gpu.serve_requests import METHODS_SERVED
    from bench.harness.server import unwind_when_terminated

    parser = steps.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, help="whose shape; default: two")
    parser.add_argument(
        "--methods", nargs="*", choices=METHODS_SERVED, help="default: as the model has them"
    )
    parser.add_argument("--dir", type=Path, help="for weights and L3; a folder in that of TMPDIR")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    unwind_when_terminated()
    dry = ["--dry-run"] if options.dry_run else []
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="hcache-") as scratch:
        chosen = []
        for name in [options.model] if options.model else METHODS:
            model = str(Path(scratch) / name)
            weights = [name, model, *dry]
            chosen.append(
                Step(f"weights-{name}", "bench.gpu.serve_models", weights, 4, writes=False)
            )
            methods = options.methods or METHODS.get(name, METHODS[LLAMA_7B.name])
            for number, method in enumerate(methods):
                share = 3 if number else 9  # the first one compiles
                step, arguments = f"serve-{name}-{method}", [method, model, *dry]
                chosen.append(Step(step, "bench.gpu.serve_requests", arguments, share))
        return steps.run_all("serve", chosen, options, TMPDIR=scratch)


if __name__ == "__main__":
    sys.exit(main())
