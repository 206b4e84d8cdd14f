"""Replicas behind SGLang's router, each with disks of its own, and an L3 behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.harness import router
from bench.harness.router import Router
from bench.harness.server import Server
from tests.engine.harness.conversations import (
    Conversation,
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_replies_up_to_ties,
    assert_nothing_went_wrong,
    faulty,
    stored_pages,
)

from .shared_l3 import PAGE, machine, values

WHY_NOT = router.missing()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no router: {WHY_NOT}"),
]


@contextmanager
def replicas(model: Path, folder: Path, **options: Any) -> Iterator[tuple[Router, list[Server]]]:
    """Two of them, and the router in front."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(machine(model, folder, name, {"mode": "kv"}, **options)))
            for name in ("first", "second")
        ]
        yield stack.enter_context(Router(servers, folder / "router.log")), servers


def until_each_can_read_what_the_other_has(servers: Sequence[Server], folder: Path) -> None:
    """What each machine has stored is behind all of them."""

    def is_behind() -> bool:
        stored = {
            page.name for server in servers for page in stored_pages(server.options.log.parent)
        }
        return len(values(folder)) == len(stored)

    for server in servers:
        server.wait_backed_up()
    servers[0].until(is_behind, "all to be behind")


def assert_history_was_found(conversation: Conversation) -> None:
    """On the device of the replica that had it, or else in L3."""
    turn = conversation.turns[-1]
    assert turn.cached.total >= turn.history_tokens - 2 * PAGE, turn.cached


def moved(conversations: Sequence[Conversation]) -> int:
    """How many went on with what L3 had."""
    return sum(c.turns[-1].cached.storage > 0 for c in conversations)


def test_conversations_go_on_elsewhere_while_replicas_restart(model: Path, tmp_path: Path) -> None:
    """A rolling restart, by SIGKILL: the first replica, and then the second one."""
    conversations = make_conversations(6, turns=3)
    with replicas(model, tmp_path) as (front, servers):
        converse(front, conversations, turns=1, flush=False, concurrent=True)
        for turns, server in enumerate(servers, 2):
            until_each_can_read_what_the_other_has(servers, tmp_path)
            assert stored_pages(server.options.log.parent), "it had no conversation"
            server.kill()
            converse(front, conversations, turns=turns, flush=False, concurrent=True)
            assert moved(conversations) > 0
            for conversation in conversations:
                assert_history_was_found(conversation)
            server.start(server.port)
            front.until_serving(server)
        for server in servers:
            assert_nothing_went_wrong(server)
    assert_no_cache_output(model, conversations)


@pytest.mark.long
def test_200_conversations_while_a_replica_restarts_with_another_format(
    model: Path, tmp_path: Path
) -> None:
    """They share no pages from then on, and serve on beside each other."""
    conversations = make_conversations(200, turns=3, tokens=100)
    with replicas(model, tmp_path) as (front, servers), ThreadPoolExecutor(8) as pool:

        def talk(turns: int) -> list[Future[Any]]:
            return [
                pool.submit(converse, front, [conversation], turns=turns, flush=False)
                for conversation in conversations
            ]

        def until_answered(replies: int) -> None:
            front.until(lambda: len(turns_of(conversations)) >= replies, f"{replies} replies")

        for done in talk(1):
            done.result()
        until_each_can_read_what_the_other_has(servers, tmp_path)
        running = talk(3)
        until_answered(250)
        servers[0].kill()
        until_answered(300)
        env = {**servers[0].options.extra_env, **faulty("other_format")}
        servers[0].options = dataclasses.replace(servers[0].options, extra_env=env)
        servers[0].start(servers[0].port)
        front.until_serving(servers[0])
        served_before = len(stored_pages(servers[0].options.log.parent))
        for done in running:
            done.result()
        assert len(stored_pages(servers[0].options.log.parent)) > served_before
        for server in servers:
            assert_nothing_went_wrong(server)
    later = [turn for conversation in conversations for turn in conversation.turns[1:]]
    assert sum(turn.cached.storage > 0 for turn in later) > len(conversations) / 4
    assert_no_cache_replies_up_to_ties(model, turns_of(conversations))
