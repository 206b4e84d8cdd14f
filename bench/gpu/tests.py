"""Tests that need a GPU, a process for each file: cold kernels of several files compile at once.

One step of bench/gpu/first.sh. Needs pytest alone. The output of each file's process stands in
``FILE.log`` beside the results, also of a process that is killed.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench.gpu.program import GpuProgram, GpuRun, Row
from bench.harness.program import Setting, at_least
from bench.harness.report import OUT, Table

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/gpu", "tests/kernels")
PYTEST = ("-m", "gpu", "-v", "-p", "no:cacheprovider", "--tb=short", "--color=no")
_DONE = (0, 5)  # 5: the file has no test that needs a GPU
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def files() -> Iterator[Path]:
    """Files of tests; those about whole restores first."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("test_*.py")):
            yield path.relative_to(ROOT)


def run_file(path: Path, folder: Path) -> Row:
    """The tests of one file; their output goes to ``folder`` line by line."""
    begin = time.monotonic()
    log = folder / f"{'-'.join(path.with_suffix('').parts)}.log"
    with log.open("w") as output:
        status = subprocess.call(
            [sys.executable, "-u", "-m", "pytest", *PYTEST, str(path)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    last = (log.read_text().splitlines() or [""])[-1]
    counts = {what: int(number) for number, what in _COUNT.findall(last)}
    return {
        "file": str(path),
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "skipped": counts.get("skipped", 0),
        "seconds": time.monotonic() - begin,
        "right": status in _DONE,
    }


def measure(run: GpuRun) -> None:
    folder = run.folder or OUT / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2 if run.given.dry_run else run.given.jobs) as pool:
        for done in as_completed([pool.submit(run_file, path, folder) for path in files()]):
            row = done.result()
            run.add(row, f"{row['file']}: {row['passed']} passed, {row['failed']} failed")


PROGRAM = GpuProgram(
    name="tests",
    doc=__doc__,
    measure=measure,
    settings=(Setting("--jobs", at_least(1), 8, "processes at once"),),
    tables=Table("rows", "file | passed | failed | skipped | seconds"),
)

if __name__ == "__main__":
    PROGRAM.run()
