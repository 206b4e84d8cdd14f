"""Speculative decoding over own pages: the same tokens, and as many accepted drafts as ever.

A draft model's K and V are a pool of SGLang's own beside ours; L3 has its pages in our store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness.server import Server, ServerOptions
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.drafts import accepted, drafting
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_restored_from_l3,
    assert_sound_own_pages,
    our_server,
)

pytestmark = pytest.mark.engine

LONG = pytest.mark.long
LAYERWISE = {"restore": "layerwise"}


def drafts_without_a_cache(
    options: ServerOptions, folder: Path, conversations: list[Conversation]
) -> list[list[int]]:
    """How many drafts a server without any cache accepts in each turn."""
    plain = ServerOptions(
        options.model,
        folder / "plain.log",
        cache="none",
        page_size=options.page_size,
        tp=options.tp,
        extra_args=options.extra_args,
    )
    with Server(plain) as server:
        return [
            accepted(server.generate(turn.prompt, len(turn.reply.output_ids)))
            for turn in turns_of(conversations)
        ]


@pytest.mark.parametrize(
    ("algorithm", "mode", "hcache", "options"),
    [
        ("NGRAM", "hidden", {}, {}),
        pytest.param("NGRAM", "kv", {}, {}, marks=LONG),
        ("STANDALONE", "kv", {}, {}),
        ("STANDALONE", "hidden", LAYERWISE, {}),
        pytest.param("STANDALONE", "kv", LAYERWISE, {}, marks=LONG),
        pytest.param("STANDALONE", "hidden", {}, {}, marks=LONG),
        ("EAGLE", "hidden", {}, {}),
        pytest.param("EAGLE", "kv", {}, {}, marks=LONG),
        pytest.param("EAGLE3", "kv", {}, {}, marks=LONG),
        pytest.param("EAGLE3", "hidden", {}, {}, marks=LONG),
        ("STANDALONE", "kv", {}, {"tp": 2}),
        pytest.param("EAGLE", "hidden", {}, {"tp": 2}, marks=LONG),
    ],
)
def test_l3_changes_neither_tokens_nor_accepted_drafts(
    algorithm: str,
    mode: str,
    hcache: dict[str, Any],
    options: dict[str, Any],
    model_cache: Path,
    tmp_path: Path,
) -> None:
    drafts = drafting(algorithm, model_cache, tmp_path)
    started = our_server(
        drafts.model,
        tmp_path,
        hcache={"mode": mode} | hcache,
        page_size=16,
        extra_args=drafts.arguments,
        **options,
    )
    with Server(started) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        assert_restored_from_l3(conversations, 16)
        assert_sound_own_pages(server, mode)
    started.log = tmp_path / "restarted.log"
    with Server(started) as server:  # nothing of the drafts is on the device by chance
        again = converse(server, make_conversations(2, turns=3, tokens=200), flush=False)
        assert_sound_own_pages(server, mode)
    assert all(turn.cached.storage for turn in turns_of(again))
    assert_no_cache_output(drafts.model, [*conversations, *again])
    found = [accepted(turn.reply) for turn in turns_of(conversations)]
    assert found == drafts_without_a_cache(started, tmp_path, conversations)
    assert found == [accepted(turn.reply) for turn in turns_of(again)]
    assert algorithm in ("NGRAM", "EAGLE3") or sum(sum(turn[1:]) for turn in found) > 10
