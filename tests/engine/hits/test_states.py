"""States of recurrent layers come back, also where host memory keeps few of them.

SGLang's host pool of states is sized for the requests that run. Every prompt and reply ends with a
state, so that host memory loses states whose K and V it still has.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import CachedTokens, Reply, Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import random_tokens

pytestmark = [pytest.mark.engine, pytest.mark.versions]

PAGE, GRID = 16, 64  # a state is kept every 64 tokens
IN_HOST = 13  # states: two for each on the device, and one


@pytest.fixture(scope="module")
def server(model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ours.our_server(
        build_model("qwen3_5", model_cache),
        tmp_path_factory.mktemp("states"),
        hcache={"mode": "auto"},
        page_size=PAGE,
        max_total_tokens=2048,
        extra_env={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
        extra_args=("--max-mamba-cache-size=6", "--max-running-requests=1"),
    )
    with Server(options) as running:
        yield running
        ours.assert_own_pages_of_kv(running)
        ours.assert_nothing_went_wrong(running)


def prompts(count: int, states: int, seed: int) -> list[list[int]]:
    """Prompts of which all tokens but the last one are before a state."""
    return [random_tokens(states * GRID + 1, seed + n) for n in range(count)]


def ask(server: Server, asked: Sequence[list[int]]) -> list[Reply]:
    return [server.generate(prompt, 4) for prompt in asked]


def assert_all_came_back(
    first: Sequence[Reply], again: Sequence[Reply], tier: CachedTokens
) -> None:
    assert [reply.cached for reply in first] == [CachedTokens()] * len(first)
    assert [reply.cached for reply in again] == [tier] * len(again)
    replies = [reply.output_ids for reply in first]
    assert [reply.output_ids for reply in again] == replies
    assert len({*map(tuple, replies)}) == len(replies), "wrong states would not be seen"


def test_a_full_hit_answers_as_the_prompt_without_a_cache(server: Server) -> None:
    """All tokens but the last one are in host memory, and then in L3 alone."""
    asked = prompts(10, states=2, seed=1000)
    first = ask(server, asked)
    assert_all_came_back(first, ask(server, asked), CachedTokens(host=2 * GRID))
    server.flush_cache()
    assert_all_came_back(first, ask(server, asked), CachedTokens(storage=2 * GRID))


def test_states_that_host_memory_has_lost_come_from_l3(server: Server) -> None:
    """It has room for the K and V of all prompts, and for states of half of them."""
    server.flush_cache()
    asked = prompts(2 * IN_HOST, states=1, seed=2000)
    first = ask(server, asked)
    for _ in range(2):
        assert_all_came_back(first, ask(server, asked), CachedTokens(storage=GRID))


def test_a_burst_waits_for_room_for_its_states(server: Server) -> None:
    """L3 has far more hits than host memory has room for states."""
    asked = prompts(5 * IN_HOST, states=1, seed=3000)
    first = ask(server, asked)
    server.flush_cache()
    assert_all_came_back(first, server.generate_many(asked, 4), CachedTokens(storage=GRID))


def test_a_shared_beginning_gets_a_state_that_comes_back(server: Server) -> None:
    """SGLang makes it where prompts were seen to part, behind a node whose K and V are stored."""
    shared, last = random_tokens(3 * GRID + PAGE, 4000), 3 * GRID + 1
    ask(server, [shared + random_tokens(80, 4001 + n) for n in range(3)])
    server.flush_cache()
    [found] = ask(server, [shared[:last]])
    server.clear_storage()
    server.flush_cache()
    assert_all_came_back(ask(server, [shared[:last]]), [found], CachedTokens(storage=3 * GRID))
