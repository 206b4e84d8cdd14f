"""Tests that need a GPU, a process for each file: cold kernels of several files compile at once.

    python -m bench.gpu.tests [--jobs 8]

One step of bench/gpu/first.sh. Needs pytest alone. What each file's process prints stands in
``FILE.log`` beside the results, also of a process that is killed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from bench.gpu import program
from bench.harness.report import OUT, markdown

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


def run(path: Path, folder: Path) -> program.Row:
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


def main() -> int:
    parser = program.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=8, help="processes at once")
    options, device, results = program.start(parser, "tests")
    folder = options.out or (OUT / "tests" if device.dry_run else program.folder_of(device.name))
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2 if device.dry_run else options.jobs) as pool:
        for done in as_completed([pool.submit(run, path, folder) for path in files()]):
            row = done.result()
            results.add(row, f"{row['file']}: {row['passed']} passed, {row['failed']} failed")
    heads = ("file", "passed", "failed", "skipped", "seconds")
    print(markdown(heads, ([row[head] for head in heads] for row in results.of())))
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
