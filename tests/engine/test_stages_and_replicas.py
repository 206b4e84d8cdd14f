"""Pipeline stages, each with its own layers, and data-parallel replicas, over one store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engine.harness.conversations import Conversation, converse, make_conversations
from tests.engine.harness.models import with_changed_layers
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
    stored_pages,
)
from tests.engine.harness.server import Server

pytestmark = pytest.mark.engine

STAGES = 2


@pytest.mark.versions
def test_stages_store_their_own_layers_and_know_the_weights_of_the_others(
    model: Path, tmp_path: Path
) -> None:
    """The second stage's weights stay the same in the update; what they compute does not."""
    other = with_changed_layers(model, tmp_path / "other", layers=[0])
    with Server(our_server(model, tmp_path, pp=STAGES)) as server:
        assert "KV mode (plain KV pages): pipeline parallelism" in server.log_text()

        def turn() -> Conversation:
            return converse(server, make_conversations(1, turns=1, tokens=400, seed=90))[0]

        def update(weights: Path, times: int) -> None:
            server.update_weights_from_disk(weights)
            deadline = time.monotonic() + 30
            while server.log_text().count("hcache: L3 serves again") < STAGES * times:
                assert time.monotonic() < deadline
                time.sleep(0.05)

        conversations = converse(server, make_conversations(2, turns=2, tokens=300))
        before = len(stored_pages(tmp_path))
        first = turn()
        assert len(stored_pages(tmp_path)) - before == STAGES * 6
        update(other, 1)
        under_other = [turn(), turn()]
        update(model, 2)
        back = turn()
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert [c.turns[0].cached.storage for c in [first, *under_other, back]] == [0, 0, 384, 384]
    assert_no_cache_output(other, under_other)
    assert_no_cache_output(model, [*conversations, first, back])
