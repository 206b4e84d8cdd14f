"""HiCache's policies, with pools that are too small for what is asked of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.server import Server
from tests.engine.harness.conversations import converse, make_conversations
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    extra_config,
    our_server,
)

pytestmark = pytest.mark.engine


def test_write_through_selective_backs_up_what_is_used_twice(model: Path, tmp_path: Path) -> None:
    options = our_server(model, tmp_path, write_policy="write_through_selective", page_size=16)
    with Server(options) as server:
        for _ in range(2):  # the second time makes it worth a backup
            first = make_conversations(2, turns=1, tokens=300, seed=1)
            converse(server, first, flush=False)
        server.flush_cache()
        again = make_conversations(2, turns=2, tokens=300, seed=1)
        converse(server, again)
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert all(c.turns[0].cached.storage >= 300 - 16 for c in again)
    assert_no_cache_output(model, again)


@pytest.mark.versions
def test_write_back_of_nodes_that_were_restored_and_evicted_again(
    model: Path, tmp_path: Path
) -> None:
    """The combination that is known to go wrong silently: see ARCHITECTURES.md, lesson two.

    The device pool holds two conversations of six, the host pool less than the device pool and
    the backlog, and three requests run at a time, so restored nodes are evicted and backed up a
    second time from whatever the device side of capture holds for them.
    (Shadow pages and headers leave HiCache 145 pages of the host memory; the device has 97.)
    """
    options = our_server(
        model,
        tmp_path,
        write_policy="write_back",
        page_size=16,
        max_total_tokens=1536,
        hicache_ratio=1.34,
    )
    with Server(options) as server:
        conversations = make_conversations(6, turns=3, tokens=120, seed=5)
        for start in (0, 3, 0, 3):
            part = conversations[start : start + 3]
            whole = [c.questions for c in part]
            for c, questions in zip(part, whole, strict=True):
                c.questions = questions[: len(c.turns) + 1]
            converse(server, part, flush=False, concurrent=True)
            for c, questions in zip(part, whole, strict=True):
                c.questions = questions
        converse(server, conversations, flush=False, concurrent=True)
        again = make_conversations(6, turns=3, tokens=120, seed=5)
        converse(server, again, flush=False, concurrent=True)
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert any(t.cached.host + t.cached.storage > 0 for c in again for t in c.turns)
    assert_no_cache_output(model, [*conversations, *again])


@pytest.mark.parametrize("policy", ["timeout", "best_effort"])
def test_prefetch_policies(policy: str, model: Path, tmp_path: Path) -> None:
    options = our_server(model, tmp_path, prefetch_policy=policy)
    # SGLang's one second would be a miss on a busy machine.
    patient = extra_config(tmp_path) | {"prefetch_timeout_base": 240}
    with Server(replace(options, extra_config=patient)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=400))
        assert_nothing_went_wrong(server)
    if policy == "timeout":  # best_effort may stop as soon as prefill could run
        assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)


def test_device_pool_of_1024_tokens_under_six_long_conversations(
    model: Path, tmp_path: Path
) -> None:
    options = our_server(model, tmp_path, page_size=16, max_total_tokens=1024)
    with Server(options) as server:
        conversations = make_conversations(6, turns=4, tokens=120, seed=6)
        converse(server, conversations, flush=False, concurrent=True, reply_tokens=48)
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert_no_cache_output(model, conversations)


def test_a_host_pool_that_holds_no_conversation_costs_hits_and_no_request(
    model: Path, tmp_path: Path
) -> None:
    # The shadows of the device's 257 pages leave HiCache 12 pages of 16 tokens.
    options = our_server(model, tmp_path, page_size=16, hicache_ratio=0.56)
    with Server(options) as server:
        conversations = converse(
            server, make_conversations(4, turns=3, tokens=300), flush=False, concurrent=True
        )
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
        assert "12 host pages, 257 shadows" in server.log_text()
    assert all(turn.cached.host == 0 for c in conversations for turn in c.turns)
    assert_no_cache_output(model, conversations)
