"""Hints of clients: a prompt that was announced is in host memory when its request comes."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.harness.options import ADMIN_KEY
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness.conversations import random_tokens
from tests.engine.harness.ours import assert_no_cache_output, assert_nothing_went_wrong
from tests.engine.hits.eager_servers import asked
from tests.engine.hits.test_bursts import PAGE, TOKENS, history, kinds, more, options, question

pytestmark = pytest.mark.engine

LONG = 136 * PAGE
"""Tokens: more than are read at a time."""
OTHERS = 9
"""Long prompts: host memory has room for eight."""


HINTED = "kv", "plain", "two ranks", "two stages"


def on(*often: str, every: Sequence[str] = HINTED) -> pytest.MarkDecorator:
    """The test has servers of these kinds."""
    return pytest.mark.parametrize("server", kinds(every, *often), indirect=True, scope="module")


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Four histories are in its L3, and a long one."""
    folder = tmp_path_factory.mktemp("hints")
    with Server(options(model, folder, request.param, host=8 * LONG)) as server:
        for prompt in (*map(history, range(4)), random_tokens(LONG, 600)):
            server.generate(prompt, 1)
            server.flush_cache()
        yield server
        assert_nothing_went_wrong(server)


@pytest.fixture(autouse=True)
def idle(server: Server) -> Iterator[None]:
    yield
    server.flush_cache()


def told(server: Server, body: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return requests.post(server.url + "/hcache/hint", json=body, headers=headers, timeout=60)


def answers(server: Server, action: str, tokens: list[int], **fields: Any) -> list[dict[str, Any]]:
    """What each data-parallel rank says of a hint."""
    answer = told(server, {"action": action, "input_ids": tokens, **fields})
    assert answer.status_code == 200, answer.text
    return list(answer.json())


def hint(server: Server, action: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    [said] = answers(server, action, tokens, **fields)
    return said


def is_there(server: Server, tokens: list[int]) -> bool:
    """Whether the device or host memory has a whole prompt, on all data-parallel ranks."""
    found = answers(server, "retain", tokens, seconds=1e-3)
    return all(said["in_memory"] == len(tokens) for said in found)


def hints(server: Server) -> dict[str, float]:
    counted = fetch(server.url).counters["hints"]
    return {how: number / ranks(server) for how, number in counted.items()}


def ranks(server: Server) -> int:
    return server.options.tp * server.options.pp


@on("kv", "two stages")
@pytest.mark.parametrize("tokens", [history(0), random_tokens(LONG, 600)], ids=["short", "long"])
def test_an_announced_prompt_is_in_memory(tokens: list[int], server: Server, model: Path) -> None:
    before = fetch(server.url).counters["l3_tokens"]
    assert hint(server, "prefetch", tokens) == {"tokens": len(tokens), "in_memory": 0, "kept": 0}
    server.until(partial(is_there, server, tokens), "the prompt of a hint in host memory")
    [conversation] = asked(server, [*tokens, *random_tokens(8, 21)])
    cached = conversation.turns[0].cached
    assert (cached.host, cached.storage) == (len(tokens), 0)
    assert_no_cache_output(model, [conversation])
    counted = more(server, before)
    assert counted.pop("found") == counted.pop("hint_useful") == ranks(server) * len(tokens)
    assert not counted
    assert hints(server)["useful"]


@on("kv")
def test_a_retained_prompt_stays_in_host_memory(server: Server, model: Path) -> None:
    server.generate(history(1), 1)
    server.wait_backed_up()
    assert hint(server, "retain", history(1))["kept"] == TOKENS
    for number in range(OTHERS):
        server.generate(random_tokens(LONG, 700 + number), 1)
    [conversation] = asked(server, question(1, 22))
    cached = conversation.turns[0].cached
    assert (cached.device + cached.host, cached.storage) == (TOKENS, 0)
    assert_no_cache_output(model, [conversation])
    assert hint(server, "demote", history(1)) == {"tokens": TOKENS, "ended": 1}
    for number in range(OTHERS):
        server.generate(random_tokens(LONG, 800 + number), 1)
    assert hint(server, "retain", history(1), seconds=1e-3)["in_memory"] == 0


@on("kv")
def test_a_hint_gives_way_to_requests_that_need_its_room(server: Server, model: Path) -> None:
    server.generate(prompt := random_tokens(3 * LONG, 650), 1)
    server.flush_cache()
    before = hints(server)
    hint(server, "prefetch", random_tokens(LONG, 600))
    server.until(partial(is_there, server, random_tokens(LONG, 600)), "a hint's prompt")
    conversations = asked(server, [*prompt, 1, 2, 3], question(0, 23), question(1, 23))
    from_l3 = [conversation.turns[0].cached.storage for conversation in conversations]
    assert from_l3 == [3 * LONG, TOKENS, TOKENS]
    assert_no_cache_output(model, conversations[1:])
    assert hints(server).get("given_up", 0) > before.get("given_up", 0)


@on("kv", "two stages")
def test_a_session_stands_for_its_last_prompt(server: Server) -> None:
    session = server._request("POST", "/open_session", json={"capacity_of_str_len": 9999}).json()
    body = {"input_ids": history(2), "session_params": {"id": session}}
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    answer = server._request("POST", "/generate", json={**body, "sampling_params": sampling})
    assert answer.status_code == 200
    server.wait_backed_up()
    [said] = told(server, {"action": "retain", "session": session}).json()
    assert (said["tokens"], said["kept"]) == (TOKENS + 4, TOKENS)
    server._request("POST", "/close_session", json={"session_id": session})
    again = told(server, {"action": "retain", "session": session})
    assert again.status_code == 400
    assert f"session '{session}' is not open" in again.text


BAD: dict[str, tuple[Any, str]] = {
    "no object": ([1, 2], "Input should be an object"),
    "unknown field": ({"action": "retain", "ids": [1]}, "ids: Extra inputs are not permitted"),
    "action": ({"action": "keep", "input_ids": [1]}, "action: Input should be 'retain', 'pref"),
    "nothing": ({"action": "retain"}, "'input_ids' (token ids) or 'session', and not both"),
    "another model": ({"action": "retain", "input_ids": [1, 1 << 20]}, "are of another model"),
    "no ids": ({"action": "retain", "input_ids": ["a"]}, "input_ids.0: Input should be a valid"),
    "too many": ({"action": "retain", "input_ids": [1] * 500_000}, "has 500000 tokens; a prompt"),
    "too long": ({"action": "retain", "input_ids": [1], "seconds": 1e9}, "seconds: Input should"),
    "session": ({"action": "retain", "session": "none"}, "session 'none' is not open"),
}


@on("kv", every=["kv"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_hint_is_an_error_that_says_why(what: str, server: Server) -> None:
    body, message = BAD[what]
    answer = told(server, body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@on("kv", every=["kv"])
def test_the_command_sends_a_hint(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(history(3)))

    def hcache(action: str, *key: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "hcache_backend.cli.main", "hint", action, str(path)]
        command += ["--url", server.url, *key]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        return done.stdout or done.stderr

    key = "--api-key", ADMIN_KEY
    said = hcache("prefetch", *key)
    assert said == f"{TOKENS} tokens: 0 on the device or in host memory, 0 of them are kept\n"
    server.until(partial(is_there, server, history(3)), "the prompt of a hint in host memory")
    assert hcache("demote", *key).endswith(" hints have ended\n")
    assert hcache("demote", status=2) == "hcache: 401: give its --api-key\n"
