"""The restore trace of a server (:mod:`hcache_backend.trace`), read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple


class TraceEvent(NamedTuple):
    stage: str
    tokens: int
    start_ms: float
    ms: float


def read_trace(path: Path, offset: int = 0) -> tuple[list[TraceEvent], int]:
    """Events from byte ``offset`` on, and the offset to continue from."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    return [TraceEvent(**json.loads(line)) for line in text.splitlines()], offset + len(text)
