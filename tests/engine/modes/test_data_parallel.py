"""Data-parallel attention: each group of ranks has requests of its own, and L3 is for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness.conversations import converse, make_conversations, turns_of
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_restored_from_l3,
    assert_sound_own_pages,
    our_server,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("tp", "restore"),
    [
        (2, "auto"),
        pytest.param(2, "layerwise", marks=pytest.mark.long),
        pytest.param(4, "auto", marks=pytest.mark.long),  # two ranks have heads of one request
    ],
)
def test_a_conversation_finds_its_pages_in_the_other_group(
    tp: int, restore: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("qwen3_moe", model_cache)
    options = our_server(
        model,
        tmp_path,
        hcache={"mode": "auto", "restore": restore},
        page_size=16,
        tp=tp,
        extra_args=("--enable-dp-attention", "--dp-size", "2", "--mem-fraction-static", "0.3"),
    )
    with Server(options) as server:
        # One request at a time: the other group is idle meanwhile, and has the next one.
        conversations = converse(server, make_conversations(3, turns=3, tokens=200))
        groups = [[turn.reply.meta_info["dp_rank"] for turn in c.turns] for c in conversations]
        assert groups == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
        assert_restored_from_l3(conversations, 16)
        together = make_conversations(4, turns=2, tokens=200, seed=7)
        assert_restored_from_l3(converse(server, together, concurrent=True), 16)
        assert_sound_own_pages(server, "kv")
    assert_no_cache_output(model, [*conversations, *together])
    assert all(turn.cached.device == 0 for turn in turns_of(conversations))
