"""First layers that are recomputed while the rest of their hit is still being read."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
import requests

from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.prefetch.slices import RUNNING_LIMIT
from tests.engine.harness.clients import Clients
from tests.engine.harness.conversations import (
    Conversation,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_replies_up_to_ties,
    assert_restored_from_l3,
)
from tests.engine.harness.trouble import Trouble
from tests.engine.hits.eager_servers import (
    BATCH,
    FAULTS,
    PAGE,
    asked,
    assert_fine,
    counted,
    eager_server,
    read_batches,
    stored,
    tell_faults,
    tokens,
    until_more,
)

pytestmark = pytest.mark.engine

LONG_REPLY = 7000
"""Tokens: more than are made while a hit is being read."""


@pytest.fixture(
    scope="module", params=["recompute, mixed", pytest.param("recompute", marks=pytest.mark.long)]
)
def shared(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    options = eager_server(
        model,
        tmp_path_factory.mktemp("recomputed"),
        request.param,
        faults=FAULTS,
        max_total_tokens=65536,
        extra_args=("--max-running-requests", str(RUNNING_LIMIT)),
    )
    with Server(options) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    read_batches(shared, None)
    shared.flush_cache()
    yield shared
    assert_fine(shared, "recompute")
    assert "not used: recomputation" not in shared.log_text()


def test_first_layers_are_recomputed_while_others_are_read(model: Path, server: Server) -> None:
    names = ("ready_at_load", "not_ready_at_load", "eager_recomputed", "eager")
    before = [tokens(server, name) for name in names]
    slices = counted(server, "slices", "whole")
    conversations = converse(server, make_conversations(2, turns=3, tokens=250))
    after = [tokens(server, name) for name in names]
    ready, not_ready, recomputed, eager = (b - a for a, b in zip(before, after, strict=True))
    assert ready > not_ready
    assert recomputed == eager > 0
    assert counted(server, "slices", "whole") > slices
    assert_restored_from_l3(conversations, PAGE)
    assert_no_cache_output(model, conversations)


def test_first_layers_are_recomputed_behind_what_is_on_the_device(
    model: Path, server: Server
) -> None:
    """Two prompts share a part: the first brings it back, the second what is left."""
    same, rest = random_tokens(400, 1), [random_tokens(400, seed) for seed in (2, 3)]
    for tokens_of in rest:
        server.generate(same + tokens_of, 1)
    server.flush_cache()
    conversations = [*asked(server, same + rest[0])]
    before = tokens(server, "eager"), tokens(server, "eager_recomputed")
    conversations += asked(server, same + rest[1])
    cached = conversations[1].turns[0].cached
    assert cached.device == 400 and cached.storage > 300
    recomputed = tokens(server, "eager_recomputed") - before[1]
    assert recomputed == tokens(server, "eager") - before[0] > 200
    assert_no_cache_output(model, conversations)


@contextmanager
def running(server: Server, seed: int) -> Iterator[None]:
    """A request that L3 does not know runs within the block, but for :data:`LONG_REPLY` tokens."""
    rid, prompt = uuid.uuid4().hex, random_tokens(2 * PAGE, seed)
    sampling = {"temperature": 0, "max_new_tokens": LONG_REPLY, "ignore_eos": True}
    body = {"rid": rid, "input_ids": prompt, "sampling_params": sampling, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as reply:
        chunks = reply.iter_content(1)  # who drops it hangs up
        assert next(chunks)  # of its first token
        yield
        server.abort_request(rid)


@contextmanager
def asking(server: Server, prompt: list[int], replies: list[Conversation]) -> Iterator[None]:
    """A prompt that L3 has is being asked within the block; its reply is there behind it."""
    asking = threading.Thread(target=lambda: replies.extend(asked(server, prompt)))
    with until_more(server, "lookups", "found", len(prompt) // PAGE - 1):
        asking.start()
    yield
    asking.join()


def decisions(server: Server) -> dict[str, float]:
    counted = fetch(server.url).counters["slices"]
    names = ("whole", "shorter", "put_off_running", "put_off_waiting")
    return {name: counted.get(name, 0) for name in names}


def more(server: Server, before: dict[str, float]) -> set[str]:
    """What was decided since then."""
    return {name for name, count in decisions(server).items() if count > before[name]}


def test_nothing_is_recomputed_beside_a_full_batch(model: Path, server: Server) -> None:
    """As many requests run as the server takes, then others wait too; then half of them run."""
    prompt, replies = stored(server, seed=1200), list[Conversation]()
    read_batches(server, 0)
    before, recomputed = decisions(server), tokens(server, "eager_recomputed")
    with ExitStack() as half, ExitStack() as other_half:
        for seed in range(RUNNING_LIMIT):
            (other_half if seed % 2 else half).enter_context(running(server, 1000 + seed))
        half.enter_context(asking(server, prompt, replies))
        with until_more(server, "tokens", "eager", 2 * BATCH):
            read_batches(server, 2)
        server.until(lambda: bool(more(server, before)), "a decision")
        assert more(server, before) == {"put_off_running"}
        assert tokens(server, "eager_recomputed") == recomputed
        waiting = threading.Thread(target=server.generate, args=(random_tokens(3 * PAGE, 1100), 1))
        with until_more(server, "slices", "put_off_waiting", 1):
            waiting.start()
        with until_more(server, "tokens", "eager", BATCH):
            read_batches(server, 3)
        assert more(server, before) == {"put_off_running", "put_off_waiting"}
        assert tokens(server, "eager_recomputed") == recomputed
        with until_more(server, "tokens", "eager_recomputed", 3 * BATCH):
            other_half.close()
        assert "shorter" in more(server, before)
        assert "whole" not in more(server, before)
        waiting.join()
        read_batches(server, None)
    assert_no_cache_output(model, replies)


def test_random_conversations_while_l3_fails(model: Path, server: Server) -> None:
    """The long form is in test_conversations.py."""
    trouble = Trouble(server.options.log.parent, partial(tell_faults, server), stall_s=0.5, seed=2)
    clients, bouts = Clients(server, 3, aborted=0.2, kept=1 << 30, seed=2), 0
    while bouts < 2 or not clients.counts["storage"]:
        with trouble.going_on():
            clients.begin(5)
        server.flush_cache()
        bouts += 1
    assert_no_cache_replies_up_to_ties(model, clients.turns)
