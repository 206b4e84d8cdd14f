"""The main job, for models whose attention modules differ in what matters to us."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness.conversations import converse, make_conversations
from tests.engine.harness.models import build_model
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
    stored_pages,
)
from tests.engine.harness.server import Server

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "opt", "gpt2", "olmo2"])
def test_flushed_conversations_come_back_from_hidden_states_with_the_no_cache_output(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    # 600-token questions in prefill chunks of 256: the first prompt takes three.
    with Server(our_server(model, tmp_path, chunked_prefill_size=256)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=600))
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
        assert_restored_from_l3(conversations, server.options.page_size)
    assert_no_cache_output(model, conversations)
    kv_bytes = 2 * 4 * 256 * 4 * server.options.page_size  # of an MHA model of this size
    sizes = {path.stat().st_size for path in stored_pages(tmp_path)}
    assert sizes and max(sizes) <= 0.52 * kv_bytes


def test_bfloat16_output_is_the_no_cache_output_up_to_ties(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("llama", model_cache)
    with Server(our_server(model, tmp_path, dtype="bfloat16")) as server:
        conversations = converse(server, make_conversations(3, turns=3, tokens=300))
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
        assert_restored_from_l3(conversations, server.options.page_size)
    assert_no_cache_output_up_to_ties(model, tmp_path, conversations)
