"""What a store holds of each layer is decided once, and changed by `hcache plan --apply` only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.config import parse_config
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.presets import preset_profile
from hcache_backend.plan.profile import CopyWay
from hcache_backend.plan.record import (
    PartitionRecord,
    find_record,
    record_name,
    records,
    save_record,
)
from hcache_backend.store import PageStore

CONFIG = Path(__file__).parent / "configs" / "llama-2-7b.json"
SHAPE = read_model(CONFIG)
NAME = record_name(b"k" * 16)
RECORD = PartitionRecord(
    model="m",
    reason="by an option",
    recompute=0,
    hidden=0,
    kv=32,
    shape=SHAPE,
    tokens=4096,
    tp=1,
    l3="none",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    config = parse_config({"dirs": [str(folder)], "min_free_bytes": 0}, "test")
    PageStore(config, b"writer-1", background=False).close()
    save_record(folder, NAME, RECORD, replace=False)
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def partition_check(folder: Path) -> tuple[str, str]:
    checks = json.loads(run("doctor", "-d", folder, "--json"))["checks"]
    [check] = [check for check in checks if check["subject"] == f"{folder}: partition of m"]
    return check["verdict"], check["detail"]


def test_the_first_record_stays_whoever_comes_later(folder: Path) -> None:
    later = RECORD.model_copy(update={"hidden": 32, "kv": 0, "reason": "by another profile"})
    save_record(folder, NAME, later, replace=False)
    assert find_record([folder.parent / "none", folder], NAME) == RECORD
    save_record(folder, NAME, later, replace=True)
    assert find_record([folder], NAME) == later
    assert [name for name, _ in records(folder)] == [NAME]
    assert {path.name for path in folder.iterdir() if path.name.startswith(".part")} == set()


def test_a_record_that_cannot_be_read_is_none(folder: Path) -> None:
    (folder / NAME).write_text("{")
    assert find_record([folder], NAME) is None
    assert list(records(folder)) == []
    unknown = PartitionRecord.model_construct(shape=None)
    assert unknown.better(None) is None


def test_a_store_with_a_record_opens_again(folder: Path) -> None:
    config = parse_config({"dirs": [str(folder)], "min_free_bytes": 0}, "test")
    PageStore(config, b"writer-2", background=False).close()


def test_doctor_says_when_another_partition_is_faster_and_plan_changes_it(folder: Path) -> None:
    assert partition_check(folder) == ("good", "32 layers loaded as KV: by an option")
    preset = preset_profile("a100-40g", 0)
    preset.model_copy(update={"model": SHAPE}).save(folder / "profile-1.json")
    verdict, said = partition_check(folder)
    assert verdict == "fair"
    assert "times as fast with " in said and "hcache plan --apply" in said
    run("plan", "-m", CONFIG, "-w", folder / "profile-1.json", "--tokens", 4096, "--apply", folder)
    verdict, said = partition_check(folder)
    assert verdict == "good"
    assert "layers from hidden states" in said and said.endswith(": hcache plan --apply")


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (
            (CopyWay(programs=16, alone=5.5e10, beside=5.25e10, products=0.934),),
            "kernel, 16 programs: 52.5 GB/s beside matrix products (55.0 alone), which keep 93% of "
            "their speed",
        ),
        ((), "measured alone, not during matrix products"),
    ],
)
def test_doctor_says_how_servers_copy(folder: Path, ways: tuple[CopyWay, ...], said: str) -> None:
    preset_profile("h100").model_copy(update={"copies": ways}).save(folder / "profile-1.json")
    checks = json.loads(run("doctor", "-d", folder, "--json"))["checks"]
    [check] = [check for check in checks if check["subject"] == f"{folder}: copies to H100 SXM"]
    assert (check["verdict"], check["detail"]) == ("good", said)


def test_a_partition_is_applied_to_stores_that_know_the_model_only(folder: Path) -> None:
    other = CONFIG.with_name("llama-2-13b.json")
    result = CliRunner().invoke(
        app, ["plan", "-m", str(other), "-w", "a100-40g", "--apply", str(folder)]
    )
    assert result.exit_code != 0
    assert "no server has used this model with it yet" in result.output
    assert find_record([folder], NAME) == RECORD
