"""Compares text with what was recorded, or records it."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

RECORDED = Path(__file__).parent / "recorded"
RECORD = "HCACHE_RECORD_GOLDENS"
"""With this variable tests write what they would compare: ``python -m tests.goldens``."""


def compare(name: str, lines: Iterable[str]) -> None:
    """Fail if ``lines`` are not those of the file ``name``, and say how they differ."""
    path, found = RECORDED / name, [*lines]
    if os.environ.get(RECORD):
        path.write_text("".join(f"{line}\n" for line in found))
    recorded = path.read_text().splitlines()
    difference = "\n".join(
        difflib.unified_diff(recorded, found, "recorded", "found", "", "", 5, "")
    )
    assert not difference, f"{name} is not what was recorded:\n{difference}"
