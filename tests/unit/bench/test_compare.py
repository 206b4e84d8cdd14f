"""What a comparison plans, and what it makes of its numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.compare import plan as planning
from bench.compare.__main__ import app
from bench.compare.load import LoadPlan
from bench.compare.pictures import COLOURS, draw
from bench.compare.plan import Rates
from bench.compare.report import layers, markdown, table_lines
from bench.compare.restore import (
    METHODS_RESTORED,
    SETTINGS,
    Restored,
    RestorePlan,
    Restores,
    median_of,
    report,
    restore_all,
    servers,
    steps,
)
from bench.compare.saving import WAYS, SavingPlan
from bench.compare.saving import steps as saving_steps
from bench.harness.machine import Machine
from bench.harness.methods import HYBRID, METHODS, SERVED
from bench.harness.restorer import Restore, forget_files, l3_bytes
from bench.multiturn.driver import Pace
from bench.workload.base import Session, Turn, Workload
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.presets import preset_profile

CPU, GPU = Machine("cpu", "a CPU", "0"), Machine("cuda", "a GPU", "0")
LLAMA = ModelShape(
    family="llama",
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=32,
    head_dim=128,
    value_dim=128,
    mlp_width=11008,
)


def restore_plan(folder: Path, machine: Machine = CPU, model: str = "model") -> RestorePlan:
    return RestorePlan(machine, model, 128, 2, SETTINGS, 1000, (), folder)


def folder_model(folder: Path) -> str:
    known = Path(__file__).parents[1] / "partition" / "configs" / "llama-2-7b.json"
    (folder / "config.json").write_text(known.read_text())
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "file,magic"], "--methods 'magic': must be of ideal, recompute"),
        (["--settings", "disk,fast"], "--settings 'fast': must be of disk, balanced, slow"),
        (["--part", "load", "--methods", "hybrid"], "part load knows none of them, but ideal"),
        (["--methods", "ideal,host"], "part restore knows none of them, but hcache-hidden"),
        (["--tokens", "100"], "--tokens 100: must be whole pages of 64, as 64"),
        (["--host-ratio", "1"], "--host-ratio 1: must be above 1"),
        (["--rates", "1,fast"], "--rates 'fast': must be numbers above 0"),
        (["--rates", "0"], "--rates '0': must be numbers above 0"),
        (["--rates", "inf"], "--rates 'inf': must be numbers above 0"),
        (["--workload", "sharegpt"], "--workload sharegpt: needs --sharegpt FILE"),
        (["--max-context", "1"], "--max-context 1: a question and its reply"),
    ],
)
def test_a_wrong_option_is_named_before_a_server_starts(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_the_history_is_that_of_the_seed(tmp_path: Path) -> None:
    history = restore_plan(tmp_path).history()
    assert history == restore_plan(tmp_path).history()
    assert len(history) == 128
    assert max(history) < 1000


def test_what_is_planned_has_a_server_for_each_setting(tmp_path: Path) -> None:
    plan = restore_plan(tmp_path, model=folder_model(tmp_path))
    assert list(servers(plan, METHODS_RESTORED)) == [
        ("hcache-hidden", ("disk", "balanced", "slow")),
        ("hcache-hidden-eager", ("disk", "slow")),
        ("hcache-kv", ("disk", "balanced", "slow")),
        ("file", ("disk", "balanced", "slow")),
        *(("hcache", (setting,)) for setting in SETTINGS),
        *(("hcache-eager", (setting,)) for setting in ("disk", "slow")),
        (HYBRID, ("balanced",)),
        ("recompute", ("disk",)),
    ]


def test_without_a_cpu_engine_nothing_is_slowed_down(tmp_path: Path) -> None:
    plan = restore_plan(tmp_path, GPU)
    assert list(servers(plan, ["file", "hcache-hidden", HYBRID])) == [
        ("hcache-hidden", ("disk",)),
        ("file", ("disk",)),
    ]


def test_the_disk_as_it_is_decides_how_slow_others_are_made(tmp_path: Path) -> None:
    plan = dataclasses.replace(restore_plan(tmp_path), settings=("slow",))
    assert list(servers(plan, ["hcache-hidden", "file"])) == [
        ("hcache-hidden", ("disk", "slow")),
        ("file", ("slow",)),
    ]
    assert list(servers(plan, ["file"])) == []  # nothing says how slow


def test_what_cannot_be_tried_is_said(tmp_path: Path) -> None:
    found = restore_all(restore_plan(tmp_path, GPU), [], None, lambda step: None)
    assert found.left_out == (
        "setting balanced: only the CPU engine can be slowed down",
        "setting slow: only the CPU engine can be slowed down",
    )
    plan = dataclasses.replace(restore_plan(tmp_path), settings=("disk", "slow"))
    assert restore_all(plan, [], None, lambda step: None).left_out == (
        "setting slow: it needs method hcache-hidden",
    )


def test_steps_are_counted_as_they_come(tmp_path: Path) -> None:
    plan = restore_plan(tmp_path)
    assert steps(plan, ["recompute"]) == 1 + 3
    assert steps(plan, ["hcache"]) == 1 + 1 + 1 + 2
    assert steps(plan, ["hcache-hidden"]) == 1 + 1 + 1 + 3 * 2
    assert steps(plan, ["hcache-hidden", "file"]) == 2 * (1 + 1 + 1 + 3 * 2)


def test_profiles_of_settings_differ_in_what_is_slowed_down() -> None:
    profile, rates = preset_profile("a100-40g", 4), Rates(bus=1e9, l3=1e8)
    assert planning.in_setting(profile, "disk", None) is profile
    balanced = planning.in_setting(profile, "balanced", rates)
    assert balanced.hidden_copy.per_second == pytest.approx(1e9)
    assert balanced.kv_load.per_second <= 1e9
    assert balanced.l3 == profile.l3
    slow = planning.in_setting(profile, "slow", rates)
    assert slow.l3 is not None
    assert slow.l3.per_second == 1e8
    assert slow.hidden_copy == profile.hidden_copy


def test_a_model_that_plans_do_not_know_has_no_shape(tmp_path: Path) -> None:
    assert not planning.has_shape("org/model")
    (tmp_path / "config.json").write_text("{}")
    assert not planning.has_shape(str(tmp_path))
    assert planning.has_shape(folder_model(tmp_path))


def test_the_naive_hybrid_has_no_hidden_states() -> None:
    partition = planning.naive_hybrid(preset_profile("a100-40g", 0), LLAMA, 1024)
    assert partition.hidden == 0
    assert partition.recompute > 0
    assert partition.kv > 0
    assert planning.options(Partition(2, 0, 6)) == {"recompute": 2, "hidden": 0, "kv": 6}


def test_medians_and_bytes(tmp_path: Path) -> None:
    restores = [Restore(64, ms, l3_ms=ms / 2) for ms in (5.0, 1.0, 9.0, 3.0)]
    assert median_of(restores, "ms") == 4
    assert median_of(restores[:3], "l3_ms") == 2.5
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.bin").write_bytes(b"12")
    (tmp_path / "a" / "b" / "y.page").write_bytes(b"345")
    (tmp_path / "a" / "index").write_bytes(b"6789")
    forget_files(tmp_path)
    assert l3_bytes(tmp_path) == 5


def load_plan(pool_tokens: int | None = None) -> LoadPlan:
    sessions = (Session((Turn(500, 100), Turn(300, 100))),) * 12
    workload = Workload("test", sessions)
    return LoadPlan(CPU, "m", workload, [1.0], Pace(), 1000, pool_tokens, 1.25, (), Path())


def test_the_ideal_pool_holds_all_histories_and_others_an_eighth() -> None:
    plan = load_plan()
    assert plan.pool_of("ideal") >= 12 * 1000 + 1064
    assert plan.pool_of("hcache") == 1536  # 12,000 / 8, in whole pages
    assert load_plan(pool_tokens=4000).pool_of("file") == 4032
    assert load_plan(pool_tokens=4000).pool_of("ideal") == plan.pool_of("ideal")


def run(rate: float, ttft: float) -> dict[str, Any]:
    return {
        "request_rate": rate,
        "median_ttft": ttft,
        "p90_ttft": 2 * ttft,
        "average_tbt": 0.05,
        "throughput": 1.5,
        "device_hit_rate": 0.25,
        "host_hit_rate": None,
        "storage_hit_rate": 0.5,
    }


def comparison() -> dict[str, Any]:
    rows = {}
    for name in METHODS_RESTORED:
        times = {setting: [Restore(4096, 1000.0, 400.0, 580.0)] * 3 for setting in SETTINGS}
        rows[name] = Restored(times, dict.fromkeys(SETTINGS, 2048.0), dict.fromkeys(SETTINGS, ""))
    rows["hcache-kv"].times["balanced"] = [Restore(4096, 2000.0, 400.0, 1590.0)]
    rows["hcache"].said["slow"] = "hidden mode: 1 layer recomputed, 7 layers kept, 9 bytes a page"
    rows["file"].times["disk"] = [Restore(4096, 1200.0, 500.0, 580.0)]
    rows["recompute"] = Restored({"disk": [Restore(4096, 9000.0)]})
    rows["hcache-hidden-eager"].times.pop("balanced")
    found = Restores(rows, Rates(66e6, 22e6), ("setting x: y",))
    return {
        "date": "2026-01-01",
        "device": "a CPU",
        "sglang_version": "0.5.21",
        "model": "a model",
        "restore": report(found, dataclasses.replace(restore_plan(Path()), tokens=4096)),
        "saving": {
            "history": 512,
            "batches": [1, 16],
            "ways": {
                name: {
                    "title": way.title,
                    "gaps_ms": {
                        "1": {"mean": 5.0, "median": 5.0, "p99": 7.0},
                        "16": {"mean": 9.0, "median": 8.0 + number, "p99": 30.0},
                    },
                }
                for number, (name, way) in enumerate(WAYS.items())
            },
        },
        "load": {
            "model": "a small one",
            "workload": {
                "name": "sharegpt4",
                "sessions": 8,
                "requests": 30,
                "history_median": 2500,
                "history_max": 16000,
                "arrivals": "sessions",
            },
            "methods": {
                name: {"title": method.title, "runs": [run(2.0, 0.4), run(1.0, 0.2)]}
                for name, method in METHODS.items()
                if name in SERVED
            },
        },
    }


def test_the_tables_have_a_row_for_each_method() -> None:
    text = markdown(comparison())
    assert "| HCache, KV pages | 2,048 | 1,000 | 400 | 580 | - |" in text
    assert "| HCache, KV pages | 2,048 | 2,000 | 400 | 1,590 | 1.00 |" in text
    assert "| HCache, hidden states | 2,048 | 1,000 | 400 | 580 | 2.74 |" in text
    assert "| HCache, automatic | 2,048 | 1,000 | 400 | 580 | 1 layer recomputed, 7 la" in text
    assert text.count("| recompute | - | 9,000 | - | - | - |") == 2
    assert "| recompute | - | 9,000 | - | - | 0.18 |" in text
    assert text.count("| HCache, hidden states, eager | 2,048 |") == 2
    assert "medians of 2: from the start" in text
    assert "all servers of ours: `restore_share` 1.0." in text
    assert "slowed down to 66 MB/s" in text
    assert "slowed down to 22 MB/s" in text
    assert "Left out: setting x: y." in text
    assert "| HCache: two stages | 5.0 (7.0), 1.00x | 9.0 (30.0), 1.12x |" in text
    assert "| recompute | 2.0 | 400 | 800 | 50.0 | 1.50 | 25 / ? / 50 |" in text
    assert "8 sessions, 30 requests" in text


def test_a_setting_that_was_not_tried_is_empty() -> None:
    rows = {"file": Restored({"disk": [Restore(64, 2.0, 1.0, 1.0)]}, {"disk": 1.0}, {"disk": ""})}
    found = report(Restores(rows, None, ()), restore_plan(Path()))
    assert found["methods"]["file"]["slow"] is None
    assert table_lines({"restore": found}).splitlines()[-1] == (
        "| KV, SGLang file L3 | 1 | 2 | 1 | - | - |"
    )


def test_each_part_has_its_table_in_the_documentation() -> None:
    found = comparison()
    for part, row in (
        ("restore", "| HCache, KV pages | 2,048 | 1,000 | 400 | 1,590 | 1,000 |"),
        ("saving", "| HCache: two stages | 5.0 (7.0), 1.00x | 9.0 (30.0), 1.12x |"),
        ("load", "| recompute | 2.0 | 400 | 800 | 50.0 | 1.50 | 25 / ? / 50 |"),
    ):
        assert row in table_lines({part: found[part]}).splitlines()


def test_what_a_server_said_of_its_layers() -> None:
    said = "partition: 8 layers loaded as KV; the best; KV mode (plain KV pages): no hidden states"
    assert layers(said) == "KV pages"
    assert layers("hidden mode: 2 layers recomputed, 6 layers x, 64 bytes a 64-token page") == (
        "2 layers recomputed, 6 layers x"
    )
    assert layers("") == ""


def test_a_saving_plan_has_a_history_for_each_sequence() -> None:
    plan = SavingPlan(CPU, "m", 3, 100, (), Path(), batches=(1, 4), history=64)
    assert saving_steps(plan) == len(WAYS) * (2 + 2 * 3)
    assert [len(history) for history in plan.histories()] == [64] * 4


def test_a_part_that_did_not_run_has_no_table() -> None:
    found = comparison()
    del found["load"]
    assert "Workload" not in markdown(found)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    found = comparison()
    paths = draw(found, tmp_path / "compare")
    names = ["compare_restore.png", "compare_saving.png", "compare_load.png"]
    assert [path.name for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    del found["restore"], found["saving"]
    assert [path.name for path in draw(found, tmp_path / "other")] == ["other_load.png"]


def test_every_method_has_a_colour() -> None:
    assert set(COLOURS) == set(METHODS) >= set(METHODS_RESTORED)
