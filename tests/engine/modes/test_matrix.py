"""Classes of models, and which pages each has: the main job for all of them.

`test_architectures.py` has models with hidden states, `test_speculation.py` and
`test_data_parallel.py` have drafts and data-parallel attention, and `test_features.py` has flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
    stored_pages,
)

pytestmark = pytest.mark.engine

QUERY_GROUPS = "the partition has no hidden states: 4 layers loaded as KV"
TWO_POSITIONS = "model.layers.0.self_attn takes a tensor 'positions' of shape (1, 48)"
MLA = "the KV pool is a MLATokenToKVPool (FULL)"
FLOAT32_STATES = (("SGLANG_MAMBA_CONV_DTYPE", "float32"),)
STATES = "the KV pool is a HybridLinearKVPool"
WINDOWS = "the KV pool is a SWAKVPool (FULL, SWA)"


class Row(NamedTuple):
    """A model and what its server stores.

    Attributes:
        model: Its name in `bench.harness.models`.
        pages: Own pages of K and V, or SGLang's plain ones.
        why: The log's reason: why there are no hidden states, or no own pages.
        tp: Number of tensor-parallel ranks.
        files: Page files of two conversations.
        mode: Option of ours.
        reference: Who says the right tokens: transformers, or a server without a cache.
        env: Variables of the server.
        grid: A hit ends at a multiple of this many tokens.
    """

    model: str
    pages: Literal["own", "plain"]
    why: str
    tp: int = 1
    files: int = 80
    mode: str = "auto"
    reference: Literal["transformers", "server"] = "transformers"
    env: tuple[tuple[str, str], ...] = ()
    grid: int = 16


ROWS = [
    Row("qwen3_moe", "own", QUERY_GROUPS),
    Row("glm4_moe", "own", QUERY_GROUPS),
    Row("minimax_m2", "own", QUERY_GROUPS),
    Row("minimax_m2", "own", QUERY_GROUPS, tp=2, files=160),
    Row("gemma3", "own", TWO_POSITIONS, mode="hidden"),
    # All ranks have the same latent, and one of them writes it.
    Row("deepseek_v2", "plain", MLA, reference="server"),
    Row("deepseek", "plain", MLA),
    Row("deepseek", "plain", MLA, tp=2),
    Row("glm4_moe_lite", "plain", MLA, reference="server"),
    # Pages of windows are files of their own: the last window of each node.
    Row("gpt_oss", "plain", WINDOWS, files=132),
    Row("mellum", "plain", WINDOWS, files=132),
    # A state is kept every 64 tokens, and is a file of its own.
    Row("qwen3_next", "plain", STATES, reference="server", env=FLOAT32_STATES, grid=64, files=78),
]
SHORT = {("gemma3", 1), ("deepseek", 2), ("gpt_oss", 1), ("minimax_m2", 1)}


def _assert_right(options: ServerOptions, row: Row, conversations: list[Conversation]) -> None:
    if row.reference == "transformers":
        assert_no_cache_output(Path(options.model), conversations)
        return
    plain = ServerOptions(
        options.model,
        options.log.with_name("plain.log"),
        cache="none",
        page_size=16,
        extra_env=dict(row.env),
    )
    with Server(plain) as server:
        for turn in turns_of(conversations):
            said = turn.reply.output_ids
            assert server.generate(turn.prompt, len(said)).output_ids == said


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row.model}-{row.tp}",
            marks=() if (row.model, row.tp) in SHORT else pytest.mark.long,
        )
        for row in ROWS
    ],
)
def test_conversations_come_back_from_l3(row: Row, model_cache: Path, tmp_path: Path) -> None:
    options = our_server(
        build_model(row.model, model_cache),
        tmp_path,
        hcache={"mode": row.mode},
        page_size=16,
        tp=row.tp,
        extra_env=dict(row.env),
    )

    def talk(**how: Any) -> list[Conversation]:
        with Server(options) as server:
            conversations = converse(server, make_conversations(2, turns=3, tokens=200), **how)
            assert f"hcache: KV mode, {row.pages} pages: {row.why}" in server.log_text()
            assert_nothing_went_wrong(server)
        return list(conversations)

    first = talk()
    assert_restored_from_l3(first, row.grid)
    assert all(turn.cached.device == turn.cached.host == 0 for turn in turns_of(first))
    assert len(stored_pages(tmp_path)) == row.files
    options.log = tmp_path / "restarted.log"
    again = talk(flush=False)  # nothing of them is on the device by chance
    assert all(conversation.turns[0].cached.storage >= 192 for conversation in again)
    _assert_right(options, row, [*first, *again])
