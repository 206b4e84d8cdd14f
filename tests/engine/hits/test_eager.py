"""Pages that become K and V while the rest of their prefetch is still being read."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness.conversations import (
    Conversation,
    converse,
    converse_at_random,
    make_conversations,
    random_tokens,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_replies_up_to_ties,
    assert_restored_from_l3,
    attach,
    flip_bit,
    stored_pages,
)
from tests.engine.hits.eager_servers import (
    BATCH,
    PAGE,
    asked,
    assert_fine,
    counted,
    eager_server,
    read_batches,
    stored,
    tokens,
    until_more,
)

pytestmark = pytest.mark.engine

REQUESTS = int(os.environ.get("HCACHE_TEST_EAGER_REQUESTS", "32"))


@pytest.fixture(
    scope="module", params=["hidden", "kv", pytest.param("mixed", marks=pytest.mark.long)]
)
def stored_as(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def shared(
    stored_as: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(eager_server(model, tmp_path_factory.mktemp("eager"), stored_as)) as server:
        yield server


@pytest.fixture
def server(shared: Server, stored_as: str) -> Iterator[Server]:
    read_batches(shared, None)
    shared.flush_cache()
    yield shared
    read_batches(shared, None)
    assert_fine(shared, stored_as)


def test_a_request_gets_what_was_restored_while_it_waited(model: Path, server: Server) -> None:
    """All but the last batch, without any option."""
    conversations = converse(server, make_conversations(2, turns=3, tokens=300))
    assert tokens(server, "ready_at_load") > 2 * tokens(server, "not_ready_at_load") > 0
    assert tokens(server, "eager") == tokens(server, "ready_at_load")  # nothing in vain
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, conversations)


def test_it_is_right_whatever_has_arrived_at_the_load(model: Path, server: Server) -> None:
    (server.options.log.parent / "in-step").unlink()
    conversations = make_conversations(4, turns=3, tokens=200, seed=2)
    converse(server, conversations, concurrent=True)
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, conversations)


def test_an_aborted_request_leaves_nothing_wrong_behind(model: Path, server: Server) -> None:
    prompt = stored(server, seed=3)
    for batches in (0, 1, 3):
        read_batches(server, batches)
        rid = uuid.uuid4().hex
        gone = threading.Thread(target=_may_fail, args=(server, prompt, rid))
        with (
            until_more(server, "tokens", "eager", batches * BATCH),
            until_more(server, "lookups", "found", 1),
        ):
            gone.start()
        server.abort_request(rid)
        gone.join()
    read_batches(server, None)
    server.flush_cache()
    (again,) = asked(server, prompt)
    assert again.turns[0].cached.storage >= 800 - 2 * PAGE
    assert_no_cache_output(model, [again])


def _may_fail(server: Server, prompt: list[int], rid: str) -> None:
    body = {"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
    server._request("POST", "/generate", json=body, timeout=600)


def test_two_requests_with_one_prefix(model: Path, server: Server) -> None:
    """It is restored once, although both prefetches bring it."""
    prefix = stored(server, seed=4, count=640)
    read_batches(server, 0)
    prompts = [[*prefix, *random_tokens(50, seed)] for seed in (5, 6)]
    before = tokens(server, "eager")
    both: list[Conversation] = []
    asking = threading.Thread(target=lambda: both.extend(asked(server, *prompts)))
    with until_more(server, "lookups", "found", 2 * 640 // PAGE):
        asking.start()
    read_batches(server, None)
    asking.join()
    assert 0 < tokens(server, "eager") - before <= 640  # and not twice as many
    assert all(turn.cached.storage + turn.cached.device >= 640 for turn in turns_of(both))
    assert_no_cache_output(model, both)


def test_a_bad_page_in_the_middle_ends_what_is_used(model: Path, server: Server) -> None:
    prompt, middle = stored(server, seed=7, count=400), 12 * PAGE
    token_ids = np.array(prompt[middle : middle + PAGE], np.int32).tobytes()
    pages = stored_pages(server.options.log.parent)
    [path] = (page for page in pages if token_ids in page.read_bytes())
    flip_bit(path, -1000)
    (again,) = asked(server, prompt)
    assert again.turns[0].cached.storage == middle
    assert_no_cache_output(model, [again])


def test_a_flush_while_pages_are_restored(model: Path, server: Server) -> None:
    prompt = stored(server, seed=8)
    read_batches(server, 2)
    replies: list[Conversation] = []
    waiting = threading.Thread(target=lambda: replies.extend(asked(server, prompt)))
    with until_more(server, "tokens", "eager", 2 * BATCH):
        waiting.start()
    read_batches(server, None)
    server.flush_cache()  # waits for the request
    waiting.join()
    replies.extend(asked(server, prompt))
    assert replies[1].turns[0].cached.storage >= 800 - 2 * PAGE
    assert_no_cache_output(model, replies)


@pytest.mark.parametrize(
    "stored_as", ["hidden", pytest.param("mixed", marks=pytest.mark.long)], indirect=True
)
def test_other_weights_while_pages_are_restored(
    model: Path, model_cache: Path, server: Server
) -> None:
    """An update waits for requests, but not for those that are paused; nothing is flushed.

    K and V that are not flushed outlive it, as they do without us.
    """
    other = build_model("llama", model_cache, seed=1)
    prompt = stored(server, seed=11)
    read_batches(server, 2)
    eager, ready = tokens(server, "eager"), tokens(server, "ready_at_load")
    replies: list[Conversation] = []
    waiting = threading.Thread(target=lambda: replies.extend(asked(server, prompt)))
    with until_more(server, "tokens", "eager", 2 * BATCH):
        waiting.start()
    with server.paused():
        # Some pages are K and V of the old weights, others come.
        assert tokens(server, "eager") - eager == 2 * BATCH
        read_batches(server, None)
        server.update_weights_from_disk(other, flush=False)
    waiting.join()
    assert_no_cache_output(other, replies)
    assert tokens(server, "ready_at_load") == ready
    assert tokens(server, "not_restored_stale_host_page") > 0  # what had come was offered, in vain
    server.update_weights_from_disk(model)
    (back,) = asked(server, prompt)
    assert back.turns[0].cached.storage >= 800 - 2 * PAGE
    assert_no_cache_output(model, [back])


@pytest.mark.parametrize(
    "stored_as",
    ["hidden", *(pytest.param(name, marks=pytest.mark.long) for name in ("kv", "mixed"))],
    indirect=True,
)
@pytest.mark.parametrize("policy", ["best_effort", "timeout"])
def test_prefetches_that_end_early(policy: str, model: Path, server: Server) -> None:
    """Detached meanwhile, and attached with another policy."""
    prompts = [stored(server, seed=seed) for seed in (9, 10)]
    server.detach_storage()
    config = server.options.extra_config
    assert isinstance(config, dict)
    if policy == "timeout":
        config = config | {"prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0.1}
    attach(server, config, hicache_storage_prefetch_policy=policy)
    read_batches(server, 3)
    conversations = asked(server, *prompts)
    if policy == "timeout":
        found = [turn.cached.storage for turn in turns_of(conversations)]
        assert 0 < max(found) <= 3 * BATCH
    read_batches(server, None)
    again = [*asked(server, prompts[0]), *asked(server, prompts[1])]
    assert_no_cache_output(model, [*conversations, *again])
    server.detach_storage()
    config = server.options.extra_config
    attach(server, config, hicache_storage_prefetch_policy="wait_complete")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("recompute, mixed", "hidden")),
        "kv",
    ],
)
def test_pressure_on_a_small_device_pool(name: str, model: Path, tmp_path: Path) -> None:
    """Prompts that wait, and requests that run, want the same pages: who runs gets them."""
    options = eager_server(model, tmp_path, name, max_total_tokens=1280, hicache_ratio=8.0)
    with Server(options) as server:
        waiting = stored(server, seed=1)
        read_batches(server, 1)
        replies: list[Conversation] = []
        asking = threading.Thread(target=lambda: replies.extend(asked(server, waiting)))
        with until_more(server, "tokens", "eager", 1):
            asking.start()
        (running,) = asked(server, random_tokens(1200, 2))  # not while half of them are reserved
        assert asking.is_alive()
        read_batches(server, None)
        asking.join()
        conversations = make_conversations(5, turns=2, tokens=200)
        converse(server, conversations, concurrent=True)
        server.flush_cache()
        again = [Conversation([c.history]) for c in conversations]
        converse(server, again, concurrent=True)
        assert tokens(server, "ready_at_load") > 0
        assert_fine(server, name)
    assert_no_cache_output(model, [*replies, running, *conversations, *again])


@pytest.mark.parametrize(
    "name",
    [
        "hidden",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("kv", "kv, from the back", "recompute")
        ),
    ],
)
def test_two_ranks_of_which_one_has_misses_decide_the_same(
    name: str, model: Path, tmp_path: Path
) -> None:
    options = eager_server(
        model,
        tmp_path,
        name,
        faults="batches_in_step,misses_on_rank_1",
        tp=2,
        max_total_tokens=2048,
        hicache_ratio=4.0,
    )
    conversations = make_conversations(8, turns=REQUESTS // 8, tokens=60)
    with Server(options) as server:
        converse_at_random(server, conversations, at_once=4, flushed=0.5)
        assert tokens(server, "ready_at_load") > 0
        assert (counted(server, "l3_tokens", "recomputed") > 0) == name.endswith("from the back")
        assert_fine(server, name)
    assert_no_cache_replies_up_to_ties(model, turns_of(conversations))
