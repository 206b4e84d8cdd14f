"""Hidden states that are stored encoded: what comes back, and what must never come back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import converse, make_conversations

pytestmark = pytest.mark.engine

WIDE_TOKEN, TRIED_TOKEN = 1000, 847
"""Their embeddings are made to overflow exp4; the second one is a token of the self-check."""


def change_weights(model: Path, folder: Path, name: str, change: Callable[..., None]) -> Path:
    """A copy of ``model`` in ``folder``, one of whose weights ``change`` has changed."""
    copy = folder / "model"
    shutil.copytree(model, copy)
    (file,) = copy.glob("*.safetensors")
    weights = load_file(file)
    change(weights[name])
    save_file(weights, file, {"format": "pt"})
    return copy


def test_a_row_that_overflows_keeps_its_page_from_l3(model: Path, tmp_path: Path) -> None:
    def spread(embeddings: torch.Tensor) -> None:
        """Ten values of different exponents make the row; all others lie far below them."""
        for token in (WIDE_TOKEN, TRIED_TOKEN):
            embeddings[token] *= 2.0**-40
            embeddings[token, :10] = 2.0 ** -torch.arange(10)

    served = change_weights(model, tmp_path, "model.embed_tokens.weight", spread)
    conversations = make_conversations(2, turns=3, tokens=200)
    for question in (q for c in conversations for q in c.questions):
        question[:] = [1 if token in (WIDE_TOKEN, TRIED_TOKEN) else token for token in question]
    hit, other = conversations
    hit.questions[1][100] = WIDE_TOKEN
    with Server(ours.our_server(served, tmp_path, dtype="bfloat16")) as server:
        converse(server, conversations)
        ours.assert_hidden_mode(server)
        first_turn = (200 + 16) // 64 * 64
        assert [turn.cached.storage for turn in hit.turns[:2]] == [0, first_turn]
        # The page before the row's is stored where the backup began before the verdict was there.
        assert hit.turns[2].cached.storage in (first_turn, first_turn + 64)
        ours.assert_restored_from_l3([other], 64)
        ours.assert_nothing_went_wrong(server)
        log = server.log_text()
        assert "codec 'exp4' cannot encode 1 tokens of this step" in log
        assert "codec 'exp4' cannot encode 1 of the 48 tokens that were tried" in log
        assert "is not used" not in log
    ours.assert_no_cache_output_up_to_ties(served, tmp_path, conversations)


def test_a_codec_that_breaks_the_model_is_refused_at_start_up(model: Path, tmp_path: Path) -> None:
    """One dimension far above all others, as large models have: int8 rounds the rest away."""

    def tower(norm: torch.Tensor) -> None:
        norm[7] *= 200

    served = change_weights(model, tmp_path, "model.layers.2.input_layernorm.weight", tower)
    with Server(ours.our_server(served, tmp_path, hcache={"codec": "int8"})) as server:
        conversations = converse(server, make_conversations(2, turns=2))
        ours.assert_hidden_mode(server)
        ours.assert_restored_from_l3(conversations, 64)
        assert server.wait_for_log(
            r"codec 'int8' is not used, hidden states are stored as they are \(codec 'none'\): "
            r"projected [KV] of model.layers.2.self_attn differs from the model's by"
        )
    ours.assert_no_cache_output(served, conversations)
