"""Faults inside a server that serves; those that its start finds: modes/test_matrix.py."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import converse, make_conversations, turns_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("mode", ["hidden", pytest.param("kv", marks=pytest.mark.long)])
def test_a_server_lives_when_hooks_raise(mode: str, model: Path, tmp_path: Path) -> None:
    """In the middle of conversations; L3 is off from then on, since it may not know its pages."""
    trigger = tmp_path / "trigger"
    env = ours.faulty("hooks_raise", trigger)
    options = ours.our_server(model, tmp_path, hcache={"mode": mode}, extra_env=env)
    with Server(options) as server:
        conversations = make_conversations(3, turns=4)
        converse(server, conversations, turns=2)
        trigger.touch()
        converse(server, conversations)
        log = server.log_text()
    ours.assert_no_cache_output(model, conversations)
    assert "L3 is off until a restart" in log
    with Server(replace(options, extra_env={})) as server:
        ours.assert_no_cache_output(model, converse(server, make_conversations(1, turns=2)))


def test_rows_that_do_not_get_to_host_memory_at_start_up_mean_kv_mode(
    model: Path, tmp_path: Path
) -> None:
    """What captured them in the check is gone, too: a forward pass has no hook of ours."""
    trigger = tmp_path / "trigger"
    trigger.write_text("while the server starts")
    env = ours.faulty("save_fails,report_module_hooks", trigger)
    with Server(ours.our_server(model, tmp_path, extra_env=env)) as server:
        trigger.unlink()
        assert ours.told(server, trigger) == 0
        conversations = converse(server, make_conversations(1, turns=2))
        said = "hcache: KV mode, own pages: hidden states do not get to host memory: "
        assert said + "NotImplementedError: no such kernel" in server.log_text()
    ours.assert_restored_from_l3(conversations, 64)
    ours.assert_no_cache_output(model, conversations)


@pytest.mark.parametrize("codec", ["auto", pytest.param("int8", marks=pytest.mark.long)])
def test_a_wrong_rope_in_service_ends_backups_and_drops_what_was_written(
    codec: str, model: Path, tmp_path: Path
) -> None:
    """It shows through the tolerance of a lossy codec, too."""
    trigger = tmp_path / "trigger"
    env = ours.faulty("wrong_rope", trigger)
    options = ours.our_server(model, tmp_path, hcache={"codec": codec}, extra_env=env)
    with Server(options) as server:
        old, new = make_conversations(2, turns=2)
        converse(server, [old], turns=1)
        ours.assert_hidden_mode(server)
        assert ours.stored_pages(tmp_path)
        trigger.touch()
        converse(server, [new])  # its backup is where the sampled check looks
        server.wait_for_log("the self-check in service failed: projected K of model.layers.0")
        server.wait_for_log(r"\d+ pages that this server wrote were deleted")
        assert ours.stored_pages(tmp_path) == []
        converse(server, [old])
        assert old.turns[1].cached.storage == 0
        assert new.turns[1].cached.storage == 0
    ours.assert_no_cache_output(model, [old, new])


@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_wrong_copies_of_k_and_v_end_backups_and_loads_and_drop_what_was_written(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    """Also of what host memory has by then, though the pool of the device holds a few only."""
    model, trigger = build_model(name, model_cache), tmp_path / "trigger"
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"mode": "kv"},
        page_size=16,
        max_total_tokens=1024,
        extra_env=ours.faulty("wrong_copies", trigger),
    )
    with Server(options) as server:
        conversations = make_conversations(4, turns=2, tokens=200)
        converse(server, conversations[:1], turns=1, flush=False)
        server.until(lambda: bool(ours.stored_pages(tmp_path)), "stored pages")
        trigger.touch()
        converse(server, conversations[1:2], turns=1, flush=False)
        server.wait_for_log("the self-check in service failed: K and V of layer 3 in a page are")
        server.wait_for_log(r"\d+ pages that this server wrote were deleted")
        converse(server, conversations, flush=False)
        assert ours.stored_pages(tmp_path) == []
    assert all(turn.cached.host == 0 for c in conversations for turn in c.turns[1:])
    assert all(turn.cached.storage == 0 for turn in turns_of(conversations))
    ours.assert_no_cache_output(model, conversations)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_slot_that_is_allocated_again_at_a_backup_takes_nothing_from_a_page(
    when: str, model: Path, tmp_path: Path
) -> None:
    """Before it, the slot never becomes a part of a page."""
    trigger = tmp_path / "trigger"
    fault = ours.faulty(f"slot_reallocated_{when}_backup", trigger)
    with Server(ours.our_server(model, tmp_path, extra_env=fault)) as server:
        trigger.touch()
        conversations = make_conversations(1, turns=3)
        converse(server, conversations, turns=2)
        assert when == "after" or all(t.cached.storage == 0 for t in turns_of(conversations))
        trigger.unlink()
        converse(server, conversations)
        again = converse(server, make_conversations(1, turns=2, seed=1))
        assert again[0].turns[1].cached.storage > 0
    ours.assert_no_cache_output(model, [*conversations, *again])
