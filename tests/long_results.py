"""What long tests found, kept in a file that is committed: `make test-long` writes it.

A test tells numbers with pytest's own `record_property`. The file is written after every test, so
that a run which is broken off keeps what it has. Tests that did not run keep theirs, but for those
that no longer exist.
"""

import json
import os
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hcache_backend.plan.profile import processor_name


class LongResults:
    """A pytest plugin that writes what tests marked `long` said to `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @pytest.hookimpl(tryfirst=True)  # before any are left out
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        self._forget_others(config, {item.nodeid for item in items})

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not node.config.option.keyword:
            self._forget_others(node.config, set(ids))

    def _forget_others(self, config: pytest.Config, there: set[str]) -> None:
        if config.option.collectonly or config.args_source is not config.ArgsSource.TESTPATHS:
            return  # others were not collected
        results = self._read()
        if not results.keys() <= there:
            self._write({nodeid: results[nodeid] for nodeid in results.keys() & there})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or "long" not in report.keywords:
            return
        results = self._read()
        results[report.nodeid] = {
            "outcome": report.outcome,
            "seconds": round(report.duration, 1),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{processor_name()}, {os.cpu_count()} cores",
            "sglang": version("sglang"),
            **dict[str, Any](report.user_properties),
        }
        self._write(results)

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def _write(self, results: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        new.replace(self._path)  # workers that still collect read it for the order of files
