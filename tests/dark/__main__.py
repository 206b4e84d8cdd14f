"""Runs the tests and prints every statement of the package that none of them ran.

    python -m tests.dark                        all tests, then the comparison with dark.toml
    python -m tests.dark --add tests/kernels    some tests, on top of what ran before
    python -m tests.dark --only-report          nothing more

Ends with 1 if a test failed, if a dark statement is not in dark.toml, or if one there is not dark.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.dark.python.hcache_dark import VARIABLE
from tests.dark.report import Dark, Listed

TWO_AT_A_TIME = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
LONG = ["tests/engine/codecs/test_krul.py", "tests/engine/machines/test_shared.py"]
"""What no other test serves: pairs of layers, and tiers behind the page store."""
RUNS = (["-m", "not long", *TWO_AT_A_TIME], [*TWO_AT_A_TIME, *LONG])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--marks", type=Path, default=Path("out/dark"), help="folder of the marks")
    parser.add_argument("--add", action="store_true", help="keep the marks of runs before")
    parser.add_argument("--only-report", action="store_true", help="run no tests")
    arguments, pytest = parser.parse_known_args()
    folder = arguments.marks.resolve()
    failed = 0
    if not arguments.only_report:
        if not arguments.add:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        for run in [pytest] if pytest else RUNS:
            command = [sys.executable, "-m", "pytest", *run]
            failed |= subprocess.call(command, env=environment(folder))
    dark = Dark.read(folder)
    print(dark.text())
    problems = Listed.read().problems(dark.counts)
    print("\n".join(problems))
    return 1 if failed or problems else 0


def environment(folder: Path) -> dict[str, str]:
    """Of a process whose statements are marked."""
    paths = [str(Path(__file__).with_name("python")), os.environ.get("PYTHONPATH")]
    return {**os.environ, VARIABLE: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


if __name__ == "__main__":
    sys.exit(main())
