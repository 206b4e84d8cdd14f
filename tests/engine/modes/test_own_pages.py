"""Own pages of K and V: models whose hidden states do not pay, through L2, L3 and restarts."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.main import app
from tests.engine.harness import ours
from tests.engine.harness.conversations import ask, converse, make_conversations

pytestmark = pytest.mark.engine


def profiled(model: Path, folder: Path, slow: str) -> ServerOptions:
    """A server by the profile of a machine where this work of a layer is slow."""
    profile = ours.slow_profile(folder, slow, **{slow: 1.0, "dense": 1.0})
    hcache = {"mode": "auto", "profile": str(profile)}
    return ours.our_server(model, folder, hcache=hcache, log=folder / f"{slow}.log")


def test_two_servers_that_start_at_once_find_each_others_pages(model: Path, tmp_path: Path) -> None:
    """Over an empty store, where each wants what is slowest for the other. Both follow what the
    faster one wrote, until the user changes it."""
    hold = tmp_path / "hold"
    hold.touch()
    wanted = ("kv_load", "projection")
    options = [profiled(model, tmp_path, slow) for slow in wanted]
    with ExitStack() as stack:
        servers = [
            Server(replace(o, extra_env=ours.faulty("decisions_held", hold))) for o in options
        ]
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
        ours.assert_restored_from_l3(conversations, 64)
        for server in servers:
            ours.assert_nothing_went_wrong(server)
        [slower] = [s for s in servers if ", as the store has it: the best for " in s.log_text()]
    its_profile = str(tmp_path / f"profile-of-{slower.options.log.stem}.json")
    command = ["plan", "-m", str(model), "-w", its_profile, "--apply", str(tmp_path / "l3")]
    assert CliRunner().invoke(app, command).exit_code == 0
    with Server(options[0]) as server:
        [changed] = ask(server, [conversations[0].turns[0].prompt])
        assert ", as the store has it: hcache plan --apply" in server.log_text()
    assert changed.turns[0].cached.storage == 0
    ours.assert_no_cache_output(model, [*conversations, changed])
