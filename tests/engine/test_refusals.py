"""What hidden mode refuses runs in KV mode through the same store, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness.conversations import converse, make_conversations, random_tokens
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
    projections,
)

pytestmark = pytest.mark.engine

KV_MODE = "hcache: KV mode (plain KV pages): "


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek", "the KV pool is a MLATokenToKVPool (FULL)"),
        ("gemma3", "layers.0.self_attn takes a tensor 'positions' of shape (1, 48)"),
        (
            "phi3_longrope",
            "K of model.layers.0.self_attn at positions 0..47 changes when position 16383 is "
            "projected with them",
        ),
    ],
)
def test_models_that_hidden_mode_does_not_know(
    name: str, reason: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    prompt = random_tokens(300, seed=5)
    with Server(our_server(model, tmp_path)) as server:
        log = server.log_text()
        assert KV_MODE in log
        assert reason in log
        server.generate(prompt, 16)
        on_device = server.generate(prompt, 16)
        server.flush_cache()
        from_l3 = server.generate(prompt, 16)
        assert from_l3.cached.storage == 256
        assert from_l3.output_ids == on_device.output_ids
        assert_nothing_went_wrong(server)


def test_multi_query_attention_runs_in_kv_mode_unless_hidden_is_insisted_on(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("gemma", model_cache)
    with Server(our_server(model, tmp_path / "auto", hcache={"mode": "auto"})) as server:
        assert KV_MODE + "the partition has no hidden states" in server.log_text()
    insist = {"mode": "hidden"}
    with Server(our_server(model, tmp_path / "small", hcache=insist)) as server:
        # Twice the KV pool's memory is what the tokens on the device alone take here.
        assert KV_MODE + "--hicache-ratio 2.0 gives 0.0" in server.log_text()
    options = our_server(model, tmp_path / "hidden", hcache=insist, hicache_ratio=4.0)
    with Server(options) as server:
        conversations = converse(server, make_conversations(1, turns=2, tokens=300))
        assert_hidden_mode(server)
        assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)


@pytest.mark.versions
@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("llama", "4 layers by spec (fused weight 256x256, RoPE neox 64)"),
        # Its norm sees the heads of all ranks: the attention modules talk to each other.
        ("olmo2", "layers 0, 1, 2, 3 by their attention modules: K is made by no norm and RoPE"),
    ],
)
def test_two_tensor_parallel_ranks_in_hidden_mode(
    name: str, projection: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(name, model_cache)
    with Server(our_server(model, tmp_path, tp=2)) as server:
        conversations = converse(
            server, make_conversations(3, turns=2, tokens=300), concurrent=True
        )
        assert_hidden_mode(server)
        assert [line.startswith(projection) for line in projections(server)] == [True, True]
        assert_nothing_went_wrong(server)
        assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)
