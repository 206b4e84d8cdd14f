"""What a comparison plans, and what it makes of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.compare import plan as planning
from bench.compare.__main__ import main
from bench.compare.load import LoadPlan
from bench.compare.pictures import COLOURS, PICTURES
from bench.compare.plan import Rates
from bench.compare.report import layers, markdown, table_lines
from bench.compare.restore import (
    METHODS_RESTORED,
    SETTINGS,
    RestorePlan,
    left_out,
    medians,
    report,
    servers,
    steps,
)
from bench.compare.saving import WAYS, SavingPlan
from bench.compare.saving import steps as saving_steps
from bench.harness.machine import Machine
from bench.harness.methods import HYBRID, METHODS, SERVED
from bench.harness.report import write_picture
from bench.harness.restorer import Restore, forget_files, l3_bytes
from bench.multiturn.driver import Pace
from bench.workload.base import Session, Turn, Workload
from hcache_backend.partition.presets import preset_profile

CPU, GPU = Machine("cpu", "a CPU", "0"), Machine("cuda", "a GPU", "0")


def part(machine: Machine = CPU, model: str = "model") -> dict[str, Any]:
    """What all parts have in common."""
    return {
        "machine": machine,
        "model": model,
        "vocabulary": 1000,
        "server_args": (),
        "folder": Path(),
    }


def restore_plan(
    *methods: str, settings: Sequence[str] = SETTINGS, tokens: int = 128, **common: Any
) -> RestorePlan:
    return RestorePlan(
        **part(**common), methods=methods, tokens=tokens, rounds=2, settings=settings
    )


def folder_model(folder: Path) -> str:
    known = Path(__file__).parents[1] / "partition" / "configs" / "llama-2-7b.json"
    (folder / "config.json").write_text(known.read_text())
    return str(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "file,magic"], "argument --methods: 'magic' must be of ideal, recompute"),
        (
            ["--settings", "disk,fast"],
            "argument --settings: 'fast' must be of disk, balanced, slow",
        ),
        (["--part", "load", "--methods", "hybrid"], "part load knows none of them, but ideal"),
        (["--methods", "ideal,host"], "part restore knows none of them, but hcache-hidden"),
        (["--tokens", "100"], "--tokens 100: must be whole pages of 64, as 64"),
        (["--host-ratio", "1"], "--host-ratio 1: must be above 1"),
        (["--rates", "1,fast"], "argument --rates: '1,fast' must be numbers above 0"),
        (["--rates", "0"], "argument --rates: '0' must be numbers above 0"),
        (["--rates", "inf"], "argument --rates: 'inf' must be numbers above 0"),
        (["--workload", "sharegpt"], "--workload sharegpt: needs --sharegpt FILE"),
        (["--max-context", "1"], "--max-context 1: a question and its reply"),
    ],
)
def test_a_wrong_option_is_named_before_a_server_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_histories_are_those_of_the_seed() -> None:
    plan = restore_plan()
    histories = plan.histories(4, 64)
    assert histories == plan.histories(4, 64)
    assert [len(history) for history in histories] == [64] * 4
    assert 500 < max(map(max, histories)) < 1000


def test_what_is_planned_has_a_server_for_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.compare.restore.find_spec", lambda name: name)
    monkeypatch.setattr("bench.harness.mooncake.missing", lambda: None)
    assert list(servers(restore_plan(*METHODS, model=folder_model(tmp_path)))) == [
        ("hcache-hidden", ("disk", "balanced", "slow")),
        ("hcache-hidden-eager", ("disk", "slow")),
        ("hcache-kv", ("disk", "balanced", "slow")),
        ("file", ("disk", "balanced", "slow")),
        ("nixl", ("disk",)),
        ("mooncake", ("disk",)),
        *(("hcache", (setting,)) for setting in SETTINGS),
        *(("hcache-eager", (setting,)) for setting in ("disk", "slow")),
        (HYBRID, ("balanced",)),
        ("recompute", ("disk",)),
    ]


def test_without_a_cpu_engine_nothing_is_slowed_down() -> None:
    assert list(servers(restore_plan("file", "hcache-hidden", HYBRID, machine=GPU))) == [
        ("hcache-hidden", ("disk",)),
        ("file", ("disk",)),
    ]


def test_the_disk_as_it_is_decides_how_slow_others_are_made() -> None:
    assert list(servers(restore_plan("hcache-hidden", "file", settings=("slow",)))) == [
        ("hcache-hidden", ("disk", "slow")),
        ("file", ("slow",)),
    ]
    nothing_says_how_slow = restore_plan("file", settings=("slow",))
    assert list(servers(nothing_says_how_slow)) == []


def test_what_is_not_installed_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.compare.restore.find_spec", lambda name: None)
    monkeypatch.setattr("bench.harness.mooncake.missing", lambda: "a reason")
    plan = restore_plan("nixl", "mooncake", "file", settings=("disk",))
    assert list(servers(plan)) == [("file", ("disk",))]
    assert list(left_out(plan)) == [
        "method nixl: it is not installed; see requirements/peers.txt",
        "method mooncake: a reason",
    ]


def test_what_cannot_be_tried_is_said() -> None:
    assert list(left_out(restore_plan(HYBRID, machine=GPU))) == [
        "setting balanced: only the CPU engine can be slowed down",
        "setting slow: only the CPU engine can be slowed down",
        "method hybrid: --model-path must be a folder with a config.json that plans know",
    ]
    assert list(left_out(restore_plan("file", settings=("disk", "slow")))) == [
        "setting slow: it needs method hcache-hidden",
    ]


def test_steps_are_counted_as_they_come() -> None:
    assert steps(restore_plan("recompute")) == 1 + 3
    assert steps(restore_plan("hcache")) == 1 + 1 + 1 + 2
    assert steps(restore_plan("hcache-hidden")) == 1 + 1 + 1 + 3 * 2
    assert steps(restore_plan("hcache-hidden", "file")) == 2 * (1 + 1 + 1 + 3 * 2)
    plan = SavingPlan(**part(), rounds=3, batches=(1, 4))
    assert saving_steps(plan) == len(WAYS) * (2 + 2 * 3)


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


def test_the_naive_hybrid_has_no_hidden_states(tmp_path: Path) -> None:
    model = folder_model(tmp_path)
    partition = planning.naive_hybrid(preset_profile("a100-40g", 0), GPU, model, 1024)
    assert partition.hidden == 0
    assert partition.recompute > 0
    assert partition.kv > 0


def test_medians_and_bytes(tmp_path: Path) -> None:
    restores = [Restore(64, ms, l3_ms=ms / 2) for ms in (5.0, 1.0, 9.0, 3.0)]
    assert medians(restores)["ms"] == 4
    assert medians(restores[:3])["l3_ms"] == 2.5
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.bin").write_bytes(b"12")
    (tmp_path / "a" / "b" / "y.page").write_bytes(b"345")
    (tmp_path / "a" / "index").write_bytes(b"6789")
    forget_files(tmp_path)
    assert l3_bytes(tmp_path) == 5


def load_plan(pool_tokens: int | None = None) -> LoadPlan:
    sessions = (Session((Turn(500, 100), Turn(300, 100))),) * 12
    workload = Workload("test", sessions)
    return LoadPlan(
        **part(),
        methods=SERVED,
        workload=workload,
        rates=[1.0],
        pace=Pace(),
        pool_tokens=pool_tokens,
        host_ratio=1.25,
    )


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
    found = medians([Restore(4096, 1000.0, 400.0, 580.0)] * 3, 2048.0)
    rows = {name: dict.fromkeys(SETTINGS, found) for name in METHODS_RESTORED}
    rows["hcache-kv"]["balanced"] = medians([Restore(4096, 2000.0, 400.0, 1590.0)], 2048.0)
    said = "hidden mode: 1 layer recomputed, 7 layers kept, 9 bytes a page"
    rows["hcache"]["slow"] = {**found, "said": said}
    rows["file"]["disk"] = medians([Restore(4096, 1200.0, 500.0, 580.0)], 2048.0)
    rows["recompute"] = {"disk": medians([Restore(4096, 9000.0)])}
    del rows["hcache-hidden-eager"]["balanced"]
    plan = restore_plan(*METHODS_RESTORED, tokens=4096)
    return {
        "date": "2026-01-01",
        "device": "a CPU",
        "sglang_version": "0.5.21",
        "attention_backend": "intel_amx",
        "model": "a model",
        "restore": report(plan, rows, Rates(66e6, 22e6)),
        "saving": {
            "history": 512,
            "batches": [1, 16],
            "ways": {
                name: {
                    "title": title,
                    "gaps_ms": {
                        "1": {"mean": 5.0, "median": 5.0, "p99": 7.0},
                        "16": {"mean": 9.0, "median": 8.0 + number, "p99": 30.0},
                    },
                }
                for number, (name, (title, _)) in enumerate(WAYS.items())
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
    assert "| HCache, KV pages | 2,048 | 1,000 | 400 | 1,590 | 1,000 |" in text
    assert "| HCache, hidden states, eager | 2,048 | 1,000 | 400 | - | 1,000 |" in text
    assert "| KV, SGLang file L3 | 2,048 | 1,200 | 500 | 580 | 1,000 |" in text
    assert "| recompute | - | 9,000 | - | - | - |" in text
    assert "- HCache, automatic, slow L3: 1 layer recomputed, 7 layers kept" in text
    assert "medians of 2: from the start" in text
    assert "all servers of ours: `restore_share` 1.0." in text
    assert "slowed down to 66 MB/s" in text
    assert "slowed down to 22 MB/s" in text
    assert "Left out: method hybrid: --model-path must be a folder" in text
    assert "| HCache: two stages | 5.0 (7.0), 1.00x | 9.0 (30.0), 1.12x |" in text
    assert "| recompute | 2.0 | 400 | 800 | 50.0 | 1.50 | 25 / ? / 50 |" in text
    assert "8 sessions, 30 requests" in text


def test_a_setting_that_was_not_tried_is_empty() -> None:
    rows = {"file": {"disk": medians([Restore(64, 2.0, 1.0, 1.0)], 1.0)}}
    found = report(restore_plan("file"), rows, None)
    assert found["methods"]["file"]["slow"] is None
    assert table_lines({"restore": found}).splitlines()[-1] == (
        "| KV, SGLang file L3 | 1 | 2 | 1 | - | - |"
    )


def test_bytes_that_differ_by_setting_are_all_said() -> None:
    def stored(bytes_per_token: float) -> dict[str, Any]:
        return medians([Restore(64, 2.0, 1.0, 1.0)], bytes_per_token)

    rows = {"file": {"disk": stored(65600), "balanced": stored(28800), "slow": stored(28800)}}
    [line] = table_lines({"restore": report(restore_plan("file"), rows, None)}).splitlines()[2:]
    assert line.startswith("| KV, SGLang file L3 | 65,600 / 28,800 |")


def test_each_part_has_its_table_in_the_documentation() -> None:
    found = comparison()
    for part, row in (
        ("restore", "| HCache, KV pages | 2,048 | 1,000 | 400 | 1,590 | 1,000 |"),
        ("saving", "| HCache: two stages | 5.0 (7.0), 1.00x | 9.0 (30.0), 1.12x |"),
        ("load", "| recompute | 2.0 | 400 | 800 | 50.0 | 1.50 | 25 / ? / 50 |"),
    ):
        assert row in table_lines({part: found[part]}).splitlines()


def test_what_a_server_said_of_its_layers() -> None:
    said = "partition: 8 layers loaded as KV; the best; KV mode, own pages: no hidden states"
    assert layers(said) == "KV pages"
    assert layers("hidden mode: 2 layers recomputed, 6 layers x, 64 bytes a 64-token page") == (
        "2 layers recomputed, 6 layers x"
    )
    assert layers("") == ""


def test_a_part_that_did_not_run_has_no_table() -> None:
    found = comparison()
    del found["load"]
    assert "Workload" not in markdown(found)


@pytest.mark.parametrize("part", PICTURES)
def test_pictures_are_drawn(part: str, tmp_path: Path) -> None:
    found = comparison()
    write_picture(tmp_path / "out.png", found, PICTURES[part])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_every_method_has_a_colour() -> None:
    assert set(COLOURS) == set(METHODS) >= set(METHODS_RESTORED)
