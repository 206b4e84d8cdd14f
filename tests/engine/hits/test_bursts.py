"""Bursts of requests whose histories are in L3 and do not fit into host memory together."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.harness.server import Reply, Server, ServerOptions
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness.conversations import Conversation, ask, random_tokens, turns_of
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
    "kv": {},
    "two ranks": {"tp": 2},
    "plain": {"mode": "plain"},
    "hidden": {"mode": "hidden", "hicache_ratio": 3.2},
    "two stages": {"pp": 2},
    "timeout": {"prefetch_policy": "timeout"},
}


def options(model: Path, folder: Path, kind: str, host: int = HOST) -> ServerOptions:
    given: dict[str, Any] = {"mode": "kv", "hicache_ratio": 2.0} | KINDS[kind]
    (folder / "faults").touch()
    return our_server(
        model,
        folder,
        hcache=EVERY_HIT | {"mode": given.pop("mode")},
        metrics=True,
        page_size=PAGE,
        max_total_tokens=host // 2,
        extra_env=faulty("disk", folder / "faults"),
        extra_args=("--watchdog-timeout", "240"),
        **given,
    )


def kinds(every: Iterable[str], *often: str) -> list[Any]:
    """Parameters for kinds of servers; those that are not for every run are for long tests."""
    return [pytest.param(kind, marks=() if kind in often else pytest.mark.long) for kind in every]


@pytest.fixture(scope="module", params=kinds(KINDS, "kv", "two ranks"))
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


@pytest.mark.parametrize("count", [2, COUNT])
def test_a_burst_uses_what_one_by_one_uses(count: int, server: Server, model: Path) -> None:
    before = l3_tokens(server)
    conversations = asked(server, *(question(number, count) for number in range(count)))
    assert {turn.cached.storage for turn in turns_of(conversations)} == {TOKENS}
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
    cached = [turn.cached for turn in turns_of(conversations)]
    assert [each.total for each in cached] == [whole] * 6
    from_l3 = sum(each.storage for each in cached)
    assert from_l3 == prefix + 6 * (whole - prefix)
    counted = more(server, before)
    assert "unused" not in counted
    read = counted["hit"] + counted.get("recomputed", 0)
    assert read == server.options.tp * server.options.pp * from_l3
    assert_no_cache_output(model, conversations)


def test_requests_that_are_gone_hold_nothing(server: Server, model: Path) -> None:
    faults = server.options.log.parent / "faults"
    talks = [Conversation([question(number, 8)]) for number in range(COUNT)]

    def talk(number: int) -> None:
        prompt = talks[number].next_prompt()
        sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"rid": f"burst {number}", "input_ids": prompt, "sampling_params": sampling}
        answer = server._request("POST", "/generate", json=body)
        if answer.status_code == 200:
            reply = answer.json()
            talks[number].add(prompt, Reply(reply["output_ids"], reply["meta_info"]))

    if server.options.prefetch_policy != "timeout":
        faults.write_text("slow reads")
    with ThreadPoolExecutor(COUNT) as pool:
        asking = [pool.submit(talk, number) for number in range(COUNT)]
        for number in range(0, COUNT, 2):
            server.abort_request(f"burst {number}")
        faults.write_text("")
        for each in asking:
            each.result()
    stayed = talks[1::2]
    server.flush_cache()
    again = asked(server, *(question(number, 9) for number in range(COUNT)))
    for conversations in (stayed, again):
        assert {turn.cached.storage for turn in turns_of(conversations)} == {TOKENS}
        assert_no_cache_output(model, conversations)
