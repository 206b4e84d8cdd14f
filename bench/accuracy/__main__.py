"""What the ways to keep a history's K and V change in what a model says next.

A text is Python source with planted lines, which give values to keys (bench/fixtures/text.py). Its
first part is the history, whose K and V are kept by each method and restored. The turn behind it is
scored: divergence from a run without a cache (KL), negative log-likelihood (NLL), how often both
find the same token most likely, and how often a value is recalled that the history gave, by
distance. Methods: K and V as they are, through every codec and with half of the layers in pairs,
recomputed, hidden states through every codec, and each layer alone from hidden states.

Everything runs in SGLang's model runner in this process, with the package's own projections, codecs
and recomputation. --model is a fixture (gqa or paired, trained when it is first asked for; smollm2
or smollm2-mha) or any model that SGLang serves, with its tokenizer.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.accuracy import report
from bench.fixtures.models import chosen
from bench.fixtures.text import Texts, corpus
from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.program import at_least, failing, model_name, parser, stamp, steps
from bench.harness.report import OUT, write
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parser("bench.accuracy", __doc__)
    add = parsed.add_argument
    add("--model", type=model_name, required=True, help="a folder, a name or a fixture")
    add("--quick", action="store_true", help="the fixture that is trained in a minute")
    add("--dtype", default="bfloat16", help="type that the model is served in")
    add("--texts", type=at_least(1), default=16, help="how many are scored")
    add("--history", type=at_least(PAGE_SIZE), default=384, help="tokens that are kept")
    add("--turn", type=at_least(8), default=128, help="tokens that are scored")
    add("--whole", action="store_true", help="no method that restores a single layer")
    add("--out", type=Path, default=OUT, help="folder for accuracy_MODEL.json and .png")
    given = parsed.parse_args(arguments)
    if given.history % PAGE_SIZE:
        parsed.error(f"--history {given.history} must be a whole number of {PAGE_SIZE}-token pages")
    machine = find_machine()
    if machine.device == "cpu" and "SGLANG_USE_CPU_ENGINE" not in os.environ:
        # What lets SGLang run on a CPU must be there before the interpreter starts.
        command = [sys.executable, "-m", "bench.accuracy", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, {**os.environ, **cpu_engine_env()})
    with failing(), tempfile.TemporaryDirectory(prefix="hcache-accuracy-") as scratch:
        results = measured(given, machine, Path(scratch))
        print(report.table_lines(results))
        write(given.out, f"accuracy_{results['name']}", results, report.draw)


def measured(given: Any, machine: Machine, scratch: Path) -> dict[str, Any]:
    """The content of ``accuracy_MODEL.json``."""
    from bench.accuracy.engine import Engine
    from bench.accuracy.measure import Sizes, measure
    from bench.accuracy.methods import methods

    model = chosen(given.model, quick=given.quick)
    sizes = Sizes(given.texts, given.history, given.turn)
    logging.disable(logging.WARNING)
    options = server_options(
        METHODS["recompute"],
        machine,
        model.path,
        scratch,
        pool_tokens=2 * (given.history + given.turn),
        dtype=given.dtype,
        extra_args=("--disable-cuda-graph",),  # graphs of decode steps, of which there are none
    )
    engine = Engine(options)
    tokenizer = engine.tokenizer

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    if not encode("import os\n"):  # what transformers makes up where there is none knows no token
        raise MachineError(f"--model {given.model}: it needs the files of its tokenizer")
    texts = Texts(encode, corpus().held_out)
    with steps(sizes.texts) as (_, advance):
        found = measure(engine, texts, sizes, advance, methods(engine, whole=given.whole))
    return {
        **stamp(machine),
        "name": model.name,
        "model": model.about,
        "dtype": given.dtype,
        **asdict(sizes),
        **found,
    }


if __name__ == "__main__":
    main()
