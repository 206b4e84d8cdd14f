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

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu import program
from bench.harness.report import write_json

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 40
"""Last lines kept of the output of a step that failed."""
NOT_NUMBERS = ("spans", "ways")
"""Long parts of rows, which stay in the files of the steps."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: Also of the file that it writes, if it does.
        module: Python module.
        arguments: On a GPU.
        share: Weight of the step when the budget is divided.
        dry_arguments: In a dry run.
    """

    name: str
    module: str
    arguments: str
    share: int
    dry_arguments: str = "--dry-run"

    def command(self, folder: Path, *, dry_run: bool) -> list[str]:
        """The process, with its results in ``folder``."""
        arguments = (self.dry_arguments if dry_run else self.arguments).split()
        if self.name != "tests":
            arguments += ["--out", str(folder)]
        return [sys.executable, "-u", "-m", self.module, *arguments]


TESTS = "-m gpu -q -p no:cacheprovider --tb=short tests/kernels tests/gpu"
MODEL = "--models Llama-2-7B"

STEPS = (
    Step("overlap", "bench.gpu.overlap", "", 2),
    Step("tests", "pytest", TESTS, 4, TESTS),
    Step(
        "restore",
        "bench.gpu.restore",
        f"{MODEL} --tokens 4096 1024 --rates 0",
        4,
        f"{MODEL} --dry-run",
    ),
    Step("capture", "bench.gpu.capture", f"{MODEL} --batches 16 64", 4),
    Step(
        "kernels",
        "bench.gpu.kernels",
        f"{MODEL} Qwen3-8B --rows 1024 4096",
        4,
        f"{MODEL} --rows 7 --dry-run",
    ),
    Step("order", "bench.gpu.order", "", 1),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=600, help="seconds for all steps")
    parser.add_argument("--only", nargs="*", choices=[step.name for step in STEPS], help="steps")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--out", type=Path, help="folder of results; default: out/DEVICE")
    options = parser.parse_args()
    program.require_device(parser, dry_run=options.dry_run)
    device = "cpu" if options.dry_run else torch.cuda.get_device_name()
    folder = (options.out or program.folder_of(device)).resolve()
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "dry_run": options.dry_run,
        "versions": versions(),
        "budget": options.budget,
        "steps": {},
    }
    ends = time.monotonic() + options.budget
    for number, step in enumerate(steps):
        left = ends - time.monotonic()
        share = step.share / sum(other.share for other in steps[number:])
        print(f"== {step.name}: {left * share:.0f} of {left:.0f} s", flush=True)
        report["steps"][step.name] = found = run(step, folder, left * share, options.dry_run)
        print(f"== {step.name}: {found['outcome']}, {found['seconds']:.0f} s", flush=True)
        write_json(folder / "first.json", report)
    print(f"results: {folder / 'first.json'}")
    return int(any(found["outcome"] != "done" for found in report["steps"].values()))


def run(step: Step, folder: Path, limit: float, dry_run: bool) -> dict[str, Any]:
    """Run a step for at most ``limit`` seconds.

    Returns:
        ``seconds``; ``outcome``: "done", "out of time" or "failed" with the exit status (1 also
        where a result was wrong); ``rows`` of its file by kind, as far as it came; ``output``: the
        end of it, where it is not done, and one line of it where it writes no file.
    """
    command, file = step.command(folder, dry_run=dry_run), folder / f"{step.name}.json"
    file.unlink(missing_ok=True)  # what an earlier run left
    begin, output = time.monotonic(), deque[str](maxlen=SHOWN_LINES)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} if dry_run else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    late = threading.Event()

    def end() -> None:
        late.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(max(0.0, limit), end)
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        output.append(line.rstrip())
    status = process.wait()
    timer.cancel()
    outcome = "out of time" if late.is_set() else f"failed, {status}" if status else "done"
    found: dict[str, Any] = {"seconds": time.monotonic() - begin, "outcome": outcome}
    if file.exists():
        found["rows"] = rows_of(json.loads(file.read_text()))
    if outcome != "done":
        found["output"] = list(output)
    elif "rows" not in found:
        found["output"] = list(output)[-1:]
    return found


def rows_of(content: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a step's file, by kind."""
    return {
        kind: [{key: row[key] for key in row if key not in NOT_NUMBERS} for row in rows]
        for kind, rows in content.items()
        if isinstance(rows, list)
    }


def versions(names: Sequence[str] = ("torch", "triton", "numpy", "sglang")) -> dict[str, Any]:
    """What is installed; None: it is not."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


if __name__ == "__main__":
    sys.exit(main())
