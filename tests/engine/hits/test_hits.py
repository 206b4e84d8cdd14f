"""L3 hits on servers where computing is slow, and L3 much faster or much slower than that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness.server import Server, ServerOptions
from hcache_backend.prefetch.estimates import LONGEST_PART_SECONDS, STALLED_SECONDS
from tests.engine.harness.conversations import Conversation, random_tokens, turns_of
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    faulty,
    our_server,
)
from tests.engine.hits.eager_servers import asked, counted, stored, tokens

pytestmark = pytest.mark.engine

PAGE = 16
TOKENS = 400
"""Computing them takes 0.8 s (see the fault `slow_prefill`)."""
FAST, HELD = 0, -1
"""Rates of L3 in bytes per second: no limit; what is read arrives when there is another rate."""


class Kind(NamedTuple):
    hcache: dict[str, Any]
    token_bytes: int
    """Of a page in L3."""


OWN = {"mode": "kv", "restore": "auto"}
HIDDEN = {"mode": "hidden", "restore": "auto"}
KINDS = {
    "own": Kind(OWN | {"recompute": "never"}, 8192),
    "from the back": Kind(OWN, 8192),
    "encoded": Kind(OWN, 3136),
    "hidden": Kind(HIDDEN, 4096),
    "hidden, encoded": Kind(HIDDEN, 1568),
    "layerwise": Kind({"mode": "kv", "restore": "layerwise"}, 8192),
    "plain": Kind({"mode": "plain"}, 8192),
}
AssertRight = Callable[[Sequence[Conversation]], None]


def server_options(model: Path, folder: Path, kind: str, **options: Any) -> ServerOptions:
    (folder / "l3-rate").write_text(str(FAST))
    (folder / "faults").touch()
    hcache = {"min_gain": 1.0, **KINDS[kind].hcache}
    dtype = "bfloat16" if "encoded" in kind else "float32"
    faults = faulty("slow_prefill,disk", folder / "faults")
    env = {**faults, "HCACHE_CPU_L3_FILE": str(folder / "l3-rate")}
    return our_server(
        model,
        folder,
        hcache=hcache,
        metrics=True,
        extra_args=("--watchdog-timeout", "240"),
        extra_env=env,
        page_size=PAGE,
        dtype=dtype,
        **options,
    )


def l3_rate(server: Server, rate: int) -> None:
    (server.options.log.parent / "l3-rate").write_text(str(rate))


STALL_SECONDS = 2 * LONGEST_PART_SECONDS + STALLED_SECONDS
"""A request waits so long for L3, at most."""


def stored_prompts(server: Server, *seeds: int) -> tuple[list[list[int]], float]:
    """Prompts that L3 has, and how long computing them took."""
    start = time.monotonic()
    return [stored(server, seed, TOKENS) for seed in seeds], time.monotonic() - start


@contextmanager
def held_up_by_a_stall_at_most(computing: float) -> Iterator[None]:
    """The block takes no longer than computing took and the bound: with room for a machine that has
    become much busier."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 4 * (computing + STALL_SECONDS)


def slower_than_computing(kind: str, times: float) -> int:
    """A rate at which reading takes so many times as long as computing."""
    return int(500 * KINDS[kind].token_bytes / times)


def count(server: Server, result: str) -> float:
    return counted(server, "l3_tokens", result)


def from_l3(server: Server, prompt: list[int]) -> tuple[int, list[Conversation]]:
    [conversation] = asked(server, prompt)
    return conversation.turns[0].cached.storage, [conversation]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=() if kind == "from the back" else pytest.mark.long)
        for kind in KINDS
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def assert_right(kind: str, model: Path, tmp_path: Path) -> AssertRight:
    if "encoded" in kind:
        return partial(assert_no_cache_output_up_to_ties, model, tmp_path)
    return partial(assert_no_cache_output, model)


