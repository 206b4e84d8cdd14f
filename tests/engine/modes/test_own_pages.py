"""Own pages of K and V: models whose hidden states do not pay, through L2, L3 and restarts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.main import app
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.plan.profile import Profile, Rate
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    assert_sound_own_pages,
    faulty,
    our_server,
    stored_pages,
)

pytestmark = pytest.mark.engine


@pytest.mark.versions
def test_pages_come_back_from_host_memory_from_l3_and_after_a_restart(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("qwen3", model_cache)
    options = our_server(
        model, tmp_path, hcache={"mode": "auto"}, page_size=16, max_total_tokens=1024
    )
    with Server(options) as server:
        # The device pool holds two conversations of four.
        conversations = make_conversations(4, turns=3, tokens=120, seed=5)
        for turns in (1, 2, 3):
            converse(server, conversations, turns=turns, flush=False)
        assert sum(turn.cached.host for turn in turns_of(conversations)) > 300
        from_l3 = converse(server, make_conversations(2, turns=3, tokens=300, seed=6))
        assert_restored_from_l3(from_l3, 16)
        assert_sound_own_pages(server, "kv")
    options.log = tmp_path / "restarted.log"
    with Server(options) as server:
        again = converse(server, make_conversations(2, turns=3, tokens=300, seed=6), flush=False)
        assert all(c.turns[0].cached.storage >= 300 - 16 for c in again)
        assert_sound_own_pages(server, "kv")
    assert stored_pages(tmp_path)
    assert_no_cache_output(model, [*conversations, *from_l3, *again])


GROUPED = {"num_key_value_heads": 2}


@pytest.mark.long
def test_k_and_v_in_bfloat16_are_bit_for_bit_the_pools(model_cache: Path, tmp_path: Path) -> None:
    """A page of every backup and of every load is compared."""
    model = build_model("llama", model_cache, **GROUPED)
    options = our_server(model, tmp_path, hcache={"mode": "auto"}, dtype="bfloat16", metrics=True)
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=300))
        assert_restored_from_l3(conversations, 64)
        # But for what 16 waiting checks left out, where checks had more than their share of time.
        server.until(lambda: fetch(server.url).counters["tokens"]["checked"] > 0, "a check")
        assert_sound_own_pages(server, "kv")
    assert_no_cache_output_up_to_ties(model, tmp_path, conversations)


RATES = ("hidden_copy", "kv_load", "projection", "dense", "attention")


def profiled(model: Path, folder: Path, name: str, seconds: dict[str, float]) -> ServerOptions:
    """A server by the profile of a machine where a layer's work takes so long, at any size."""
    rates = {rate: Rate(seconds=seconds.get(rate, 1e-6), per_second=1e18) for rate in RATES}
    profile = Profile(device=name, source="a test", dtype="float32", l3=None, **rates)
    profile.save(folder / f"{name}.json")
    hcache = {"mode": "auto", "profile": str(folder / f"{name}.json")}
    return our_server(model, folder, hcache=hcache, log=folder / f"{name}.log")


def test_two_servers_that_start_at_once_find_each_others_pages(model: Path, tmp_path: Path) -> None:
    """Over an empty store, where each wants what is slowest for the other. Both follow what the
    faster one wrote, until the user changes it."""
    hold = tmp_path / "hold"
    hold.touch()
    wanted = ("kv_load", "projection")
    options = [profiled(model, tmp_path, slow, {slow: 1.0, "dense": 1.0}) for slow in wanted]
    with ExitStack() as stack:
        servers = [Server(replace(o, extra_env=faulty("decisions_held", hold))) for o in options]
        for server in servers:
            server.launch()
            stack.callback(server.kill)
        decided = [server.wait_for_log("partition: (.*); the best for")[1] for server in servers]
        assert len(set(decided)) == 2
        hold.unlink()
        for server in servers:
            server.wait_ready()
        conversations = make_conversations(2, turns=3, tokens=200)
        for turns in (1, 2, 3):
            for server, conversation in zip(servers, conversations, strict=True):
                converse(server, [conversation], turns=turns)
            servers.reverse()  # the next turn is the other server's
        assert_restored_from_l3(conversations, 64)
        for server in servers:
            assert_nothing_went_wrong(server)
        [slower] = [s for s in servers if ", as the store has it: the best for " in s.log_text()]
    its_profile = str(slower.options.log.with_suffix(".json"))
    command = ["plan", "-m", str(model), "-w", its_profile, "--apply", str(tmp_path / "l3")]
    assert CliRunner().invoke(app, command).exit_code == 0
    with Server(options[0]) as server:
        [changed] = ask(server, [conversations[0].turns[0].prompt])
        assert ", as the store has it: hcache plan --apply" in server.log_text()
    assert changed.turns[0].cached.storage == 0
    assert_no_cache_output(model, [*conversations, changed])


@pytest.mark.long
def test_pages_of_both_kinds_live_in_one_store_and_never_meet(model: Path, tmp_path: Path) -> None:
    asked: list[Conversation] = []
    for number, pages in enumerate(("own", "plain", "own", "plain")):
        hcache = {"mode": {"own": "kv"}.get(pages, pages)}
        options = our_server(model, tmp_path, hcache=hcache, log=tmp_path / f"{number}.log")
        with Server(options) as server:
            asked += ask(server, [random_tokens(300, seed=8)])
            assert f"hcache: KV mode, {pages} pages: " in server.log_text()
            assert_nothing_went_wrong(server)
    assert [c.turns[0].cached.storage for c in asked] == [0, 0, 256, 256]
    assert_no_cache_output(model, asked)
