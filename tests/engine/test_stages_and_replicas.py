"""Pipeline stages, each with its own layers, and data-parallel replicas, over one store."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from tests.engine.harness.conversations import (
    Conversation,
    Turn,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.models import with_changed_layers
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
    stored_pages,
)
from tests.engine.harness.server import Server

pytestmark = pytest.mark.engine

STAGES = REPLICAS = 2
PAGE_FILE_BYTES = 266_240


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


@pytest.mark.versions
def test_replicas_share_one_store(model: Path, tmp_path: Path) -> None:
    """They write the same pages at once, read what the other one wrote, and share the quota."""
    asked: list[Turn] = []

    def ask(server: Server, prompts: list[list[int]], order: list[int]) -> list[int]:
        """Send each prompt to the replica beside it, all at once; hits in L3, in tokens."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(lambda p, r: server.generate(p, 8, replica=r), prompts, order))
        assert [reply.meta_info["dp_rank"] for reply in replies] == order
        asked.extend(Turn(prompt, reply, 0) for prompt, reply in zip(prompts, replies, strict=True))
        server.flush_cache()
        return [reply.cached.storage for reply in replies]

    quota = 40 * PAGE_FILE_BYTES
    with Server(our_server(model, tmp_path, dp=REPLICAS, hcache={"quota_bytes": quota})) as server:
        both = [random_tokens(400, seed=700 + number) for number in range(2)]
        assert ask(server, [*both, *both], [0, 0, 1, 1]) == [0, 0, 0, 0]
        assert len(stored_pages(tmp_path)) == 2 * 6
        new = random_tokens(400, seed=710)
        assert ask(server, [new], [0]) == [0]
        assert ask(server, [new, *both], [1, 1, 0]) == [384, 384, 384]
        for start in range(0, 24, 6):
            pressure = [random_tokens(200, seed=720 + start + number) for number in range(6)]
            ask(server, pressure, [0, 1] * 3)
            sizes = [page.stat().st_size for page in stored_pages(tmp_path)]
            assert sum(sizes) <= quota
        assert ask(server, [pressure[0]], [1]) == [192]  # the newest are there
        verified = CliRunner().invoke(app, ["verify", "-d", str(tmp_path / "l3"), "--json"])
        found = json.loads(verified.output)["folders"][str(tmp_path / "l3")]
        assert (found["pages"], found["problems"]) == (len(sizes), 0)
        assert len(sizes) > 20
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert_no_cache_output(model, [Conversation([turn.prompt], turns=[turn]) for turn in asked])
