"""The benchmark of eager restores from a folder runs through where there is no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.unit.test_bench_gpu import dry_run


def test_pages_are_read_and_restored_every_way(tmp_path: Path) -> None:
    rows = dry_run("eager", tmp_path)["rows"]
    rates = {row["gb_s"] for row in rows}
    assert len(rates) == 2 and None in rates  # no limit, and the balanced one
    cases = {(row["gb_s"], row["method"]) for row in rows}
    assert len(rows) == len(cases) == len(rates) * 3
    size = {row["method"]: row["bytes"] for row in rows}
    header = 20 * 4096
    assert size["kv"] - header == 2 * 32 / 64 * (size["eager"] - header)
