"""Hints of clients: a prompt that was announced is in host memory when its request comes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
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
from tests.engine.hits.test_bursts import PAGE, TOKENS, history, more, options, question

pytestmark = pytest.mark.engine

LONG = 160 * PAGE
"""Tokens: more than are read at a time."""


@pytest.fixture(scope="module", params=["kv", "plain", "two ranks"])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Four histories are in its L3, and a long one."""
    folder = tmp_path_factory.mktemp("hints")
    with Server(options(model, folder, request.param, host=4 * LONG)) as server:
        for prompt in (*map(history, range(4)), random_tokens(LONG, 600)):
            server.generate(prompt, 1)
            server.flush_cache()
        yield server
        assert_nothing_went_wrong(server)


@pytest.fixture(autouse=True)
def idle(server: Server) -> Iterator[None]:
    yield
    server.flush_cache()


def told(server: Server, body: Any, key: str = ADMIN_KEY) -> requests.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(server.url + "/hcache/hint", json=body, headers=headers, timeout=60)


def hint(server: Server, action: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    answer = told(server, {"action": action, "input_ids": tokens, **fields})
    assert answer.status_code == 200, answer.text
    [said] = answer.json()
    return dict(said)


def is_there(server: Server, tokens: list[int]) -> bool:
    """Whether the device or host memory has a whole prompt."""
    return bool(hint(server, "retain", tokens, seconds=1e-3)["in_memory"] == len(tokens))


def hints(server: Server) -> dict[str, float]:
    counted = fetch(server.url).counters["hints"]
    return {how: number / server.options.tp for how, number in counted.items()}


@pytest.mark.parametrize("tokens", [history(0), random_tokens(LONG, 600)], ids=["short", "long"])
def test_an_announced_prompt_is_in_host_memory_when_it_comes(
    tokens: list[int], server: Server, model: Path
) -> None:
    before = fetch(server.url).counters["l3_tokens"]
    assert hint(server, "prefetch", tokens) == {"tokens": len(tokens), "in_memory": 0, "kept": 0}
    server.until(partial(is_there, server, tokens), "the prompt of a hint in host memory")
    [conversation] = asked(server, [*tokens, *random_tokens(8, 21)])
    cached = conversation.turns[0].cached
    assert (cached.host, cached.storage) == (len(tokens), 0)
    assert_no_cache_output(model, [conversation])
    counted = more(server, before)
    assert counted.pop("found") == counted.pop("hint_useful") == server.options.tp * len(tokens)
    assert not counted
    assert hints(server)["useful"]
