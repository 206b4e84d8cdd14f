"""Pages that become K and V while the rest of their prefetch is still being read.

Pages that have arrived are restored. If L3 is read from the back, front pages are recomputed whole.
"""

import os
import re
import threading
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerError
from tests.cpu_engine.hcache_cpu_engine import reordering
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    converse_at_random,
    make_conversations,
    random_tokens,
    turns_of,
)
from tests.engine.hits.eager_servers import (
    BATCH,
    PAGE,
    asked,
    assert_fine,
    counted,
    counting,
    eager_server,
    read_batches,
    stored,
    tokens,
    until_more,
)

pytestmark = pytest.mark.engine

REQUESTS = int(os.environ.get("HCACHE_TEST_EAGER_REQUESTS", "32"))
HIT = (800 - 1) // PAGE * PAGE
FRONT = HIT - BATCH
"""Tokens before the first batch that is read from the back."""
LONG = pytest.mark.long
SIZES = {"max_total_tokens": 2560, "hicache_ratio": 8.0}


KV, HIDDEN, MIXED = (f"{pages}, from the back" for pages in ("kv", "hidden", "mixed"))
IN_ORDER, FROM_THE_BACK = ("hidden", "kv", "mixed"), (KV, HIDDEN, MIXED)


def cases(*every: str, often: Collection[str] = ("hidden", KV)) -> pytest.MarkDecorator:
    """How servers of the test store layers, see `STORED`; those that are not for every run are for
    long tests."""
    params = [pytest.param(case, marks=() if case in often else LONG) for case in every]
    return pytest.mark.parametrize("case", params, indirect=True, scope="module")


everywhere, in_order, fronts = (
    cases(*every) for every in ((*IN_ORDER, *FROM_THE_BACK), IN_ORDER, FROM_THE_BACK)
)


def has_front(case: str) -> bool:
    return case in FROM_THE_BACK


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(case: str, model_cache: Path) -> Path:
    """With as many KV heads as heads where hidden states are stored."""
    return build_model("qwen3" if case == KV else "llama", model_cache)


