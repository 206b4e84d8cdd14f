"""Bursts of requests whose histories are in L3 and do not fit into host memory together."""

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.harness.server import Reply, Server, ServerOptions
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness.conversations import Conversation, ask, random_tokens
from tests.engine.harness.ours import (
    EVERY_HIT,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    faulty,
    our_server,
)
from tests.engine.hits.eager_servers import asked

pytestmark = pytest.mark.engine

PAGE, TOKENS, COUNT = 16, 416, 12
HOST = 3072
"""Tokens of host memory: half of it holds three histories."""
KINDS: dict[str, dict[str, Any]] = {
    "kv": {"hcache": {"mode": "kv"}},
    "plain": {"hcache": {"mode": "plain"}},
    "hidden": {"hcache": {"mode": "hidden"}},
    "two ranks": {"hcache": {"mode": "kv"}, "tp": 2},
    "two stages": {"hcache": {"mode": "kv"}, "pp": 2},
    "timeout": {"hcache": {"mode": "kv"}, "prefetch_policy": "timeout"},
}


def options(model: Path, folder: Path, kind: str, host: int = HOST) -> ServerOptions:
    given = dict(KINDS[kind])
    (folder / "faults").touch()
    return our_server(
        model,
        folder,
        hcache=EVERY_HIT | given.pop("hcache"),
        metrics=True,
        page_size=PAGE,
        max_total_tokens=host // 2,
        hicache_ratio=3.2 if kind == "hidden" else 2.0,
        extra_env=faulty("disk", folder / "faults"),
        extra_args=("--watchdog-timeout", "240"),
        **given,
    )


@pytest.fixture(
    scope="module",
    params=[
        "kv",
        "plain",
        "two ranks",
        "two stages",
        pytest.param("hidden", marks=pytest.mark.long),
        pytest.param("timeout", marks=pytest.mark.long),
    ],
)
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """All histories are in its L3."""
    with Server(options(model, tmp_path_factory.mktemp("bursts"), request.param)) as server:
        for number in range(COUNT):
            server.generate(history(number), 1)
            server.flush_cache()
        yield server
        assert_nothing_went_wrong(server)


@pytest.fixture(autouse=True)
def idle(server: Server) -> Iterator[None]:
    yield
    server.flush_cache()


def history(number: int) -> list[int]:
    return random_tokens(TOKENS, 500 + number)


def question(number: int, seed: int) -> list[int]:
    return [*history(number), *random_tokens(8, 1000 * seed + number)]


def l3_tokens(server: Server) -> Mapping[str, float]:
    return fetch(server.url).counters["l3_tokens"]


def more(server: Server, before: Mapping[str, float]) -> dict[str, float]:
    """What became of tokens since ``before``, without those that happened to none."""
    found = {what: number - before.get(what, 0) for what, number in l3_tokens(server).items()}
    return {what: number for what, number in found.items() if number}


@pytest.mark.parametrize("count", [2, 5, COUNT])
def test_a_burst_of_any_size_uses_what_one_by_one_uses(
    count: int, server: Server, model: Path
) -> None:
    before = l3_tokens(server)
    conversations = asked(server, *(question(number, count) for number in range(count)))
    from_l3 = [conversation.turns[0].cached.storage for conversation in conversations]
    assert from_l3 == [TOKENS] * count
    ranks = server.options.tp * server.options.pp
    counted = more(server, before)
    assert counted.pop("hit") + counted.pop("recomputed", 0) == ranks * count * TOKENS
    assert counted == {"found": ranks * count * TOKENS}, "nothing was read in vain"
    assert_no_cache_output(model, conversations)


def test_a_common_prefix_is_read_once(server: Server, model: Path) -> None:
    [first] = asked(server, question(0, 7))
    tails = [first.history + random_tokens(4 * PAGE, 700 + number) for number in range(6)]
    ask(server, tails, flush=False)
    server.flush_cache()
    before = l3_tokens(server)
    conversations = asked(server, *([*tail, 1, 2, 3] for tail in tails))
    whole = len(tails[0]) // PAGE * PAGE
    prefix = len(first.history) // PAGE * PAGE
    assert [conversation.turns[0].cached.total for conversation in conversations] == [whole] * 6
    from_l3 = sum(conversation.turns[0].cached.storage for conversation in conversations)
    assert from_l3 == prefix + 6 * (whole - prefix)
    counted = more(server, before)
    assert "unused" not in counted
    read = counted["hit"] + counted.get("recomputed", 0)
    assert read == server.options.tp * server.options.pp * from_l3
    assert_no_cache_output(model, conversations)


def test_a_return_that_was_announced_finds_its_history_in_memory(
    server: Server, model: Path
) -> None:
    server.generate(history(0), 1)
    [conversation] = asked(server, question(0, 11))
    cached = conversation.turns[0].cached
    assert (cached.device + cached.host, cached.storage) == (TOKENS, 0)
    assert_no_cache_output(model, [conversation])


def test_requests_that_are_gone_hold_nothing(server: Server, model: Path) -> None:
    faults = server.options.log.parent / "faults"
    replies: dict[int, Reply] = {}

    def talk(number: int) -> None:
        body = {"rid": f"burst {number}", "input_ids": question(number, 8)}
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        answer = server._request("POST", "/generate", json={**body, "sampling_params": sampling})
        if answer.status_code == 200:
            replies[number] = Reply(answer.json()["output_ids"], answer.json()["meta_info"])

    if server.options.prefetch_policy != "timeout":
        faults.write_text("slow reads")
    threads = [threading.Thread(target=partial(talk, number)) for number in range(COUNT)]
    for thread in threads:
        thread.start()
    for number in range(0, COUNT, 2):
        server.abort_request(f"burst {number}")
    faults.write_text("")
    for thread in threads:
        thread.join()
    stayed = [replies[number] for number in range(1, COUNT, 2)]
    assert [reply.cached.storage for reply in stayed] == [TOKENS] * (COUNT // 2)
    server.flush_cache()
    conversations = asked(server, *(question(number, 9) for number in range(COUNT)))
    assert [each.turns[0].cached.storage for each in conversations] == [TOKENS] * COUNT
    assert_no_cache_output(model, conversations)
    _assert_right(model, {number: replies[number] for number in range(1, COUNT, 2)})


def _assert_right(model: Path, replies: Mapping[int, Reply]) -> None:
    conversations = []
    for number, reply in replies.items():
        conversation = Conversation([question(number, 8)])
        conversation.add(conversation.next_prompt(), reply)
        conversations.append(conversation)
    assert_no_cache_output(model, conversations)
