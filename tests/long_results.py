"""What long tests found, kept in a file that is committed: `make test-long` writes it.

A test tells numbers with pytest's own `record_property`. The file is written after every test, so
that a run which is broken off keeps what it has; tests that did not run keep what they had.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hcache_backend.partition.profile import processor_name


class LongResults:
    """A pytest plugin that writes what tests marked `long` said to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or "long" not in report.keywords:
            return
        results = json.loads(self._path.read_text()) if self._path.exists() else {}
        results[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{processor_name()}, {os.cpu_count()} cores",
            "sglang": version("sglang"),
            **dict[str, Any](report.user_properties),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
