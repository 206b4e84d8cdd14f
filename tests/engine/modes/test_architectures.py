"""The main job, for models whose attention modules differ in what matters to us."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.main import app
from tests.engine.harness.conversations import converse, make_conversations
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_restored_from_l3,
    assert_sound_hidden_mode,
    our_server,
    projections,
    stored_pages,
)

pytestmark = pytest.mark.engine


SPECS = {
    "llama": "fused weight 512x256, RoPE neox 64",
    "qwen2": "fused weight 256x256, bias, RoPE neox 64",
    "qwen3": "fused weight 256x256, rms norm over a head, RoPE neox 64",
    "olmo2": "fused weight 512x256, rms norm over all heads, RoPE neox 64",
    "opt": "fused weight 512x256, bias",
    "gpt2": "fused weight 512x256, bias",
    "phi3": "fused weight 512x256, RoPE neox 64",
    "stablelm": "fused weight 512x256, RoPE neox 16",
    "olmoe": "fused weight 512x256, rms norm over all heads, RoPE neox 64",
}
MARKS = {
    "llama": pytest.mark.versions,
    # They differ from the others in nothing that a restore depends on, or every run restores them
    # in test_partitions.py.
    **dict.fromkeys(("phi3", "stablelm", "olmoe", "olmo2", "opt"), pytest.mark.long),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SPECS])
def test_flushed_conversations_come_back_from_hidden_states_with_the_no_cache_output(
    name: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    # 600-token questions in prefill chunks of 256: the first prompt takes three.
    with Server(our_server(model, tmp_path, chunked_prefill_size=256)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=600))
        assert_sound_hidden_mode(server)
        assert_restored_from_l3(conversations, server.options.page_size)
        assert projections(server) == [f"4 layers by spec ({SPECS[name]})"]
    assert_no_cache_output(model, conversations)
    kv_bytes = 2 * 4 * 256 * 4 * server.options.page_size  # of an MHA model of this size
    sizes = {path.stat().st_size for path in stored_pages(tmp_path)}
    assert sizes and max(sizes) <= 0.52 * kv_bytes


def test_layers_that_no_spec_describes_are_projected_by_the_model_and_the_doctor_says_why(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("olmo", model_cache)
    reason = "V is not a part of what a linear module gives for the hidden states"
    with Server(our_server(model, tmp_path)) as server:
        conversations = converse(server, make_conversations(2, turns=2, tokens=300))
        assert_sound_hidden_mode(server)
        assert_restored_from_l3(conversations, server.options.page_size)
        assert projections(server) == [f"layers 0, 1, 2, 3 by their attention modules: {reason}"]
    assert_no_cache_output(model, conversations)
    told = CliRunner().invoke(app, ["doctor", "--json", "--dir", str(tmp_path / "l3")])
    (check,) = [c for c in json.loads(told.stdout)["checks"] if "last server" in c["subject"]]
    assert check["verdict"] == "fair"
    assert "hidden mode, own pages; codec none; " in check["detail"]
    assert (
        f"layers 0, 1, 2, 3 by their attention modules: {reason} "
        "(attention modules at other batch sizes K " in check["detail"]
    )
    assert check["detail"].endswith("; stored: 4 layers from hidden states")
