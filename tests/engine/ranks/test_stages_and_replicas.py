"""Pipeline stages, each with its own layers, and data-parallel replicas, over one store."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model, with_changed_layers
from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.main import app
from tests.engine.harness import ours
from tests.engine.harness.clients import Clients
from tests.engine.harness.conversations import (
    Conversation,
    Turn,
    ask,
    converse,
    make_conversations,
    random_tokens,
    turns_of,
)

pytestmark = pytest.mark.engine

STAGES = REPLICAS = 2
PAGE_FILE_BYTES = 270_336


@pytest.mark.versions
@pytest.mark.parametrize("mode", ["hidden", pytest.param("kv", marks=pytest.mark.long)])
def test_stages_store_their_own_layers_and_know_the_weights_of_the_others(
    mode: str, model: Path, tmp_path: Path
) -> None:
    """The second stage's weights stay the same in the update; what they compute does not."""
    other = with_changed_layers(model, tmp_path / "other", layers=[0])
    with Server(ours.our_server(model, tmp_path, pp=STAGES, hcache={"mode": mode})) as server:
        if mode == "hidden":
            ours.assert_hidden_mode(server)

        def turn() -> Conversation:
            return converse(server, make_conversations(1, turns=1, tokens=400, seed=90))[0]

        def update(weights: Path, times: int) -> None:
            server.update_weights_from_disk(weights)
            serving = "hcache: L3 serves again"
            server.until(lambda: server.log_text().count(serving) == STAGES * times, "both stages")

        conversations = converse(server, make_conversations(2, turns=2, tokens=300))
        first = turn()
        # The first stage answers; the last one may still be writing.
        server.until(lambda: len(ours.stored_pages(tmp_path)) >= STAGES * (2 * 9 + 6), "all pages")
        assert len(ours.stored_pages(tmp_path)) == STAGES * (2 * 9 + 6)
        update(other, 1)
        under_other = [turn(), turn()]
        update(model, 2)
        back = turn()
        ours.assert_nothing_went_wrong(server)
    ours.assert_restored_from_l3(conversations, 64)
    assert [c.turns[0].cached.storage for c in [first, *under_other, back]] == [0, 0, 384, 384]
    ours.assert_no_cache_output(other, under_other)
    ours.assert_no_cache_output(model, [*conversations, first, back])


def small_pools(model: Path, folder: Path, **options: Any) -> ServerOptions:
    """Stages whose device pool holds two conversations of the tests below."""
    sizes = {"page_size": 16, "max_total_tokens": 1024, "hicache_ratio": 6.0}
    return ours.our_server(model, folder, **({"pp": STAGES} | sizes | options))


def abreast(seed: int) -> list[Conversation]:
    return make_conversations(6, turns=3, tokens=100, seed=seed)


def from_host(conversations: Sequence[Conversation]) -> int:
    return sum(turn.cached.host for turn in turns_of(conversations))


@pytest.mark.parametrize(
    ("stages", "policy"),
    [pytest.param(3, "write_through", marks=pytest.mark.long), (2, "write_back")],
)
def test_stages_restore_from_host_memory_what_all_of_them_have(
    stages: int, policy: str, model: Path, tmp_path: Path
) -> None:
    # Each stage is at work for other requests, and together these must fit.
    options = small_pools(
        model, tmp_path, pp=stages, write_policy=policy, max_total_tokens=512 * (1 + stages)
    )
    with Server(options) as server:
        clients = Clients(server, 16, aborted=0.2, kept=30)
        clients.talk(3, until=lambda: len(clients.turns) == 30 and clients.counts["host"] > 0)
        server.wait_backed_up()
        ours.assert_sound_hidden_mode(server)
    assert clients.counts["host"], clients.counts
    ours.assert_no_cache_replies_up_to_ties(model, clients.turns)


def test_what_one_stage_lost_is_a_miss_on_all(model: Path, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    env = ours.faulty("rows_lost", trigger, stage=1)
    with Server(small_pools(model, tmp_path, extra_env=env)) as server:
        trigger.touch()
        lost = converse(server, abreast(1), flush=False, concurrent=True)
        trigger.unlink()
        again = ask(server, [c.turns[-1].prompt for c in lost])
        kept = converse(server, abreast(2), flush=False, concurrent=True)
        ours.assert_hidden_mode(server)
    assert from_host(lost) == 0
    assert all(turn.cached.storage == 0 for turn in turns_of([*lost, *again]))
    assert from_host(kept) > 500
    ours.assert_no_cache_output(model, [*lost, *again, *kept])


def test_wrong_copies_of_one_stage_end_loads_on_all(model: Path, tmp_path: Path) -> None:
    trigger = tmp_path / "trigger"
    env = ours.faulty("wrong_copies", trigger, stage=1)
    with Server(small_pools(model, tmp_path, hcache={"mode": "kv"}, extra_env=env)) as server:
        trigger.touch()
        [wrong, *others] = abreast(1)
        converse(server, [wrong], turns=1, flush=False)
        server.wait_for_log("the self-check in service failed: K and V of layer 1 in a page are")
        converse(server, others[:1], turns=1, flush=False)  # with a backup the stage says it
        server.wait_for_log("another pipeline stage failed its self-check")
        converse(server, others, flush=False, concurrent=True)  # the device holds two of them
        converse(server, [wrong], flush=False)
    assert from_host([wrong, *others]) == 0
    assert all(turn.cached.storage == 0 for turn in turns_of([wrong, *others]))
    ours.assert_no_cache_output(model, [wrong, *others])


@pytest.mark.parametrize(
    ("name", "page_file_bytes"),
    [
        pytest.param("llama", PAGE_FILE_BYTES, marks=pytest.mark.versions),
        pytest.param("deepseek", 106_496, marks=pytest.mark.long),  # latents
    ],
)
def test_replicas_share_one_store(
    name: str, page_file_bytes: int, model_cache: Path, tmp_path: Path
) -> None:
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

    model, quota = build_model(name, model_cache), 40 * page_file_bytes
    hcache = {"mode": "hidden" if name == "llama" else "kv", "quota_bytes": quota}
    with Server(ours.our_server(model, tmp_path, dp=REPLICAS, hcache=hcache)) as server:
        both = [random_tokens(400, seed=700 + number) for number in range(2)]
        # One that comes late may find what the other one has just written.
        assert set(ask(server, [*both, *both], [0, 0, 1, 1])) <= {0, 384}
        assert len(ours.stored_pages(tmp_path)) == 2 * 6
        new = random_tokens(400, seed=710)
        assert ask(server, [new], [0]) == [0]
        assert ask(server, [new, *both], [1, 1, 0]) == [384, 384, 384]
        for start in range(0, 24, 6):
            pressure = [random_tokens(200, seed=720 + start + number) for number in range(6)]
            ask(server, pressure, [0, 1] * 3)
            sizes = [page.stat().st_size for page in ours.stored_pages(tmp_path)]
            assert sum(sizes) <= quota
        assert ask(server, [pressure[0]], [1]) == [192]  # the newest are there
        verified = CliRunner().invoke(app, ["verify", "-d", str(tmp_path / "l3"), "--json"])
        found = json.loads(verified.output)["folders"][str(tmp_path / "l3")]
        assert (found["pages"], found["problems"]) == (len(sizes), 0)
        assert set(sizes) == {page_file_bytes} and len(sizes) > 20
        ours.assert_sound_own_pages(server, hcache["mode"])
    ours.assert_no_cache_output(
        model, [Conversation([turn.prompt], turns=[turn]) for turn in asked]
    )