@pytest.fixture(scope="module")
def shared(case: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = eager_server(model, tmp_path_factory.mktemp("eager"), case, **SIZES)
    with Server(options) as server:
        yield server


@pytest.fixture
def server(shared: Server, case: str) -> Iterator[Server]:
    read_batches(shared, None)
    shared.flush_cache()
    yield shared
    read_batches(shared, None)
    assert_fine(shared, case)


def recomputed_tokens(server: Server) -> float:
    return counted(server, "l3_tokens", "recomputed")


def progress(case: str) -> tuple[str, str]:
    """The metric of what becomes K and V before the load."""
    return ("l3_tokens", "recomputed") if has_front(case) else ("tokens", "eager")


@contextmanager
def underway(
    server: Server, case: str, prompt: list[int], front: int | None = None, batches: int = 2
) -> Iterator[list[Conversation]]:
    """A part of ``prompt`` is K and V when the block begins: so many pages of its
    front (None: all but its last batch), or so many batches.

    All others are read when it ends; then the reply is there.
    """
    replies: list[Conversation] = []
    if has_front(case):
        read_batches(server, 0, front)
        wanted = FRONT if front is None else front * PAGE
    else:
        read_batches(server, batches)
        wanted = batches * BATCH
    asking = threading.Thread(target=lambda: replies.extend(asked(server, prompt)))
    with until_more(server, *progress(case), wanted):
        asking.start()
    yield replies
    read_batches(server, None, front)
    asking.join()


def storage(*conversations: Conversation) -> list[int]:
    return [turn.cached.storage for turn in turns_of(conversations)]


@in_order
def test_a_request_gets_what_was_restored_while_it_waited(model: Path, server: Server) -> None:
    """All but the last batch, without any option."""
    conversations = converse(server, make_conversations(2, turns=3, tokens=300))
    assert tokens(server, "ready_at_load") > 2 * tokens(server, "not_ready_at_load") > 0
    assert tokens(server, "eager") == tokens(server, "ready_at_load")  # nothing in vain
    ours.assert_restored_from_l3(conversations, PAGE)
    ours.assert_no_cache_output(model, conversations)


@everywhere
def test_it_is_right_whatever_has_arrived_at_the_load(model: Path, server: Server) -> None:
    (server.options.log.parent / "in-step").unlink()
    conversations = make_conversations(4, turns=3, tokens=200, seed=2)
    converse(server, conversations, concurrent=True)
    ours.assert_restored_from_l3(conversations, PAGE)
    ours.assert_no_cache_output(model, conversations)


@everywhere
def test_an_abort_gives_back_what_was_reserved(case: str, model: Path, server: Server) -> None:
    prompt = stored(server, seed=3)
    for part in (0, 1, 3):  # there is room for less than three reservations
        before, rid = counted(server, *progress(case)), uuid.uuid4().hex
        read_batches(server, 0 if has_front(case) else part, part)
        body = {"rid": rid, "input_ids": prompt, "sampling_params": {"max_new_tokens": 4}}
        ask_it = partial(server._request, "POST", "/generate", json=body, timeout=600)  # may fail
        gone = threading.Thread(target=ask_it)
        taken = part * (PAGE if has_front(case) else BATCH)
        with until_more(server, *progress(case), taken), until_more(server, "lookups", "found", 1):
            gone.start()
        server.abort_request(rid)
        gone.join()
        read_batches(server, 0)  # nobody else holds what was reserved
        server.flush_cache()  # the reader has waited until the abort
        assert counted(server, *progress(case)) - before == taken
    with underway(server, case, prompt) as replies:
        pass
    assert storage(*replies) == [HIT]
    ours.assert_no_cache_output(model, replies)


@everywhere
def test_a_bad_page_ends_what_is_used(case: str, model: Path, server: Server) -> None:
    # By its estimates the reader may leave all but the last page to the front.
    pages_read = [HIT // PAGE - 1] if has_front(case) else [HIT // PAGE - 3, FRONT // PAGE]
    for seed, page in enumerate(pages_read, 7):
        prompt = stored(server, seed)
        token_ids = np.array(prompt[page * PAGE : (page + 1) * PAGE], np.int32).tobytes()
        pages = ours.stored_pages(server.options.log.parent)
        [path] = (path for path in pages if token_ids in path.read_bytes())
        ours.flip_bit(path, -1000)
        with underway(server, case, prompt, batches=0) as replies:
            pass
        assert storage(*replies) == [page * PAGE]
        ours.assert_no_cache_output(model, replies)


@everywhere
def test_a_flush_waits_for_the_request(case: str, model: Path, server: Server) -> None:
    prompt = stored(server, seed=9)
    with (
        underway(server, case, prompt) as replies,
        pytest.raises(ServerError, match="/flush_cache answered"),
    ):
        server.flush_cache(timeout=0.2)
    server.flush_cache()
    replies.extend(asked(server, prompt))
    assert storage(*replies) == [HIT, HIT]
    ours.assert_no_cache_output(model, replies)


@everywhere
def test_pressure_takes_what_was_reserved(case: str, model: Path, server: Server) -> None:
    prompt = stored(server, seed=10)
    with (
        counting(server, not_ready_at_load="tokens") as found,
        underway(server, case, prompt, batches=1) as replies,
    ):
        (running,) = asked(server, random_tokens(2200, 90))
    assert storage(*replies) == [HIT]
    assert found["not_ready_at_load"] > BATCH
    ours.assert_no_cache_output(model, [*replies, running])


@in_order
def test_other_weights_during_a_restore(model: Path, model_cache: Path, server: Server) -> None:
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
    ours.assert_no_cache_output(other, replies)
    assert tokens(server, "ready_at_load") == ready
    assert tokens(server, "not_restored_stale_host_page") > 0  # what had come was offered, in vain
    server.update_weights_from_disk(model)
    (back,) = asked(server, prompt)
    assert back.turns[0].cached.storage >= 800 - 2 * PAGE
    ours.assert_no_cache_output(model, [back])


# ---- fronts ----


@cases(*FROM_THE_BACK, often=(KV, MIXED))
@pytest.mark.parametrize("front", [1, 35, FRONT // PAGE], ids=["short", "long", "all"])
def test_front_and_back_meet_anywhere(front: int, case: str, model: Path, server: Server) -> None:
    """Wherever they meet."""
    prompt, before = stored(server, seed=20 + front), recomputed_tokens(server)
    with (
        counting(server, restored="tokens") as found,
        underway(server, case, prompt, front=front) as met,
    ):
        pass
    assert storage(*met) == [HIT]
    assert recomputed_tokens(server) - before == front * PAGE
    assert found["restored"] == HIT - front * PAGE
    ours.assert_no_cache_output(model, met)


def crowd_out(server: Server) -> None:
    """The device has no room for what it holds, host memory has."""
    for seed in (30, 31, 32):
        server.generate(random_tokens(900, seed), 1)


@fronts
def test_what_was_recomputed_is_in_host_memory_too(case: str, model: Path, server: Server) -> None:
    prompt = stored(server, seed=3)
    with underway(server, case, prompt) as replies:
        pass
    crowd_out(server)
    with counting(server, recomputed="l3_tokens", restored="tokens") as found:
        (again,) = asked(server, prompt)
    cached = again.turns[0].cached
    assert cached.host >= FRONT and cached.storage == 0
    assert not found["recomputed"] and found["restored"] >= FRONT
    ours.assert_no_cache_output(model, [*replies, again])


@fronts
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_front_needs_its_prefix_on_the_device(tier: str, model: Path, server: Server) -> None:
    same, *rest = (random_tokens(*each) for each in ((320, 4), (480, 40), (480, 41)))
    for each in rest:
        server.generate(same + each, 1)
    server.flush_cache()
    conversations = [*ask(server, [same + rest[0]], flush=False)]
    if tier == "host":
        crowd_out(server)
    with counting(server, recomputed="l3_tokens") as found:
        conversations += ask(server, [same + rest[1]], flush=False)
    cached = conversations[1].turns[0].cached
    assert getattr(cached, tier) == 320
    assert (cached.storage, cached.total) == (HIT - 320, HIT)
    assert bool(found["recomputed"]) == (tier == "device")
    ours.assert_no_cache_output(model, conversations)


@fronts
def test_of_other_pages_only_the_front_counts(case: str, model: Path, server: Server) -> None:
    folder = server.options.log.parent
    before = set(ours.stored_pages(folder))
    prompt = stored(server, seed=13)
    paths = [path for path in ours.stored_pages(folder) if path not in before]
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)
    with underway(server, case, prompt) as replies:
        pass
    assert storage(*replies) == [FRONT]
    ours.assert_no_cache_output(model, replies)


@pytest.mark.parametrize(
    "name", ["hidden", *(pytest.param(n, marks=LONG) for n in ("kv", KV, "recompute"))]
)
def test_two_ranks_of_which_one_has_misses_decide_the_same(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("llama", model_cache)
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
    ours.assert_no_cache_replies_up_to_ties(model, turns_of(conversations))


# ---- sums in another order ----


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        pytest.param("attention_in_blocks", "bfloat16", id="blocks"),
        pytest.param("attention_in_blocks", "float32", id="float32", marks=LONG),
        pytest.param("", "bfloat16", id="rows", marks=LONG),
    ],
)
def test_a_front_sums_as_attention_does(
    fault: str, dtype: str, model_cache: Path, tmp_path: Path
) -> None:
    """It is as exact as what was stored, whatever sums first: blocks of keys, or parts of sums by
    the number of rows, as on every GPU."""
    llama, case = build_model("llama", model_cache), KV
    how = {"extra_env": {reordering.VARIABLE: "1"}}
    if fault:  # in this attention
        how = {"faults": f"batches_in_step,{fault}", "attention_backend": "torch_native"}
    with Server(eager_server(llama, tmp_path, KV, dtype=dtype, **how, **SIZES)) as server:
        assert "not used: recomputation" not in server.log_text()
        [told] = re.findall("hcache: exactness: recomputed layers: (.*)", server.log_text())
        assert not fault or told.startswith("K 100% equal, 0 ulp, V 100% equal, 0 ulp; ")
        prompt, before = stored(server, seed=1), recomputed_tokens(server)
        with underway(server, case, prompt) as replies:
            pass
        assert recomputed_tokens(server) - before == FRONT
        assert storage(*replies) == [HIT]
        assert_fine(server, KV)
    if dtype == "float32":
        ours.assert_no_cache_replies_up_to_ties(llama, turns_of(replies))
    else:
        ours.assert_no_cache_output_up_to_ties(llama, tmp_path, replies)
