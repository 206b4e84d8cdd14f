"""The benchmark of restores from the store runs through where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gpu import eager


def test_pages_are_read_and_restored_every_way(tmp_path: Path) -> None:
    assert eager.PROGRAM.main(["--dry-run", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "eager.png").stat().st_size > 0
    rows = json.loads((tmp_path / "eager.json").read_text())["rows"]
    assert all(row["right"] for row in rows)
    rates = {row["gb_s"] for row in rows}
    assert len(rates) == 2 and None in rates  # no limit, and the balanced one
    cases = {(row["gb_s"], row["method"]) for row in rows}
    assert len(rows) == len(cases) == len(rates) * 3
    size = {row["method"]: row["bytes"] for row in rows}
    header = 20 * 4096
    assert size["kv"] - header == 2 * (size["eager"] - header)
