"""Workloads of agents, and what tiers keep of them."""

import json
import lzma
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bench.agents import AHEAD_S, Tier, announced
from bench.eviction import best_possible, lru_by_chains
from bench.workload.agents import (
    LEVELS,
    QUANTILES,
    Session,
    agent_sessions,
    as_requests,
    generated,
    prefix_share,
)
from bench.workload.base import WorkloadError
from bench.workload.traces import Request

PREFIX_SHARE = 0.963  # of the trace that the table is of
WITHIN = {"turns": 0.25, "first": 0.2, "prompt": 0.2, "new": 0.15, "output": 0.05, "idle": 0.15}


def quantiles(sessions: Sequence[Session]) -> dict[str, tuple[float, ...]]:
    """The rows of the table that are not shares, of these sessions."""
    pairs = [pair for session in sessions for pair in pairwise(session)]
    values: dict[str, list[float]] = {
        "turns": [len(session) for session in sessions],
        "first": [session[0].prompt for session in sessions],
        "prompt": [turn.prompt for session in sessions for turn in session],
        "output": [turn.output for session in sessions for turn in session],
        "new": [b.prompt - b.shared for a, b in pairs if b.shared >= 0.95 * a.prompt],
        "idle": [max(0.5, b.time - a.answered) for a, b in pairs],
    }
    return {n: tuple(np.quantile(all_, LEVELS).tolist()) for n, all_ in values.items()}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_generated_sessions_have_the_quantiles_of_the_trace(seed: int) -> None:
    sessions = generated(710, seed)
    found = quantiles(sessions)
    for name, within in WITHIN.items():
        for level, drawn, wanted in zip(LEVELS, found[name], QUANTILES[name], strict=True):
            if 0.05 <= level <= 0.9:
                assert drawn == pytest.approx(wanted, rel=within, abs=1), (name, level)
    assert prefix_share(sessions) == pytest.approx(PREFIX_SHARE, abs=0.01)
    assert generated(710, seed) == sessions


SESSIONS = [
    {
        "tool": 64,
        "sys": 64,
        "requests": [
            {"t": 0.0, "type": "n", "in": 200, "out": 5, "api_time": 1.5, "hash_ids": [0, 1, 2, 3]},
            {"t": 2.0, "type": "subagent"},
            {"t": 9.0, "type": "s", "in": 270, "out": 6, "hash_ids": [3, 4]},
            {"t": 30.0, "type": "n", "in": 140, "out": 7, "api_time": 2.0, "hash_ids": [1, 9]},
        ],
    }
]


@pytest.mark.parametrize("ending", [".json", ".json.xz"])
def test_a_trace_of_agents_is_read(ending: str, tmp_path: Path) -> None:
    path, text = tmp_path / f"trace{ending}", json.dumps(SESSIONS).encode()
    path.write_bytes(lzma.compress(text) if ending.endswith(".xz") else text)
    [session] = agent_sessions(path)
    assert [(turn.prompt, turn.shared, turn.output) for turn in session] == [
        (200, 0, 5),
        (270, 192, 6),
        (140, 64, 7),
    ]
    assert [turn.answered for turn in session] == [1.5, 9.0, 32.0]
    [first, second, third] = [request.pages for _, request in as_requests([session], 64, 1, 0.0)]
    assert (len(first), len(second), len(third)) == (3, 4, 2)
    assert first == second[:3]
    assert first[:1] == third[:1]
    assert third[1] not in second


def test_a_trace_of_mooncake_is_read(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 4000, "input_length": 1600, "output_length": 6, "hash_ids": [7, 12, 13, 14]},
        {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 10]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    [first, second], [third] = agent_sessions(path)
    assert first == (0.0, 600, 0, 4, 0.0)
    assert second == (2.0, 1100, 512, 5, 2.0)
    assert third == (0.0, 1600, 0, 6, 0.0), "another prompt that shares its first block"


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize(
    "text", ["[3]", '{"requests": 1}', "no JSON", '[{"requests": [{"in": 1}]}]']
)
def test_something_else_is_named(text: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"other.{ending}"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=r"other.json.*: not a trace"):
        agent_sessions(path)


def test_a_tier_by_lru_keeps_what_lru_by_chains_keeps_and_no_order_beats_the_best_possible() -> (
    None
):
    told = as_requests(generated(12, 1), 1024, 1, 3600.0)
    trace = [request for _, request in told]
    pages, asked = len({p for r in trace for p in r.pages}), sum(r.prompt for r in trace)
    for share in (0.05, 0.2, 0.5):
        capacity = int(share * pages)
        found = {}
        for order in ("lru", "returns"):
            tier = Tier(capacity, order)
            for number, request in told:
                tier.serve(number, request)
                assert sum(held.there for held in tier._sessions.values()) <= capacity
            found[order] = tier.found
            assert tier.written == asked - tier.found
        assert found["lru"] == pytest.approx(lru_by_chains(trace, capacity), abs=0.01 * asked)
        assert max(found.values()) <= best_possible(trace, capacity)
        assert found["returns"] > found["lru"] - 0.02 * asked


def test_announced_sessions_are_brought_back_before_their_turns() -> None:
    one, other = (Request(0.0, range(n, n + 6), 6) for n in (0, 10))
    returns = [one._replace(time=20.0), other._replace(time=20.0 + 2 * AHEAD_S)]
    told = [(0, one), (1, other._replace(time=1.0)), (0, returns[0]), (1, returns[1])]
    tier = announced(told, 7)
    assert (tier.found, tier.written, tier.brought) == (12, 12, 10)
    silent = Tier(7, "lru")
    for number, request in told:
        silent.serve(number, request)
    assert (silent.found, silent.written) == (2, 22)


def test_a_hint_does_not_come_before_the_turn_before() -> None:
    request = Request(0.0, range(6), 6)
    tier = announced([(0, request), (0, request._replace(time=AHEAD_S / 2))], 6)
    assert (tier.found, tier.brought) == (6, 0)
