"""A chat model with trained weights: a reply behind K and V from L3 is the computed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.demo import Words
from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import ModelMissing
from bench.harness.server import Server
from tests.engine.harness.ours import our_server

pytestmark = pytest.mark.engine

TEXT_TOKENS, REPLY_TOKENS = 300, 16


@pytest.mark.parametrize(
    ("form", "mode", "dtype"),
    [
        ("smollm2-mha", "hidden", "float32"),
        pytest.param("smollm2", "kv", "float32", marks=pytest.mark.long),
        # CPUs without instructions for bfloat16 take minutes.
        pytest.param("smollm2-mha", "hidden", "bfloat16", marks=pytest.mark.long),
        pytest.param("smollm2", "kv", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_restored_reply_is_the_computed_one(
    form: str, mode: str, dtype: str, tmp_path: Path
) -> None:
    try:
        model = real_model(form)
    except ModelMissing as missing:
        pytest.skip(str(missing))
    talk = Words(model, TEXT_TOKENS)
    prompt = talk.question(0)
    kept = prompt[: len(prompt) // 64 * 64]
    codec = "none" if dtype == "float32" else "exp4" if mode == "hidden" else "exp3"
    options = our_server(model, tmp_path, dtype=dtype, hcache={"mode": mode})
    with Server(options) as server:
        computed = server.generate(prompt, REPLY_TOKENS)
        assert computed.cached.total == 0
        server.flush_cache()
        restored = server.generate(prompt, REPLY_TOKENS)
        log = server.log_text()
    assert restored.cached.storage >= len(kept) - 64  # the last token is computed in any case
    assert restored.output_ids == computed.output_ids
    # It speaks. In bfloat16 the words depend on the CPU, because sums differ.
    words = ["the"] if dtype == "float32" else ["a", "and", "in", "is", "of", "the", "to"]
    assert any(f" {word} " in str(talk.text(computed.output_ids)) for word in words)
    assert f"codec {codec}" in log
    assert ("hidden mode" if mode == "hidden" else "KV mode, own pages") in log
