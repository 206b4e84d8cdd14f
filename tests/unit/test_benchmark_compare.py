"""What a comparison plans, and what it makes of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.benchmark.driver import Pace
from hcache_backend.cli.bench_server import METHODS
from hcache_backend.cli.compare_load import LoadPlan
from hcache_backend.cli.compare_report import COLOURS, draw, markdown
from hcache_backend.cli.compare_restore import (
    METHODS_RESTORED,
    Restored,
    RestorePlan,
    forget_files,
    l3_bytes,
    median_of,
    report,
    steps,
)
from hcache_backend.cli.demo_report import Restore
from hcache_backend.cli.machine import Machine
from hcache_backend.cli.main import app
from hcache_backend.workload.base import Session, Turn, Workload

CPU = Machine("cpu", "a CPU", "0", ())


def restore_plan(folder: Path, rounds: int = 2) -> RestorePlan:
    return RestorePlan(CPU, "model", 128, rounds, 1000, (), folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "file,magic"], "--methods 'magic': must be of ideal, recompute"),
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
    done = CliRunner().invoke(app, ["bench", "compare", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_histories_are_those_of_the_seed_and_one_warms_up(tmp_path: Path) -> None:
    histories = restore_plan(tmp_path).histories()
    assert histories == restore_plan(tmp_path).histories()
    assert [len(history) for history in histories] == [128] * 3
    assert len({tuple(history) for history in histories}) == 3


def test_steps_are_counted_as_they_come(tmp_path: Path) -> None:
    plan = restore_plan(tmp_path)
    assert steps(plan, ["recompute"]) == 1 + 3
    assert steps(plan, ["hcache"]) == 1 + 3 + 3
    assert steps(plan, ["hcache-hidden", "file"]) == 2 * (1 + 3 + 3 + 3)
    assert steps(plan, ["file"]) == 1 + 3 + 3  # nothing says which bus is balanced


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
    rows = {
        name: Restored([Restore(4096, 1000.0, 400.0, 580.0)] * 3, bytes_per_token=2048.0)
        for name in METHODS_RESTORED
    }
    rows["hcache-kv"].balanced = [Restore(4096, 2000.0, 400.0, 1590.0)]
    rows["recompute"] = Restored([Restore(4096, 9000.0)])
    return {
        "date": "2026-01-01",
        "device": "a CPU",
        "sglang_version": "0.5.21",
        "model": "a model",
        "restore": report(rows, 4096, 66e6),
        "load": {
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
            },
        },
    }


def test_the_tables_have_a_row_for_each_method() -> None:
    text = markdown(comparison())
    assert "| HCache, KV pages | 2,048 | 1,000 | 400 | 580 | 1,590 |" in text
    assert "| recompute | - | 9,000 | - | - | - |" in text
    assert "slowed down to 66 MB/s" in text
    assert "| recompute | 2.0 | 400 | 800 | 50.0 | 1.50 | 25 / ? / 50 |" in text
    assert "8 sessions, 30 requests" in text


def test_a_part_that_did_not_run_has_no_table() -> None:
    found = comparison()
    del found["load"]
    assert "Workload" not in markdown(found)


def test_pictures_are_drawn(tmp_path: Path) -> None:
    found = comparison()
    paths = draw(found, tmp_path / "compare")
    assert [path.name for path in paths] == ["compare_restore.png", "compare_load.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    del found["restore"]
    assert [path.name for path in draw(found, tmp_path / "other")] == ["other_load.png"]


def test_every_method_has_a_colour() -> None:
    assert set(COLOURS) == set(METHODS)
