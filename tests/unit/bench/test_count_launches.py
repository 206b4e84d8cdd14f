"""The program that counts launches says what the code launches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import launches


def test_launches_do_not_grow_with_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = []
    for layers in ("8", "32"):
        out = tmp_path / f"{layers}.json"
        arguments = ["--layers", layers, "--pages", "2", "--times", "1", "--out", str(out)]
        monkeypatch.setattr("sys.argv", ["launches", *arguments])
        launches.main()
        counts.append([row["launches"] for row in json.loads(out.read_text())])
    assert counts == [[1, 4, 1, 2, 4, 2]] * 2
    assert "| exp4 | load | 4 |" in capsys.readouterr().out
