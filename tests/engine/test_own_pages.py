"""Own pages of K and V: models whose hidden states do not pay, through L2, L3 and restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.main import app
from hcache_backend.partition.profile import Profile, Rate
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_restored_from_l3,
    assert_sound_own_pages,
    file_backend,
    hidden_mode_env,
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


@pytest.mark.parametrize("name", ["llama", "olmoe", "phi3"])
def test_models_of_other_kinds(name: str, model_cache: Path, tmp_path: Path) -> None:
    """With as many heads of K and V as of queries, where mode `kv` insists."""
    model = build_model(name, model_cache)
    with Server(our_server(model, tmp_path, hcache={"mode": "kv"})) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=300))
        assert_restored_from_l3(conversations, 64)
        assert_sound_own_pages(server, "kv")
    assert_no_cache_output(model, conversations)


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}], ids=["two ranks", "two stages"])
def test_ranks_and_stages_store_their_own_heads_and_layers(
    options: dict[str, int], model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("qwen3", model_cache)
    with Server(our_server(model, tmp_path, hcache={"mode": "auto"}, **options)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        assert_restored_from_l3(conversations, 64)
        assert_sound_own_pages(server, "kv")
    assert_no_cache_output(model, conversations)


def test_write_back_and_eager_restores_under_pressure(model_cache: Path, tmp_path: Path) -> None:
    """The device pool holds two conversations of six; three requests run at a time."""
    model = build_model("qwen3", model_cache)
    options = our_server(
        model,
        tmp_path,
        hcache={"mode": "auto", "restore": "eager"},
        write_policy="write_back",
        page_size=16,
        max_total_tokens=1536,
        hicache_ratio=1.6,
    )
    with Server(options) as server:
        conversations = make_conversations(6, turns=3, tokens=120, seed=5)
        for turns in (1, 2, 3):
            for part in (conversations[:3], conversations[3:]):
                converse(server, part, turns=turns, flush=False, concurrent=True)
        again = make_conversations(6, turns=3, tokens=120, seed=5)
        converse(server, again, flush=False, concurrent=True)
        assert_sound_own_pages(server, "kv")
    assert sum(turn.cached.host + turn.cached.storage for turn in turns_of(again)) > 300
    assert_no_cache_output(model, [*conversations, *again])


def test_another_l3_gets_pages_that_prove_themselves(model_cache: Path, tmp_path: Path) -> None:
    model = build_model("qwen3", model_cache)
    env = hidden_mode_env(mode="auto")
    with Server(file_backend(model, tmp_path, extra_env=env)) as server:
        conversations = converse(server, make_conversations(2, turns=2, tokens=300))
        assert_restored_from_l3(conversations, 64)
        assert_sound_own_pages(server, "kv")
    assert_no_cache_output(model, conversations)


def test_servers_with_other_profiles_find_each_others_pages(model: Path, tmp_path: Path) -> None:
    """What the first one decided is followed, also where projecting takes for ever, until the user
    changes it."""
    for name, slow in (("fast.json", "kv_load"), ("slow.json", "projection")):
        rates = {
            rate: Rate(seconds=1.0 if rate in (slow, "dense") else 1e-6, per_second=1e18)
            for rate in ("hidden_copy", "kv_load", "projection", "dense", "attention")
        }
        profile = Profile(device="none", source="a test", dtype="float32", l3=None, **rates)
        profile.save(tmp_path / name)

    def conversation(number: int, profile: str) -> tuple[Conversation, str]:
        options = our_server(
            model,
            tmp_path,
            hcache={"mode": "auto", "profile": str(tmp_path / profile)},
            log=tmp_path / f"{number}.log",
        )
        with Server(options) as server:
            [asked] = converse(server, make_conversations(1, turns=1, tokens=400))
            return asked, server.log_text()

    profiles = ("fast.json", "slow.json", "fast.json")
    served = [conversation(number, profile) for number, profile in enumerate(profiles)]
    assert [c.turns[0].cached.storage for c, _ in served] == [0, 384, 384]
    followed = ", as the store has it: the best for "
    assert [followed in log for _, log in served] == [False, True, True]
    slow_path, store = str(tmp_path / "slow.json"), str(tmp_path / "l3")
    command = ["plan", "-m", str(model), "-w", slow_path, "--apply", store]
    assert CliRunner().invoke(app, command).exit_code == 0
    changed, log = conversation(3, "fast.json")
    assert changed.turns[0].cached.storage == 0
    assert ", as the store has it: hcache plan --apply" in log
    assert_no_cache_output(model, [*(c for c, _ in served), changed])
