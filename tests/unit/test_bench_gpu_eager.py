"""The benchmark of eager restores from a folder runs through where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import eager, eager_methods
from bench.gpu.eager_files import DeviceReader

METHODS = {"layer-wise", "eager", "eager, GDS", "kv"}


def test_pages_are_read_and_restored_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eager", "--dry-run", "--out", str(tmp_path)])
    assert eager.main() == 0
    assert (tmp_path / "eager.png").stat().st_size > 0
    rows = json.loads((tmp_path / "eager.json").read_text())["rows"]
    assert all(row["right"] for row in rows)
    rates = {row["gb_s"] for row in rows}
    assert len(rates) == 2 and None in rates  # no limit, and the balanced one
    cases = {(row["gb_s"], row["method"]) for row in rows}
    assert len(rows) == len(cases) == len(rates) * len(METHODS)
    assert {row["method"] for row in rows} == METHODS
    size = {row["method"]: row["bytes"] for row in rows}
    header = 20 * 4096
    assert size["kv"] - header == 2 * 64 / 64 * (size["eager"] - header)
    assert size["eager, GDS"] == size["eager"]
    straight = {row["gds"] for row in rows if row["method"] == "eager, GDS"}
    assert straight == {"dry run: a stand-in for KvikIO"}
    assert all(row["gds"] is None for row in rows if row["method"] != "eager, GDS")


def test_too_few_bytes_are_an_error() -> None:
    """GPUDirect Storage returns fewer than were asked for where a file ends."""
    read = SimpleNamespace(get=lambda: 4088)
    file = SimpleNamespace(pread=lambda buffer, size: read)
    host = torch.zeros(1, 4096, dtype=torch.uint8)
    reader = DeviceReader([Path("page")], host, 16, "cpu", lambda path: file)
    with pytest.raises(OSError, match="page 0: 4088 of 4096 bytes were read"):
        reader.read(range(1))


def test_without_kvikio_it_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    on_a_gpu: Any = SimpleNamespace(device=SimpleNamespace(dry_run=False))
    found, why = eager_methods.with_gds(on_a_gpu)
    assert (found, why) == (None, "kvikio: it is not installed")
    row = {"gb_s": None, "balanced": False, "tokens": 64, "gds": None}
    done = {"skipped": None, "right": True, "ms": 2.0, "read_ms": 1.0, "restore_ms": 1.0}
    rows = [{**row, "method": "eager", **done}, {**row, "method": "eager, GDS", "skipped": why}]
    (skipped,) = (line for line in eager.table(rows).splitlines() if "eager, GDS" in line)
    assert skipped.endswith("| kvikio: it is not installed |")
    eager.draw({"device": "a GPU", "rows": rows}).savefig(tmp_path / "it.png")
