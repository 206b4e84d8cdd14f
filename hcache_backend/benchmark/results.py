"""Files of results: a JSON line for each run, as SGLang's ``bench_multiturn.py`` writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hcache_backend.benchmark.driver import Record


def line(tag: str, parts: Mapping[str, Any]) -> dict[str, Any]:
    """A line of the log file: ``parts`` after the time and the tag."""
    return {"timestamp": datetime.now(UTC).isoformat(), "tag": tag, **parts}


def append(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a JSONL file, which is made where it is missing.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in lines)


def requests(run: int, records: Iterable[Record]) -> list[dict[str, Any]]:
    """A line for each request of a run."""
    return [{"run": run, **record.as_json()} for record in records]
