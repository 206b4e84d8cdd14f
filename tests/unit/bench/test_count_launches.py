"""The program that counts launches says what the code launches."""

from __future__ import annotations

import json
from pathlib import Path

from bench import launches


def test_launches_do_not_grow_with_layers(tmp_path: Path) -> None:
    counts = []
    for layers in ("8", "32"):
        out = tmp_path / layers
        arguments = ["--layers", layers, "--pages", "2", "--times", "1", "--out", str(out)]
        assert launches.PROGRAM.main(arguments) == 0
        found = json.loads((out / "launches.json").read_text())
        counts.append([row["launches"] for row in found["rows"]])
    assert counts == [[1, 4, 1, 2, 4, 2]] * 2