@pytest.fixture(scope="module")
def shared(kind: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(server_options(model, tmp_path_factory.mktemp("hits"), kind)) as server:
        yield server


@pytest.fixture
def server(shared: Server, model: Path, kind: str) -> Iterator[Server]:
    """It knows that L3 is fast."""
    l3_rate(shared, FAST)
    shared.flush_cache()
    learn_that_l3_is_fast(shared)
    yield shared
    l3_rate(shared, FAST)
    assert ("encoded" in kind) == ("codec exp4" in shared.log_text())  # by default in bfloat16
    assert_nothing_went_wrong(shared)
    assert "decision about an L3 hit failed" not in shared.log_text()


def learn_that_l3_is_fast(server: Server) -> None:
    """Until two hits in a row are read; a trial is due every ten seconds."""
    in_a_row = 0

    def read() -> bool:
        nonlocal in_a_row
        found, _ = from_l3(server, stored(server, 1, TOKENS))
        server.flush_cache()
        in_a_row = in_a_row + 1 if found >= TOKENS - 2 * PAGE else 0
        return in_a_row == 2

    server.until(read, "hits to be read")


def refused(server: Server, conversations: list[Conversation]) -> bool:
    before = count(server, "slower")
    _, again = from_l3(server, stored(server, len(conversations) + 100, TOKENS))
    conversations += again
    return again[0].turns[0].cached.storage == 0 and count(server, "slower") > before


def test_a_slow_disk_is_refused_and_tried_again(
    assert_right: AssertRight, kind: str, server: Server
) -> None:
    """The first one is begun, and ends; what it took is known then."""
    l3_rate(server, slower_than_computing(kind, 10))
    conversations: list[Conversation] = []
    server.until(lambda: refused(server, conversations), "a refused hit")
    l3_rate(server, FAST)
    learn_that_l3_is_fast(server)
    assert_right(conversations)


def test_a_silent_disk_holds_nobody_up(assert_right: AssertRight, server: Server) -> None:
    """It never answers again: without a bound this would wait for ever."""
    prompts, computing = stored_prompts(server, 7, 8, 9)
    recomputed = count(server, "recomputed")
    l3_rate(server, HELD)
    with held_up_by_a_stall_at_most(computing):
        conversations = [*asked(server, *prompts)]
    with held_up_by_a_stall_at_most(computing):
        conversations += asked(server, prompts[0] + random_tokens(50, 10))
    # What was recomputed at the front meanwhile counts as L3's.
    recomputed = count(server, "recomputed") - recomputed
    assert sum(turn.cached.storage for turn in turns_of(conversations)) <= recomputed
    # A hit that was recomputed whole waited for nothing that could be stalled.
    assert recomputed or counted(server, "problems", "l3_stalled") >= 1
    l3_rate(server, FAST)
    assert_right(conversations)


def test_a_silent_index_holds_nobody_up(assert_right: AssertRight, server: Server) -> None:
    prompts, computing = stored_prompts(server, 17, 18)
    faults = server.options.log.parent / "faults"
    faults.write_text("held look-ups")
    with held_up_by_a_stall_at_most(computing):
        conversations = [*asked(server, *prompts)]
    assert counted(server, "problems", "l3_stalled") >= 1
    with held_up_by_a_stall_at_most(computing):
        conversations += asked(server, prompts[0] + random_tokens(50, 19))
    faults.write_text("")
    assert [turn.cached.storage for turn in turns_of(conversations)] == [0, 0, 0]
    assert_right(conversations)


def test_a_stall_leaves_what_has_arrived(
    assert_right: AssertRight, kind: str, server: Server
) -> None:
    if kind in ("layerwise", "plain"):
        pytest.skip("SGLang learns of 128 pages at once")
    replies: list[Conversation] = []

    def stalled() -> bool:
        """On a busy machine all may have arrived before the disk is held."""
        l3_rate(server, FAST)
        learn_that_l3_is_fast(server)
        [prompt], computing = stored_prompts(server, 300 + len(replies))
        l3_rate(server, slower_than_computing(kind, 0.5))
        waiting = threading.Thread(target=lambda: replies.extend(asked(server, prompt)))
        before = tokens(server, "eager")
        ended, recomputed = count(server, "ended"), count(server, "recomputed")
        waiting.start()
        server.until(
            lambda: tokens(server, "eager") > before or not waiting.is_alive(), "pages to arrive"
        )
        l3_rate(server, HELD)
        with held_up_by_a_stall_at_most(computing):
            waiting.join()
        # Recomputing from the front may come as far as L3 came, before its read is ended.
        recomputed = count(server, "recomputed") - recomputed
        return count(server, "ended") > ended or recomputed > TOKENS / 2

    server.until(stalled, "a read that stalls")
    assert_right(replies)


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "layerwise"])
def test_two_ranks_decide_the_same(
    kind: str, model: Path, assert_right: AssertRight, tmp_path: Path
) -> None:
    """L3 is fast, slow and silent in turn, while clients talk: a rank that read what the other one
    refused would wait for it for ever, or serve other tokens."""
    options = server_options(model, tmp_path, kind, tp=2)
    conversations: list[Conversation] = []
    with Server(options) as server:
        prompts = [random_tokens(TOKENS, seed) for seed in range(4)]
        conversations += asked(server, *prompts)
        for rate in (FAST, slower_than_computing(kind, 10), HELD, FAST) * 2:
            server.flush_cache()
            l3_rate(server, rate)
            conversations += asked(server, *prompts)
            for prompt in prompts:
                conversations += asked(server, prompt[: TOKENS // 2] + random_tokens(50, 77))
            l3_rate(server, FAST)
        assert count(server, "slower") + count(server, "ended") > 0
        assert "Exception in thread" not in server.log_text()
    assert_right(conversations)


def test_pipeline_stages_read_or_refuse_hits_and_go_on(model: Path, tmp_path: Path) -> None:
    """A stage may be told of an answer of L3 before it has its own."""
    with Server(server_options(model, tmp_path, "own", pp=2)) as server:
        conversations: list[Conversation] = []
        for seed in range(3):
            before = count(server, "slower")
            found, again = from_l3(server, stored(server, seed, TOKENS))
            assert found >= TOKENS - 2 * PAGE or count(server, "slower") > before
            conversations += again
    assert_no_cache_output(model, conversations)
