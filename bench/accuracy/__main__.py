"""The effect of ways to keep a history's K and V on the model's next words.

A text is Python source with planted lines, which give values to keys (bench/fixtures/text.py). Its
first part is the history, whose K and V are kept by each method and restored. The turn behind it is
scored: divergence from a run without a cache (KL), negative log-likelihood (NLL), how often both
find the same token most likely, and how often a value is recalled that the history gave, by
distance. Methods: K and V as they are, through every codec and with half of the layers in pairs,
recomputed, and hidden states through every codec.

Everything runs in SGLang's model runner in this process, with the package's own projections, codecs
and recomputation. --model is a fixture (gqa or paired, trained when it is first asked for; smollm2
or smollm2-mha) or any model that SGLang serves, with its tokenizer.
"""

import logging
import os
import sys
from dataclasses import asdict
from pathlib import Path

from bench.accuracy import report
from bench.fixtures.models import chosen
from bench.fixtures.text import Texts, corpus
from bench.harness.machine import MachineError
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.program import Program, Run, Setting, at_least, model_name, scratch, steps
from bench.harness.report import Results
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env


def measure(run: Run) -> Results:
    given, machine = run.given, run.machine
    if given.history % PAGE_SIZE:
        run.parser.error(
            f"--history {given.history} must be a whole number of {PAGE_SIZE}-token pages"
        )
    if machine.device == "cpu" and "SGLANG_USE_CPU_ENGINE" not in os.environ:
        # The variables of the CPU engine must be set before the interpreter starts.
        command = [sys.executable, "-m", "bench.accuracy", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **cpu_engine_env()})
    from bench.accuracy.engine import Engine
    from bench.accuracy.measure import Sizes, score
    from bench.accuracy.methods import MAKERS

    model = chosen(given.model, quick=given.quick)
    sizes = Sizes(given.texts, given.history, given.turn)
    logging.disable(logging.WARNING)
    with scratch() as folder:
        options = server_options(
            *(METHODS["recompute"], machine, model.path, Path(folder)),
            pool_tokens=2 * (given.history + given.turn),
            dtype=given.dtype,
            extra_args=("--disable-cuda-graph",),  # graphs of decode steps: there are none
        )
        engine = Engine(options)
        tokenizer = engine.tokenizer

        def encode(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        if not encode(
            "import os\n"
        ):  # without files, transformers makes one up that knows no token
            raise MachineError(f"--model {given.model}: it needs the files of its tokenizer")
        texts = Texts(encode, corpus().held_out)
        with steps(sizes.texts) as advance:
            methods = [method for make in MAKERS for method in make(engine)]
            found = score(engine, texts, sizes, advance, methods)
    about = {"name": model.name, "model": model.about, "dtype": given.dtype}
    return {**about, **asdict(sizes), **found}


PROGRAM = Program(
    name="accuracy",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--model", model_name, None, "a folder, a name or a fixture", {"required": True}),
        Setting("--quick", None, False, "the fixture that is trained in a minute"),
        Setting("--dtype", str, "bfloat16", "type that the model is served in"),
        Setting("--texts", at_least(1), 16, "how many are scored"),
        Setting("--history", at_least(PAGE_SIZE), 384, "tokens that are kept"),
        Setting("--turn", at_least(8), 128, "tokens that are scored"),
    ),
    tables=report.TABLES,
    draw=report.draw,
    file=lambda results: f"accuracy_{results['name']}",
)

if __name__ == "__main__":
    PROGRAM.run()
