"""Seconds of each file of tests, kept in a file that is committed: with several workers the longest
files begin first, so that no worker waits for another at the end.

`make test ARGS=--write-durations` measures them.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

SECONDS = Path(__file__).resolve().parent / "durations.json"


def longest_first(items: list[pytest.Item], long_results: Path | None) -> None:
    """Sort by files; a new one, of which nothing is known, comes last. ``long_results`` says it of
    long tests, if these are run."""
    seconds = Counter[str]()
    if long_results is None:
        seconds.update(json.loads(SECONDS.read_text()))
    elif long_results.exists():
        for nodeid, result in json.loads(long_results.read_text()).items():
            seconds[nodeid.partition("::")[0]] += result["seconds"]
    items.sort(key=lambda item: -seconds[item.nodeid.partition("::")[0]])


class Durations:
    """A pytest plugin that writes how long each file took."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        known = {file: round(seconds) for file, seconds in self._seconds.items() if seconds >= 1}
        SECONDS.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
