"""Front pages of a hit that are recomputed whole while it is read from the back."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerError
from tests.cpu_engine.hcache_cpu_engine import reordering
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
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

HIT = (800 - 1) // PAGE * PAGE
FRONT = HIT - BATCH
"""Tokens before the first batch that is read."""


KV, HIDDEN, MIXED = (f"{pages}, from the back" for pages in ("kv", "hidden", "mixed"))
CASES = {
    "K and V, GQA": ("qwen3", KV),
    "K and V, MHA": ("llama", KV),
    "hidden": ("llama", HIDDEN),
    "mixed": ("llama", MIXED),
}
"""Model and pages. Long, but for the first and the last one."""
SHORT = "K and V, GQA", "mixed"


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in SHORT else pytest.mark.long) for name in CASES],
)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def pages(case: str) -> str:
    return CASES[case][1]


@pytest.fixture(scope="module")
def model(case: str, model_cache: Path) -> Path:
    return build_model(CASES[case][0], model_cache)


@pytest.fixture(scope="module")
def shared(model: Path, pages: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("back")
    options = eager_server(model, folder, pages, max_total_tokens=2560, hicache_ratio=8.0)
    with Server(options) as server:
        yield server


@pytest.fixture
def server(shared: Server, pages: str) -> Iterator[Server]:
    read_batches(shared, None)
    shared.flush_cache()
    yield shared
    read_batches(shared, None)
    assert_fine(shared, pages)


def recomputed_tokens(server: Server) -> float:
    return counted(server, "l3_tokens", "recomputed") / server.options.tp  # each rank counts


@contextmanager
def recomputed(
    server: Server, *prompts: list[int], front: int | None = None
) -> Iterator[list[Conversation]]:
    """All but the last batch of the first of ``prompts`` is recomputed when the block begins.

    That batch is read when it ends; then all replies are there. With ``front``, so many pages are
    recomputed, and all others are read.
    """
    replies: list[Conversation] = []
    read_batches(server, 0, front)
    asking = threading.Thread(target=lambda: replies.extend(asked(server, *prompts)))
    wanted = FRONT if front is None else front * PAGE
    with until_more(server, "l3_tokens", "recomputed", wanted * server.options.tp):
        asking.start()
    yield replies
    read_batches(server, None, front)
    asking.join()


def storage(*conversations: Conversation) -> list[int]:
    return [turn.cached.storage for turn in turns_of(conversations)]


def test_the_front_is_recomputed_while_the_back_is_read(model: Path, server: Server) -> None:
    prompt = stored(server, seed=1)
    names = ("eager", "not_ready_at_load")
    before = [recomputed_tokens(server), *(tokens(server, name) for name in names)]
    with recomputed(server, prompt) as replies:
        pass
    after = [recomputed_tokens(server), *(tokens(server, name) for name in names)]
    front, eager, loaded = (b - a for a, b in zip(before, after, strict=True))
    # The batch that was read last may come together with the end, and is loaded then.
    assert (front, eager + loaded) == (FRONT, BATCH)
    assert storage(*replies) == [HIT]
    assert_no_cache_output(model, replies)


def test_it_is_right_wherever_they_meet(model: Path, server: Server) -> None:
    replies: list[Conversation] = []
    for front in (1, FRONT // PAGE - 10):
        prompt = stored(server, seed=20 + front)
        before = recomputed_tokens(server), tokens(server, "restored")
        with recomputed(server, prompt, front=front) as met:
            pass
        assert storage(*met) == [HIT]
        assert recomputed_tokens(server) - before[0] == front * PAGE
        assert tokens(server, "restored") - before[1] == HIT - front * PAGE
        replies += met
    (server.options.log.parent / "in-step").unlink()  # from now on as it happens
    conversations = make_conversations(3, turns=3, tokens=200, seed=2)
    converse(server, conversations, concurrent=True)
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, [*replies, *conversations])


def test_what_was_recomputed_is_in_host_memory_too(model: Path, server: Server) -> None:
    prompt = stored(server, seed=3)
    with recomputed(server, prompt) as replies:
        pass
    for seed in (30, 31, 32):
        server.generate(random_tokens(900, seed), 1)  # the device has no room for all
    before = recomputed_tokens(server), tokens(server, "restored")
    (again,) = asked(server, prompt)
    cached = again.turns[0].cached
    assert cached.host >= FRONT and cached.storage == 0
    assert recomputed_tokens(server) == before[0]
    assert tokens(server, "restored") - before[1] >= FRONT
    assert_no_cache_output(model, [*replies, again])


def test_the_front_begins_behind_what_is_on_the_device(model: Path, server: Server) -> None:
    same, rest = random_tokens(320, 4), [random_tokens(480, seed) for seed in (40, 41)]
    for each in rest:
        server.generate(same + each, 1)
    server.flush_cache()
    conversations = [*ask(server, [same + rest[0]], flush=False)]
    before = recomputed_tokens(server)
    conversations += ask(server, [same + rest[1]], flush=False)
    cached = conversations[1].turns[0].cached
    assert (cached.device, cached.storage) == (320, HIT - 320)
    assert recomputed_tokens(server) > before
    assert_no_cache_output(model, conversations)


def test_behind_a_prefix_in_host_memory_only_all_is_read(model: Path, server: Server) -> None:
    same, rest = random_tokens(320, 14), [random_tokens(480, seed) for seed in (43, 44)]
    for each in rest:
        server.generate(same + each, 1)
    server.flush_cache()
    conversations = [*ask(server, [same + rest[0]], flush=False)]
    for seed in (45, 46, 47):
        server.generate(random_tokens(900, seed), 1)  # the device has no room for all
    before = recomputed_tokens(server)
    conversations += ask(server, [same + rest[1]], flush=False)
    cached = conversations[1].turns[0].cached
    assert (cached.device, cached.host, cached.storage) == (0, 320, HIT - 320)
    assert recomputed_tokens(server) == before
    assert_no_cache_output(model, conversations)


def test_a_bad_page_ends_what_is_used_and_the_front_reaches_it(model: Path, server: Server) -> None:
    for seed, page in ((5, HIT // PAGE - 3), (6, FRONT // PAGE)):
        prompt = stored(server, seed)
        at = slice(page * PAGE, (page + 1) * PAGE)
        token_ids = np.array(prompt[at], np.int32).tobytes()
        pages = stored_pages(server.options.log.parent)
        [path] = (path for path in pages if token_ids in path.read_bytes())
        flip_bit(path, -1000)
        with recomputed(server, prompt) as replies:
            pass
        assert storage(*replies) == [page * PAGE]
        assert_no_cache_output(model, replies)


def test_where_all_pages_are_others_only_the_front_counts(model: Path, server: Server) -> None:
    folder = server.options.log.parent
    before = set(stored_pages(folder))
    prompt = stored(server, seed=13)
    paths = [path for path in stored_pages(folder) if path not in before]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    with recomputed(server, prompt) as replies:
        pass
    assert storage(*replies) == [FRONT]
    assert_no_cache_output(model, replies)


def test_an_abort_ends_the_front_and_gives_back_what_was_reserved(
    model: Path, server: Server
) -> None:
    prompt, slice_ = stored(server, seed=7), 3
    for _ in range(3):  # there is room for less than three reservations
        before, rid = recomputed_tokens(server), uuid.uuid4().hex
        body = {"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        read_batches(server, 0, front=slice_)
        gone = threading.Thread(
            target=partial(server._request, "POST", "/generate", json=body, timeout=600)
        )
        with until_more(server, "l3_tokens", "recomputed", slice_ * PAGE):
            gone.start()
        server.abort_request(rid)
        gone.join()
        read_batches(server, 0)  # nobody else holds the front
        server.flush_cache()  # the reader has waited until the abort
        assert recomputed_tokens(server) - before == slice_ * PAGE
    with recomputed(server, prompt) as replies:
        pass
    assert storage(*replies) == [HIT]
    assert_no_cache_output(model, replies)


def test_two_requests_with_one_prefix_recompute_it_once(model: Path, server: Server) -> None:
    prefix = stored(server, seed=8)
    prompts = [[*prefix, *random_tokens(50, seed)] for seed in (80, 81)]
    before, found = recomputed_tokens(server), counted(server, "lookups", "found")
    with recomputed(server, *prompts) as both:  # the first one waits for what is read
        wanted = found + 2 * len(prefix) // PAGE
        server.until(lambda: counted(server, "lookups", "found") >= wanted, "both to be looked up")
    assert FRONT <= recomputed_tokens(server) - before <= HIT + PAGE
    turns = turns_of(both)
    assert all(turn.cached.storage + turn.cached.device + turn.cached.host >= HIT for turn in turns)
    assert_no_cache_output(model, both)


def test_pressure_takes_what_was_recomputed_and_the_host_has_it(
    model: Path, server: Server
) -> None:
    prompt, not_ready = stored(server, seed=9), tokens(server, "not_ready_at_load")
    with recomputed(server, prompt) as replies:
        (running,) = asked(server, random_tokens(2200, 90))
    assert storage(*replies) == [HIT]
    assert tokens(server, "not_ready_at_load") - not_ready > BATCH, "what was reserved was taken"
    assert_no_cache_output(model, [*replies, running])


def test_a_flush_waits_for_the_request(model: Path, server: Server) -> None:
    prompt = stored(server, seed=10)
    with (
        recomputed(server, prompt) as replies,
        pytest.raises(ServerError, match="/flush_cache answered"),
    ):
        server.flush_cache(timeout=0.2)
    server.flush_cache()
    replies.extend(asked(server, prompt))
    assert storage(*replies) == [HIT, HIT]
    assert_no_cache_output(model, replies)


def test_at_a_timeout_the_front_counts(model: Path, server: Server) -> None:
    prompt = stored(server, seed=11)
    config = server.options.extra_config
    assert isinstance(config, dict)
    limits = {"prefetch_timeout_base": 3, "prefetch_timeout_per_ki_token": 0.1}
    server.detach_storage()
    attach(server, config | limits, hicache_storage_prefetch_policy="timeout")
    read_batches(server, 0)
    before = recomputed_tokens(server)
    replies = [*asked(server, prompt)]
    assert storage(*replies) == [recomputed_tokens(server) - before]
    assert 0 < storage(*replies)[0] <= FRONT
    read_batches(server, None)
    replies.extend(asked(server, prompt))
    server.detach_storage()
    attach(server, config, hicache_storage_prefetch_policy="best_effort")
    server.flush_cache()
    before = recomputed_tokens(server)
    replies.extend(asked(server, prompt))  # read in order: it may end at any time
    assert recomputed_tokens(server) == before
    server.detach_storage()
    attach(server, config, hicache_storage_prefetch_policy="wait_complete")
    assert_no_cache_output(model, replies)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_front_is_recomputed_in_the_order_in_which_the_models_attention_sums(
    dtype: str, model_cache: Path, tmp_path: Path
) -> None:
    """Not in that of another kernel: it is as exact as what was stored, whatever sums first."""
    llama = build_model("llama", model_cache)
    options = eager_server(
        llama,
        tmp_path,
        "kv, from the back",
        faults="batches_in_step,attention_in_blocks",
        attention_backend="torch_native",  # whose attention the fault is in
        dtype=dtype,
        max_total_tokens=2560,
        hicache_ratio=8.0,
    )
    with Server(options) as server:
        assert "not used: recomputation" not in server.log_text()
        [told] = re.findall("hcache: exactness: recomputed layers: (.*)", server.log_text())
        assert told.startswith("K 100% equal, 0 ulp, V 100% equal, 0 ulp; ")
        prompt = stored(server, seed=1)
        with recomputed(server, prompt) as replies:
            pass
        assert storage(*replies) == [HIT]
    if dtype == "float32":
        assert_no_cache_replies_up_to_ties(llama, turns_of(replies))
    else:
        assert_no_cache_output_up_to_ties(llama, tmp_path, replies)


def test_a_front_is_recomputed_where_the_order_of_sums_depends_on_the_number_of_rows(
    model_cache: Path, tmp_path: Path
) -> None:
    """As on every GPU: whatever is computed in another batch differs in its last bits."""
    model = build_model("llama", model_cache)
    options = eager_server(
        model,
        tmp_path,
        KV,
        dtype="bfloat16",
        max_total_tokens=2560,
        hicache_ratio=8.0,
        extra_env={reordering.VARIABLE: "1"},
    )
    with Server(options) as server:
        assert "hcache: exactness: recomputed layers: " in server.log_text()
        assert "not used: recomputation" not in server.log_text()
        prompt = stored(server, seed=1)
        before = recomputed_tokens(server)
        with recomputed(server, prompt) as replies:
            pass
        assert recomputed_tokens(server) - before == FRONT
        assert storage(*replies) == [HIT]
        assert_fine(server, KV)
    assert_no_cache_output_up_to_ties(model, tmp_path, replies)
