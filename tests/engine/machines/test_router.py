"""Replicas behind SGLang's router, each with disks of its own, and an L3 that they share."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations
from tests.engine.harness.router import Router

from .servers import ROUTER, started
from .shared_l3 import PAGE, machine, values

pytestmark = [pytest.mark.engine, ROUTER]


@contextmanager
def replicas(model: Path, folder: Path, **options: Any) -> Iterator[tuple[Router, list[Server]]]:
    """Two of them, and the router in front."""
    servers = [
        Server(machine(model, folder, name, {"mode": "kv"}, **options))
        for name in ("first", "second")
    ]
    with started(*servers), Router(servers, folder / "router.log") as front:
        yield front, servers


def until_each_can_read_what_the_other_has(servers: Sequence[Server], folder: Path) -> None:
    """What each machine has stored is in the shared L3."""

    def is_shared() -> bool:
        stored = {
            page.name for server in servers for page in ours.stored_pages(server.options.log.parent)
        }
        return len(values(folder)) == len(stored)

    for server in servers:
        server.wait_backed_up()
    servers[0].until(is_shared, "all to be shared")


def assert_history_was_found(conversation: Conversation) -> None:
    turn = conversation.turns[-1]
    assert turn.cached.total >= turn.history_tokens - 2 * PAGE, turn.cached


def moved(conversations: Sequence[Conversation]) -> int:
    """How many went on with what L3 had."""
    return sum(c.turns[-1].cached.storage > 0 for c in conversations)


def begin_on_each(servers: Sequence[Server], conversations: Sequence[Conversation]) -> None:
    """The router's choice depends on how long requests take, so the replicas are asked."""
    for number, server in enumerate(servers):
        own = conversations[number :: len(servers)]
        converse(server, own, turns=1, flush=False, concurrent=True)


def one_is_killed(
    front: Router, servers: Sequence[Server], gone: Server, conversations: Sequence[Conversation]
) -> None:
    """By SIGKILL, when the other one can read what it had; then all have their next turn."""
    until_each_can_read_what_the_other_has(servers, front.options.log.parent)
    assert ours.stored_pages(gone.options.log.parent)
    gone.kill()
    turns = len(conversations[0].turns) + 1
    converse(front, conversations, turns=turns, flush=False, concurrent=True)


def restart(front: Router, server: Server, **env: str) -> None:
    """At the port that the router knows."""
    env = {**server.options.extra_env, **env}
    server.options = dataclasses.replace(server.options, extra_env=env)
    server.start(server.port)
    front.until_serving(server)


def assert_all_went_on(conversations: Sequence[Conversation]) -> None:
    assert moved(conversations) > 0
    for conversation in conversations:
        assert_history_was_found(conversation)


@pytest.mark.parametrize(
    "fault", ["other_format", pytest.param("", marks=pytest.mark.long)], ids=["format", "same"]
)
def test_conversations_go_on_while_replicas_restart(
    fault: str, model: Path, tmp_path: Path
) -> None:
    """A rolling restart: first they go on with what L3 has. A replica with another format has
    nothing yet."""
    conversations = make_conversations(6, turns=3)
    with replicas(model, tmp_path) as (front, servers):
        first, second = servers
        begin_on_each(servers, conversations)
        one_is_killed(front, servers, first, conversations)
        assert_all_went_on(conversations)
        ours.assert_nothing_went_wrong(second)
        restart(front, first, **(ours.faulty(fault) if fault else {}))
        one_is_killed(front, servers, second, conversations)
        if fault:
            assert [c.turns[-1].cached.total for c in conversations] == [0] * len(conversations)
        else:
            assert_all_went_on(conversations)
        ours.assert_nothing_went_wrong(first)
    ours.assert_no_cache_output(model, conversations)
