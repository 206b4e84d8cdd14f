"""What `hcache plan --users` computes, held against a server at a small scale."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import MetricsPage, fetch
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.plan import Conversations, FleetPlan, PartitionPlan
from hcache_backend.plan.profile import Profile, Rate
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations

pytestmark = [pytest.mark.engine, pytest.mark.long]

COUNT, HISTORY, NEW, REPLY = 16, 1280, 64, 4
TURN_EVERY_S = 4.0
L3_RATE = 4_000_000
WITHIN = 0.2
"""The share by which a plan may be wrong. What else the machine does makes no byte more, but reads
longer and turns slower: time is held against the plan from one side, and recorded."""


def planned(model: Path) -> FleetPlan:
    """Turns of so many conversations, one of them every so many seconds."""
    slow, fast = Rate(per_second=1e9), Rate(per_second=1e12)
    machine = Profile(
        device="cpu", source="this test", dtype="float32", l3=Rate(per_second=L3_RATE),
        hidden_copy=fast, kv_load=fast, projection=fast, dense=slow, attention=slow,
    )  # fmt: skip
    plan = PartitionPlan(machine, read_model(model / "config.json"), HISTORY, 1, "auto")
    per_hour = 3600 / (COUNT * TURN_EVERY_S)
    return FleetPlan(plan, Conversations(COUNT, per_hour, NEW), 1)


def one_turn(server: Server, conversation: Conversation) -> None:
    converse(server, [conversation], turns=2, reply_tokens=REPLY, flush=False)
    turn = conversation.turns[-1]
    assert turn.cached.storage >= HISTORY - 2 * 64, turn.cached


def settled(server: Server) -> MetricsPage:
    server.wait_backed_up()
    time.sleep(1.5)  # counters of the page store are passed on once per second
    return fetch(server.url)


def test_a_plan_is_within_a_fifth_of_a_server(
    model_cache: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Bytes of L3 and of each turn, how busy L3 is, and how many turns per second it takes."""
    model = build_model("qwen3", model_cache)
    fleet, rate = planned(model), tmp_path / "l3-rate"
    rate.write_text("0")
    options = ours.our_server(
        model, tmp_path, hcache={"mode": "kv", "recompute": "never"}, metrics=True,
        max_total_tokens=16384, extra_env={"HCACHE_CPU_L3_FILE": str(rate)},
    )  # fmt: skip
    conversations = make_conversations(2 * COUNT, turns=2, tokens=HISTORY - REPLY)
    for conversation in conversations:
        conversation.questions[1] = conversation.questions[1][: NEW - REPLY]
    with Server(options) as server:
        ours.assert_own_pages_of_kv(server)
        for start in range(0, len(conversations), 8):
            converse(server, conversations[start : start + 8], turns=1, reply_tokens=REPLY)
        before = settled(server)
        assert "l3_read" not in before.stages
        stored = sum(page.stat().st_size for page in ours.stored_pages(tmp_path))
        rate.write_text(str(L3_RATE))

        start_time = time.monotonic()
        with ThreadPoolExecutor(COUNT) as pool:
            turns = []
            for number, conversation in enumerate(conversations[:COUNT]):
                time.sleep(max(0.0, start_time + number * TURN_EVERY_S - time.monotonic()))
                turns.append(pool.submit(one_turn, server, conversation))
            for turn in turns:
                turn.result()
        after = settled(server)
        added = sum(page.stat().st_size for page in ours.stored_pages(tmp_path)) - stored

        start_time = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda c: one_turn(server, c), conversations[COUNT:]))
        fastest = COUNT / (time.monotonic() - start_time)

    read = after.counters["store"]["bytes_read"] - before.counters["store"]["bytes_read"]
    reading = after.stages["l3_read"].seconds  # nothing was read before
    turns_of_plan = fleet.turns_per_second
    found = {
        "bytes of L3": (stored / 2 + added) / fleet.l3_bytes,
        "bytes read per turn": read / COUNT / (fleet.read_rate / turns_of_plan),
        "bytes written per turn": added / COUNT / (fleet.write_rate / turns_of_plan),
        "seconds that L3 is read": reading / (COUNT * TURN_EVERY_S) / fleet.busy["l3"],
        "most turns per second": fastest / (turns_of_plan / fleet.busy["l3"]),
    }
    record_property("share of the plan", {what: round(share, 3) for what, share in found.items()})
    assert fleet.binds == "l3"
    *counted, busy, most = found.values()
    assert counted == pytest.approx([1.0] * len(counted), rel=WITHIN), found
    assert busy >= 1 - WITHIN, found
    assert most <= 1 + WITHIN, found
