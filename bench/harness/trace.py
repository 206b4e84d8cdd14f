"""The restore trace of a server (``tracing/hcache_trace.py``), read."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.harness.options import ServerOptions
from bench.harness.tracing.hcache_trace import VARIABLE


class TraceEvent(NamedTuple):
    stage: str
    tokens: int
    start_ms: float
    ms: float


def traced(options: ServerOptions, path: Path) -> ServerOptions:
    """The server also writes a trace to ``path``."""
    before = options.environment().get("PYTHONPATH") or os.environ.get("PYTHONPATH")
    paths = [str(Path(__file__).parent / "tracing"), *filter(None, [before])]
    environment = {VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(paths)}
    return replace(options, extra_env={**options.extra_env, **environment})


def read_trace(path: Path, offset: int = 0) -> tuple[list[TraceEvent], int]:
    """Events from byte ``offset`` on, and the offset to continue from."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    return [TraceEvent(**json.loads(line)) for line in text.splitlines()], offset + len(text)
