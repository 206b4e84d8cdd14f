"""The benchmark of eager restores from a folder runs through where there is no GPU."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import eager, eager_files, eager_methods
from bench.gpu.program import Device
from bench.gpu.restore_methods import History
from bench.gpu.restore_models import build
from bench.gpu.shapes import LLAMA_7B

METHODS = {"layer-wise", "eager", "eager, GDS", "kv"}
COMPAT = "compat: cuFile without the driver nvidia-fs"


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


class CuFile:
    """What KvikIO's class of this name promises to those who read; it may read too little."""

    lost = 0

    def __init__(self, path: Path, flags: str) -> None:
        assert flags == "r"
        self.data = path.read_bytes()

    def pread(self, buffer: torch.Tensor, size: int) -> SimpleNamespace:
        there = len(self.data) - self.lost

        def get() -> int:
            buffer[:there] = torch.frombuffer(bytearray(self.data[:there]), dtype=torch.uint8)
            return there

        return SimpleNamespace(get=get)

    def close(self) -> None:
        self.data = b""


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A KvikIO on a machine with a driver; its attributes are what it finds there."""
    found = SimpleNamespace(compat=False, gds=True, allow_compat=False, threads=1)
    package, defaults, driver = (
        ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")
    )
    package.__spec__ = ModuleSpec("kvikio", None)
    options: dict[str, Any] = {
        "is_compat_mode_preferred": lambda: found.compat,
        "get": lambda name: {"num_threads": found.threads}[name],
        "set": lambda name, value: setattr(found, {"num_threads": "threads"}[name], value),
    }
    vars(defaults).update(options)
    vars(driver)["get"] = lambda name: {
        "is_gds_available": found.gds,
        "allow_compat_mode": found.allow_compat,
    }[name]
    vars(package).update(defaults=defaults, cufile_driver=driver, CuFile=CuFile)
    for module in (package, defaults, driver):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(CuFile, "lost", 0)
    return found


def test_the_row_says_how_bytes_come_to_the_device(kvikio: SimpleNamespace) -> None:
    assert eager_files.gds_state() == (True, "GDS")
    kvikio.allow_compat = True
    usable, state = eager_files.gds_state()
    assert usable and state.startswith("GDS, or compat")
    kvikio.gds = False
    assert eager_files.gds_state() == (True, COMPAT)
    kvikio.compat = True
    assert eager_files.gds_state() == (True, "compat: KvikIO without cuFile")


def test_a_kvikio_that_does_not_load_is_no_reason_to_stop(
    kvikio: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio.defaults", None)
    usable, why = eager_files.gds_state()
    assert not usable
    assert why.startswith("kvikio cannot be imported: ")


def scene(folder: Path) -> eager_methods.Scene:
    """One that takes itself for a GPU's."""
    device = Device(dry_run=True)
    shape = LLAMA_7B.tiny()
    with torch.inference_mode():
        layers = build(shape, device.kind, device.dtype)
        history = History(device, shape, layers, [6 * 64])
        made = eager_methods.Scene(device, history, "hidden", folder / "pages")
    device.dry_run = False
    return made


def test_without_kvikio_it_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    found, why = eager_methods.with_gds(scene(tmp_path))
    assert (found, why) == (None, "kvikio is not installed")
    row = {"gb_s": None, "balanced": False, "tokens": 64, "gds": None}
    done = {"skipped": None, "right": True, "ms": 2.0, "read_ms": 1.0, "restore_ms": 1.0}
    rows = [{**row, "method": "eager", **done}, {**row, "method": "eager, GDS", "skipped": why}]
    (skipped,) = (line for line in eager.table(rows).splitlines() if "eager, GDS" in line)
    assert skipped.endswith("| kvikio is not installed |")
    eager.draw({"device": "a GPU", "rows": rows}).savefig(tmp_path / "it.png")


def test_pages_that_kvikio_reads_are_restored(
    kvikio: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kvikio.gds = False
    restores, state = eager_methods.with_gds(scene(tmp_path))
    assert (state, kvikio.threads) == (COMPAT, 8)
    with torch.inference_mode():
        restores.poison()
        assert not restores.scene.history.is_right()
        restores.timed(restores.eager)
        assert restores.scene.history.is_right()
    monkeypatch.setattr(CuFile, "lost", 8)
    found, why = eager_methods.with_gds(restores.scene)
    assert found is None
    assert "bytes were read" in why
