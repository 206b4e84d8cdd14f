"""The table of the faster way: nearest measurement, kept in a file, safe against damage."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hcache_kernels.project_kv import ways as choice_module
from hcache_kernels.project_kv.spec import LayerKind
from hcache_kernels.project_kv.ways import (
    LIBRARY,
    ChoiceTable,
    TileConfig,
    Way,
    choose,
    fused_configs,
    possible_ways,
    table_path,
)

HOPPER = (9, 0)
LLAMA = LayerKind(4096, 32, 128, torch.bfloat16, "none", "neox")
FUSED = Way(fused_configs(LLAMA, HOPPER)[0])
CPU = torch.device("cpu")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChoiceTable:
    """The table of a device that is taken for a Hopper GPU."""
    table = ChoiceTable(tmp_path / "cache" / "table.json")
    monkeypatch.setattr(choice_module, "device_table", lambda index: table)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    return table


def test_the_nearest_measured_number_of_tokens_decides(table: ChoiceTable) -> None:
    assert choose(LLAMA, torch.bfloat16, 1024, CPU) == LIBRARY
    table.add(LLAMA, 256, {LIBRARY: 9.0, FUSED: 5.0})
    table.add(LLAMA, 4096, {LIBRARY: 50.0, FUSED: 90.0})
    picked = {n: choose(LLAMA, torch.bfloat16, n, CPU) for n in (1, 256, 1000, 1100, 100_000)}
    assert picked == {1: FUSED, 256: FUSED, 1000: FUSED, 1100: LIBRARY, 100_000: LIBRARY}
    other = LayerKind(4096, 32, 128, torch.bfloat16, "all", "neox")
    assert choose(other, torch.bfloat16, 256, CPU) == LIBRARY


def test_the_file_gives_back_what_was_measured(table: ChoiceTable) -> None:
    table.add(LLAMA, 256, {LIBRARY: 9.0, FUSED: 5.0})
    table.add(LLAMA, 256, {LIBRARY: 9.0, FUSED: 10.0})
    table.add(LLAMA, 512, {LIBRARY: 9.0, FUSED: 5.0})
    table.save()
    again = ChoiceTable(table.path)
    assert again.measured(LLAMA) == {256, 512}
    assert again.pick(LLAMA, 256) == LIBRARY
    assert again.pick(LLAMA, 512) == FUSED
    assert [path.name for path in table.path.parent.iterdir()] == ["table.json"]


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def damaged(text: str) -> str:
        content = json.loads(text)
        change(content)
        return json.dumps(content)

    return damaged


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        damage(lambda content: content.update({str(LLAMA): 1})),
        damage(lambda content: content[str(LLAMA)].update({"256": []})),
        damage(lambda content: content[str(LLAMA)]["256"].update(colour=1)),
        damage(lambda content: content[str(LLAMA)]["256"].pop("warps")),
    ],
)
def test_a_damaged_file_is_one_log_line_and_measured_again(
    table: ChoiceTable, damaged: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    table.add(LLAMA, 256, {LIBRARY: 9.0, FUSED: 5.0})
    table.save()
    table.path.write_text(damaged(table.path.read_text()))
    with caplog.at_level(logging.WARNING):
        again = ChoiceTable(table.path)
    assert [str(table.path) in record.message for record in caplog.records] == [True]
    assert again.measured(LLAMA) == set()
    again.add(LLAMA, 512, {LIBRARY: 9.0, FUSED: 5.0})
    again.save()
    assert ChoiceTable(table.path).measured(LLAMA) == {512}


def test_a_failed_write_leaves_the_old_file(
    table: ChoiceTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table.add(LLAMA, 256, {LIBRARY: 9.0})
    table.save()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    table.add(LLAMA, 512, {LIBRARY: 9.0})
    monkeypatch.setattr(Path, "replace", fail)
    table.save()
    assert "disk full" in caplog.text
    assert ChoiceTable(table.path).measured(LLAMA) == {256}
    assert [path.name for path in table.path.parent.iterdir()] == ["table.json"]


def test_a_configuration_that_is_gone_is_not_taken(table: ChoiceTable) -> None:
    gone = Way(TileConfig(rows=512, heads=1, depth=64, warps=4, stages=9))
    table.add(LLAMA, 256, {gone: 1.0})
    assert choose(LLAMA, torch.bfloat16, 256, CPU) == LIBRARY


def test_what_no_kernel_can_do_is_left_to_torch() -> None:
    assert possible_ways(LLAMA, torch.float8_e4m3fn, (8, 0)) == ()
    assert possible_ways(LLAMA, torch.float8_e5m2, (8, 0))[0] == LIBRARY
    assert possible_ways(LLAMA, torch.float8_e4m3fn, (8, 9))[0] == LIBRARY
    assert possible_ways(LLAMA, torch.bfloat16, (7, 5)) == ()
    wide = LayerKind(32768, 256, 128, torch.bfloat16, "all", "neox")
    assert possible_ways(wide, torch.bfloat16, HOPPER) == ()


def test_the_file_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table_path("NVIDIA H100 80GB HBM3")
    assert path == tmp_path / "hcache" / "project_kv-nvidia-h100-80gb-hbm3.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert table_path("x").is_relative_to(Path.home() / ".cache")
