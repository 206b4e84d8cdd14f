"""What conversations take of servers, computed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.plan.fleet import Conversations, FleetPlan
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.presets import preset_profile
from hcache_backend.plan.profile import Rate
from tests.unit.partition.pipelines import CONFIGS, public_model

TOKENS = 8000


def fleet(
    model: str = "llama-3-8b",
    *,
    number: int = 1000,
    turns: float = 6.0,
    new: int = 500,
    replicas: int = 1,
    ssds: int = 4,
) -> FleetPlan:
    profile = preset_profile("h100", ssds)
    plan = PartitionPlan(profile, public_model(model), TOKENS, 1, "auto")
    return FleetPlan(plan, Conversations(number, turns, new), replicas)


def test_l3_holds_every_conversation_with_its_last_turn() -> None:
    assert fleet().l3_bytes == 1000 * (TOKENS + 500) * 32 * 4096


def test_rates_are_turns_times_bytes() -> None:
    found = fleet(number=3600, turns=2.0)
    assert found.turns_per_second == pytest.approx(2.0)
    assert found.read_rate == pytest.approx(2.0 * TOKENS * 32 * 4096)
    assert found.write_rate == pytest.approx(2.0 * 500 * 32 * 4096)
    assert found.network_rate == 0, "one replica"


def test_a_resource_is_busy_for_its_part_of_a_turn() -> None:
    found = fleet(number=3600, turns=1.0)
    assert found.busy["l3"] == pytest.approx(TOKENS * 32 * 4096 / (4 * 6.9e9))
    assert found.busy["l3"] > found.busy["bus"] > 0
    assert found.busy["compute"] < found.recompute_busy


def test_replicas_share_the_turns() -> None:
    one, four = fleet(), fleet(replicas=4)
    for resource, share in one.busy.items():
        assert four.busy[resource] == pytest.approx(share / 4)
    assert four.network_rate == pytest.approx(one.read_rate / 4 * 3 / 4)
    assert four.most_conversations == pytest.approx(4 * one.most_conversations, rel=1e-3)


def test_with_the_most_conversations_one_resource_works_all_the_time() -> None:
    found = fleet()
    most = fleet(number=found.most_conversations)
    assert most.busy[most.binds] == pytest.approx(1, rel=1e-3)
    assert max(most.busy.values()) <= 1
    assert fleet(number=2 * found.most_conversations).l2_bytes is None, "turns pile up"


def test_l2_grows_with_the_turns_under_way() -> None:
    few, many = fleet(number=10), fleet(number=fleet().most_conversations * 9 // 10)
    assert few.l2_bytes == (TOKENS + 500) * 32 * 4096, "one turn at least"
    assert many.l2_bytes is not None and many.l2_bytes > 5 * few.l2_bytes


def test_hits_that_are_refused_are_computed_and_not_read() -> None:
    slow = preset_profile("h100").model_copy(update={"l3": Rate(per_second=5e8)})
    read = fleet("llama-2-7b", ssds=1)
    assert not read.plan.refused and read.busy["l3"] == pytest.approx(
        read.turns_per_second * TOKENS * 32 * 8192 / 6.9e9
    ), "all of it, however much of it an idle server would recompute"
    found = replace(read, plan=replace(read.plan, profile=slow))
    assert found.plan.refused
    assert found.read_rate == found.busy["l3"] == found.busy["bus"] == 0
    assert found.busy["compute"] == pytest.approx(found.recompute_busy)


def run(*options: object) -> Any:
    model = CONFIGS / "llama-3-8b.json"
    arguments = ["plan", "-m", model, "-w", "h100", "--ssds", 4, "--tokens", TOKENS, *options]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_says_it_and_that_it_is_computed() -> None:
    done = run("--users", 100_000, "--replicas", 8, "--json")
    assert done.exit_code == 0, done.output
    found, report = json.loads(done.stdout), json.loads(done.stdout)["fleet"]
    assert found["bytes_per_token"] == 32 * 3136, "encoded"
    plain = json.loads(run("--users", 100_000, "--replicas", 8, "--codec", "none", "--json").stdout)
    assert plain["fleet"] == json.loads(json.dumps(fleet(number=100_000, replicas=8).report()))
    assert report["l3_bytes"] == plain["fleet"]["l3_bytes"] * 3136 // 4096
    text = run("--users", 100_000, "--replicas", 8).stdout
    assert "100,000 conversations" in text and "not measured" in text
    assert f"With {report['most_conversations']:,} conversations" in text


@pytest.mark.parametrize("option", ["--users", "--replicas", "--new-tokens", "--turns-per-hour"])
def test_numbers_that_make_no_sense_are_refused(option: str) -> None:
    done = run("--users", 10, option, 0)
    assert done.exit_code == 2
    assert option in done.output
