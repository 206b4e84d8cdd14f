"""Shapes of traffic, on one server: small pages, small chunks mixed with decode, many at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)

pytestmark = pytest.mark.engine

PAGE = 16


@pytest.fixture(scope="module", params=["rust", pytest.param("python", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Pages of 16 tokens and chunks of 128 mixed with decode, on either radix-tree core; the one in
    Python with overlap scheduling."""
    options = ours.our_server(
        model,
        tmp_path_factory.mktemp(request.param),
        page_size=PAGE,
        max_total_tokens=8192,
        chunked_prefill_size=128,
        overlap=request.param == "python",
        extra_args=["--enable-mixed-chunk"],
        extra_env={"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": request.param},
    )
    core = {"rust": "RustUnifiedTreeCore", "python": "UnifiedTreeCore"}[request.param]
    with Server(options) as server:
        assert f"Tree Core: {core}\n" in server.log_text()
        yield server
        ours.assert_sound_hidden_mode(server)


def test_eight_conversations_at_once(server: Server, model: Path) -> None:
    conversations = make_conversations(8, turns=2, tokens=200, seed=1)
    converse(server, conversations, concurrent=True, reply_tokens=24)
    ours.assert_restored_from_l3(conversations, PAGE)
    ours.assert_no_cache_output(model, conversations)


def test_conversations_that_part_in_the_middle_of_what_was_stored(
    server: Server, model: Path
) -> None:
    whole = Conversation([random_tokens(400, seed=50), random_tokens(40, seed=51)])
    converse(server, [whole])
    # 200 tokens are common; they end in the middle of a node and of a page.
    prefix = whole.turns[0].prompt[:200]
    branches = make_conversations(2, turns=2, tokens=120, prefix=prefix, seed=2)
    converse(server, branches)
    first, second = (branch.turns[0].cached for branch in branches)
    assert first.storage == 200 // PAGE * PAGE
    assert second.device == 200 // PAGE * PAGE  # the other branch has just restored it
    for turn in (branch.turns[1] for branch in branches):
        assert turn.cached.device + turn.cached.storage >= turn.history_tokens - PAGE
        assert turn.cached.storage > 0
    ours.assert_no_cache_output(model, [whole, *branches])


def test_generated_pages_are_restored_as_prompted_ones_are(server: Server, model: Path) -> None:
    (conversation,) = make_conversations(1, turns=2, tokens=40, seed=3)
    converse(server, [conversation], reply_tokens=200)
    ours.assert_restored_from_l3([conversation], PAGE)
    assert conversation.turns[1].cached.storage > 200
    ours.assert_no_cache_output(model, [conversation])


def test_ten_flushes(server: Server, model: Path) -> None:
    prompt = random_tokens(100, seed=70)
    (conversation,) = ask(server, [prompt])
    for _ in range(10):
        (again,) = ask(server, [prompt])
        assert again.turns[0].cached.storage == (len(prompt) - 1) // PAGE * PAGE
        assert again.outputs == conversation.outputs
    ours.assert_no_cache_output(model, [conversation])


def test_warm_turns_and_restored_turns_mix(server: Server, model: Path) -> None:
    """Without a flush in between, history is on the device for some and in L3 for others."""
    old, new = make_conversations(2, turns=3, tokens=150, seed=4)
    converse(server, [old], turns=1)
    converse(server, [old, new], flush=False, concurrent=True)
    assert old.turns[1].cached.storage >= old.turns[1].history_tokens - PAGE
    ours.assert_no_cache_output(model, [old, new])
