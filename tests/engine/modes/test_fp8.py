"""FP8 weights and FP8 KV: what K depends on decides, not the word.

Scales of tokens, of groups of values and of the checkpoint do not depend on the batch, so hidden
states are stored and layers are recomputed. With one scale for all tokens of a batch K depends on
the others, so K and V are stored and nothing is recomputed. The reference is a server without any
cache: transformers has no such layers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.harness.models import LAYERS, build_model
from bench.harness.server import CachedTokens, Server, ServerOptions
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness.conversations import (
    Conversation,
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.ours import (
    assert_nothing_went_wrong,
    assert_own_pages_of_kv,
    assert_restored_from_l3,
    our_server,
)
from tests.engine.harness.quantised import KINDS, quantised
from tests.engine.harness.reference import assert_equal_tokens

pytestmark = pytest.mark.engine

EXACT = {"HCACHE_CPU_EXACT_SUMS": "1"}
INDEPENDENT = [kind for kind in KINDS if kind != "batch"]
SHORT = "blocks"


def long_but(*short: str) -> list[object]:
    """Kinds whose scales do not depend on the batch, all but some of them marked as long."""
    return [
        pytest.param(kind, marks=() if kind in short else pytest.mark.long) for kind in INDEPENDENT
    ]


def assert_replies_without_cache(
    model: Path, folder: Path, conversations: Sequence[Conversation]
) -> None:
    plain = ServerOptions(model, folder / "plain.log", cache="none", extra_env=EXACT)
    with Server(plain) as server:
        for turn in turns_of(conversations):
            want = server.generate(turn.prompt, len(turn.reply.output_ids))
            assert want.cached == CachedTokens(0, 0, 0)
            assert_equal_tokens(turn.reply.output_ids, want.output_ids)


@pytest.mark.parametrize("kind", long_but(SHORT))
def test_fronts_are_recomputed_beside_k_and_v(kind: str, tmp_path: Path) -> None:
    model = quantised(build_model("qwen3", tmp_path), tmp_path, kind)
    options = our_server(
        model, tmp_path, hcache={"mode": "kv", "recompute_ms": 1e4}, metrics=True, extra_env=EXACT
    )
    conversations = make_conversations(2, turns=3, tokens=400)
    with Server(options) as server:
        converse(server, conversations)
        assert "not used: recomputation" not in server.log_text()
        assert fetch(server.url).counters["l3_tokens"].get("recomputed", 0) > 0
        assert_own_pages_of_kv(server)
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert_replies_without_cache(model, tmp_path, conversations)


def fp8_kv(model: Path, folder: Path, scale: float) -> ServerOptions:
    """A server whose K and V are FP8 of this scale, and K and V in own pages."""
    by_layer = {str(layer): scale for layer in range(LAYERS)}
    kv = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": by_layer}}
    path = folder / f"scales-{scale}.json"
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv}))
    return our_server(
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
        assert_own_pages_of_kv(server)
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
        assert_nothing_went_wrong(server)
    for scale, found in ((0.25, False), (0.5, True)):
        with Server(fp8_kv(model, tmp_path, scale)) as server:
            assert (server.generate(there.prompt, 1).cached.storage > 0) == found
