"""Steps of a script: processes that share a budget of time, the most telling first.

A step that fails, or uses up its share of the time that is left, does not stop the next one.
``NAME.json`` of the script is written after every step, and has the rows of the steps' own files.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from bench.gpu import program
from bench.harness.report import write_json

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 40  # last lines kept of the output of a step that failed
NOT_NUMBERS = ("spans", "ways")  # long parts of rows, which stay in the files of the steps


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        share: Weight of the step when the budget is divided.
        writes: It writes ``NAME.json`` to the folder of ``--out``.
    """

    name: str
    module: str
    arguments: Sequence[str]
    share: int
    writes: bool = True

    def command(self, folder: Path) -> list[str]:
        out = ["--out", str(folder)] if self.writes else []
        return [sys.executable, "-u", "-m", self.module, *self.arguments, *out]


def parser(doc: str | None) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=doc, formatter_class=raw)
    made.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    made.add_argument("--out", type=Path, help="folder of results; default: out/DEVICE")
    made.add_argument("--budget", type=float, default=500, help="seconds for all steps")
    return made


def run_all(name: str, steps: Sequence[Step], options: argparse.Namespace, **more: str) -> int:
    """Run the steps in order and write ``NAME.json``; ``more`` variables are added to their
    environments.

    Returns:
        Exit status: 1 if a step failed, or something was wrong.
    """
    device = program.device_name(dry_run=options.dry_run)
    folder = (options.out or program.folder_of(device)).resolve()
    # Shapes of dry runs are tiny: threads would only wait for each other.
    environment = os.environ | more | ({"OMP_NUM_THREADS": "1"} if options.dry_run else {})
    report: dict[str, Any] = {
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
        report["steps"][step.name] = found = run(step, folder, left * share, environment)
        print(f"== {step.name}: {found['outcome']}, {found['seconds']:.0f} s", flush=True)
        write_json(folder / f"{name}.json", report)
        _pack(folder, name)
    print(f"results: {folder / name}.json")
    return int(any(found["outcome"] != "done" for found in report["steps"].values()))


def _pack(folder: Path, name: str) -> None:
    """All files of results as ``NAME.tar``: a borrowed machine may send back one file only."""
    with tarfile.open(folder / f".{name}.tar", "w") as packed:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".png", ".log"):
                packed.add(path, path.name)
    (folder / f".{name}.tar").replace(folder / f"{name}.tar")


def run(
    step: Step, folder: Path, limit: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a step for at most ``limit`` seconds.

    Returns:
        ``seconds``; ``outcome``: "done", "out of time" or "failed" with the exit status (1 also
            if a result was wrong); ``rows`` of its file by kind, as far as it came; ``output``: its
            last lines if it is not done, and its last line if it writes no file.
    """
    file = folder / f"{step.name}.json"
    file.unlink(missing_ok=True)  # of an earlier run
    folder.mkdir(parents=True, exist_ok=True)
    begin, output = time.monotonic(), deque[str](maxlen=SHOWN_LINES)
    process = subprocess.Popen(
        step.command(folder),
        cwd=ROOT,
        env=environment,
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
    try:
        assert process.stdout is not None
        with (folder / f"{step.name}.log").open("w") as log:
            for line in process.stdout:
                print(line, end="", flush=True)
                print(line, end="", flush=True, file=log)
                output.append(line.rstrip())
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:  # this process is interrupted
            end()
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


def versions() -> dict[str, Any]:
    """Of installed packages; None: it is not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "numpy", "sglang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
