"""Own pages of K and V: of two servers that start at once, and of K and V in FP8."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.models import LAYERS
from bench.harness.server import Server, ServerOptions
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
    faster one wrote, until the user deletes it."""
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
    [record] = (tmp_path / "l3").glob("partition-*.json")
    record.unlink()
    with Server(replace(slower.options, log=tmp_path / "alone.log")) as server:
        [changed] = ask(server, [conversations[0].turns[0].prompt])
        assert ", as the store has it" not in server.log_text()
    assert changed.turns[0].cached.storage == 0
    ours.assert_no_cache_output(model, [*conversations, changed])


def fp8_kv(model: Path, folder: Path, scale: float) -> ServerOptions:
    """A server whose K and V are FP8 of this scale, and K and V in own pages."""
    by_layer = {str(layer): scale for layer in range(LAYERS)}
    kv = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": by_layer}}
    path = folder / f"scales-{scale}.json"
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv}))
    return ours.our_server(
        model,
        folder,
        log=folder / f"{scale}.log",
        hcache={"mode": "kv"},
        extra_args=("--kv-cache-dtype", "fp8_e4m3", "--quantization-param-path", str(path)),
    )


def test_fp8_kv_comes_back_and_other_scales_find_none(model: Path, tmp_path: Path) -> None:
    """A reply behind K and V from L3 is that behind the same K and V on the device."""
    [conversation] = make_conversations(1, turns=2, tokens=400)
    with Server(fp8_kv(model, tmp_path, 0.5)) as server:
        converse(server, [conversation], flush=False)
        ours.assert_own_pages_of_kv(server)
        there = conversation.turns[1]
        assert there.cached.device >= there.history_tokens - 64
        server.flush_cache()
        again = server.generate(there.prompt, len(there.reply.output_ids))
        assert again.cached.storage >= len(there.prompt) - 64
        server.flush_cache()
        last = server.generate([*there.prompt[: there.cached.device], 1], 1)
        assert last.cached.storage == there.cached.device
        behind = server.generate(there.prompt, len(there.reply.output_ids))
        assert behind.cached.device == there.cached.device
        assert behind.output_ids == there.reply.output_ids
        ours.assert_nothing_went_wrong(server)
    for scale, found in ((0.25, False), (0.5, True)):
        with Server(fp8_kv(model, tmp_path, scale)) as server:
            assert (server.generate(there.prompt, 1).cached.storage > 0) == found
