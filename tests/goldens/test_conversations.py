"""Conversations from L3 have the same replies in every mode, and those of a server without a cache.

Replies are compared within a run and not recorded: sums differ between CPUs. The record has how
many tokens of each turn came from L3. The model is in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bench.harness.models import build_model, with_changed_layers
from bench.harness.server import Server, ServerOptions
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_nothing_went_wrong,
    our_server,
    partition,
)
from tests.goldens.golden import compare
from tests.goldens.traced import PAGE

pytestmark = pytest.mark.engine
LAYERS = 6
EMPTY = (LAYERS - 2, LAYERS - 1)
"""Layers whose K and V are zeros: codec ``krul`` loses nothing of their pair."""
WITHOUT = "without a cache"
MODES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "hidden states": {"partition": partition(0, LAYERS, 0)},
        "first layers recomputed": {"partition": partition(2, LAYERS - 2, 0)},
        "K and V": {"mode": "kv"},
        "mixed": {"partition": partition(2, 2, LAYERS - 4)},
        "plain pages": {"mode": "kv", "pages": "plain"},
        "a pair of layers": {"mode": "kv", "codec": "krul", "krul": {"ratio": 0.4, "error": 0.0}},
    }
)


def model_with_empty_layers(cache: Path, folder: Path) -> Path:
    model = build_model("llama", cache, num_hidden_layers=LAYERS)
    return with_changed_layers(
        model, folder / "model", EMPTY, ("self_attn.k_proj", "self_attn.v_proj"), 0.0
    )


def conversations_on(options: ServerOptions) -> list[Conversation]:
    """Two conversations of three turns; device and host are flushed after each."""
    with Server(options) as server:
        found = converse(server, make_conversations(2, 3, tokens=100), reply_tokens=8)
        assert_nothing_went_wrong(server)
    return [*found]


def test_every_mode_has_the_replies_of_a_server_without_a_cache(
    pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    model = model_with_empty_layers(pytestconfig.cache.mkdir("models"), tmp_path)
    plain = ServerOptions(model, tmp_path / "plain.log", cache="none", page_size=PAGE)
    found = {WITHOUT: conversations_on(plain)}
    for mode, hcache in MODES.items():
        folder = tmp_path / mode
        folder.mkdir()
        options = our_server(model, folder, hcache=dict(hcache), page_size=PAGE)
        found[mode] = conversations_on(options)
    replies = {mode: [each.outputs for each in those] for mode, those in found.items()}
    assert replies == dict.fromkeys(replies, replies[WITHOUT])
    assert_no_cache_output(model, found[WITHOUT])
    tokens = {
        mode: ", ".join(str(turn.cached.storage) for turn in turns_of(those))
        for mode, those in found.items()
    }
    compare(
        "conversations.txt", (f"{mode}: from L3 {of_turns}" for mode, of_turns in tokens.items())
    )
