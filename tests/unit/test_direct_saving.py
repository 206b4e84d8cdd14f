"""Saving without staging, which the two stages are compared with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.capture.staging import StagedCapture
from hcache_backend.cli import direct_saving
from hcache_backend.cli.direct_saving import FILE_VARIABLE, DirectFile, plugin

BLOCK = 4096


def test_rows_are_where_their_slots_say(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "rows", layers=2, page_size=4)
    hidden = torch.randn(3, 8)
    file.write(1, [5, 0, 6], hidden)
    stored = (tmp_path / "rows").read_bytes()
    for row, slot in zip(hidden, [5, 0, 6], strict=True):
        begin = file.place(1, slot, 32)
        assert begin % BLOCK == 0
        assert stored[begin : begin + 32] == row.numpy().tobytes()
    assert len({file.place(layer, slot, 32) for layer in range(2) for slot in range(8)}) == 16
    assert file.place(0, 6, 32) - file.place(0, 5, 32) == BLOCK  # neighbours in a chunk
    assert file.place(0, 4, 32) - file.place(0, 3, 32) == 5 * BLOCK  # of another page


def test_a_row_may_need_several_blocks(tmp_path: Path) -> None:
    file = DirectFile(tmp_path / "rows", layers=1, page_size=4)
    hidden = torch.randn(2, 1500)
    file.write(0, [0, 1], hidden)
    stored = (tmp_path / "rows").read_bytes()
    assert len(stored) == 4 * BLOCK
    assert stored[2 * BLOCK : 2 * BLOCK + 6000] == hidden[1].numpy().tobytes()


def test_rows_are_written_before_a_layer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("begin", "take"):
        monkeypatch.setattr(StagedCapture, name, getattr(StagedCapture, name))
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "rows"))
    direct_saving.activate()
    void: list[torch.Tensor] = []
    capture: Any = SimpleNamespace(
        _segments=[0, 1],
        arena=SimpleNamespace(layout=SimpleNamespace(page_size=64)),
        ledger=SimpleNamespace(allocated=void.append),
        skip=lambda: None,
    )
    slots, hidden = torch.tensor([64, 130]), torch.randn(4, 16)
    assert StagedCapture.begin(capture, slots, slots, slots) is None
    assert void[0] is slots  # nothing of this step may be backed up
    for layer in range(2):
        StagedCapture.take(capture, layer, hidden)
        stored = (tmp_path / "rows").read_bytes()
        begin = DirectFile(tmp_path / "other", 2, 64).place(layer, 130, 64)
        assert stored[begin : begin + 64] == hidden[1].numpy().tobytes()


def test_sglang_finds_the_plugin(tmp_path: Path) -> None:
    environment = plugin(tmp_path / "plugin")
    code = (
        "from importlib.metadata import entry_points\n"
        "found = entry_points(group='sglang.srt.plugins', name='hcache_direct_saving')\n"
        "print(*(f'{p.value} {callable(p.load())}' for p in found))"
    )
    path = ":".join([environment["PYTHONPATH"], *(part for part in sys.path if part)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "hcache_backend.cli.direct_saving:activate True"
    assert Path(environment[FILE_VARIABLE]).parent == tmp_path / "plugin"
