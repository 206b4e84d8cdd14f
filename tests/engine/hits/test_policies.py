"""HiCache's policies, with pools that are too small for what is asked of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness import ours
from tests.engine.harness.conversations import converse, make_conversations, turns_of

pytestmark = pytest.mark.engine


def test_write_through_selective_backs_up_what_is_used_twice(model: Path, tmp_path: Path) -> None:
    options = ours.our_server(model, tmp_path, write_policy="write_through_selective", page_size=16)
    with Server(options) as server:
        for _ in range(2):  # the second time makes it worth a backup
            converse(server, make_conversations(2, turns=1, tokens=300, seed=1), flush=False)
        server.flush_cache()
        again = converse(server, make_conversations(2, turns=2, tokens=300, seed=1))
        ours.assert_sound_hidden_mode(server)
    assert all(c.turns[0].cached.storage >= 300 - 16 for c in again)
    ours.assert_no_cache_output(model, again)


@pytest.mark.parametrize(
    "mode", ["hidden", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("plain", "kv"))]
)
def test_losses_of_a_small_host_pool_are_told(mode: str, model: Path, tmp_path: Path) -> None:
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": mode},
        metrics=True,
        page_size=16,
        hicache_ratio=0.8 if mode == "hidden" else 0.3,
    )
    lost = "not_backed_up_host_pool_full"
    conversations = make_conversations(8, turns=1, tokens=490)  # the device holds them
    with Server(options) as server:
        said = server.wait_for_log(
            r"the host pool has room for (\d+) tokens and the device pool for 4096: about "
            r"(\d+)% .* with --hicache-ratio ([\d.]+) all of it"
        )
        converse(server, conversations, flush=False)
        server.wait_backed_up()
        counted = fetch(server.url).counters["tokens"]
    room, percent, enough = int(said[1]), int(said[2]), float(said[3])
    assert percent == 100 * room // 4096
    stored = len(ours.stored_pages(tmp_path)) * 16
    assert room - 512 < stored <= room
    computed = sum(len(c.history) // 16 * 16 for c in conversations)
    assert counted[lost] >= computed - stored > 0  # HiCache tries some of them several times
    with Server(replace(options, hicache_ratio=enough, log=tmp_path / "enough.log")) as server:
        assert "the host pool has room" not in server.log_text()
        converse(server, make_conversations(8, turns=1, tokens=490, seed=1), flush=False)
        assert lost not in fetch(server.url).counters["tokens"]


WRITE_BACK: dict[str, tuple[str, dict[str, Any], float]] = {
    # Shadow pages and headers leave HiCache 145 pages of the host memory; the device has 97.
    "hidden": ("llama", {}, 1.34),
    # Restored nodes lack layers, and would be backed up a second time.
    "mixed": ("llama", {"partition": ours.partition(1, 2, 1)}, 1.34),
    "kv": ("qwen3", {"mode": "auto"}, 1.6),
}


@pytest.mark.parametrize(
    "pages",
    [
        *(
            pytest.param(pages, marks=[pytest.mark.versions, pytest.mark.long])
            for pages in ("hidden", "kv")
        ),
        "mixed",
    ],
)
def test_write_back_of_nodes_that_were_restored(
    pages: str, model_cache: Path, tmp_path: Path
) -> None:
    """The combination that is known to go wrong silently: see ARCHITECTURES.md, lesson two.

    The device pool holds two conversations of six, the host pool less than the device pool and
    the backlog, and three requests run at a time, so restored nodes are evicted and backed up a
    second time from whatever the device side of capture holds for them.
    """
    family, hcache, ratio = WRITE_BACK[pages]
    model = build_model(family, model_cache)
    if pages == "mixed":
        profile = ours.slow_profile(tmp_path, hidden_copy=1.0, kv_load=1.0, dense=1.0)
        hcache = hcache | {"profile": str(profile)}
    options = ours.our_server(
        model,
        tmp_path,
        hcache=hcache,
        write_policy="write_back",
        page_size=16,
        max_total_tokens=1536,
        hicache_ratio=ratio,
    )
    asked, again, last = (make_conversations(6, turns=3, tokens=120, seed=5) for _ in range(3))
    with Server(options) as server:
        for turns in (1, 2):
            for part in (asked[:3], asked[3:]):
                converse(server, part, turns=turns, flush=False, concurrent=True)
        for conversations in (asked, again):
            converse(server, conversations, flush=False, concurrent=True)
        server.flush_cache()
        converse(server, last, flush=False, concurrent=True)
        ours.assert_sound_own_pages(server, "kv" if pages == "kv" else "hidden")
    assert sum(turn.cached.host + turn.cached.storage for turn in turns_of([*again, *last])) > 300
    ours.assert_no_cache_output(model, [*asked, *again, *last])


def test_a_host_pool_that_holds_nothing_costs_only_hits(model: Path, tmp_path: Path) -> None:
    # The shadows of the device's 257 pages leave HiCache 12 pages of 16 tokens.
    options = ours.our_server(model, tmp_path, page_size=16, hicache_ratio=0.56)
    with Server(options) as server:
        conversations = converse(
            server, make_conversations(4, turns=3, tokens=300), flush=False, concurrent=True
        )
        ours.assert_sound_hidden_mode(server)
        assert "12 host pages, 257 shadows" in server.log_text()
    assert all(turn.cached.host == 0 for turn in turns_of(conversations))
    ours.assert_no_cache_output(model, conversations)
