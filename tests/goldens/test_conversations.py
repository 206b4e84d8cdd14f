"""Conversations from L3 have the same replies in every mode, in float32 those without a cache.

Replies are compared within a run and not recorded: sums differ between CPUs. The record has how
many tokens of each turn came from L3.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from bench.harness.models import build_model, with_changed_layers
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.goldens.golden import compare
from tests.goldens.traced import PAGE
from tests.kit.models import MODELS

pytestmark = pytest.mark.engine
LAYERS = 6
EMPTY = (LAYERS - 2, LAYERS - 1)
"""Layers whose K and V are zeros: codec ``krul`` loses nothing of their pair."""
WITHOUT = "without a cache"
FLOAT32: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "hidden states": {"partition": ours.partition(0, LAYERS, 0)},
        "first layers recomputed": {"partition": ours.partition(2, LAYERS - 2, 0)},
        "K and V": {"mode": "kv"},
        "mixed": {"partition": ours.partition(2, 2, LAYERS - 4)},
        "plain pages": {"mode": "plain"},
    }
)
BFLOAT16: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "as they are": {"mode": "kv", "codec": "none", "recompute": "never"},
        "encoded": {"mode": "kv", "codec": "exp4", "recompute": "never"},
        "a pair of layers": {"mode": "kv", "codec": "krul", "krul": {"ratio": 0.4, "error": 0.0}},
    }
)
"""Codecs of half types. K and V come back bit by bit, so what is computed behind them is the same
in each of these, though not in a server without a cache. A recomputed front has other sums."""


def model_with_empty_layers(cache: Path, folder: Path) -> Path:
    model = build_model("llama", cache, num_hidden_layers=LAYERS)
    return with_changed_layers(
        model, folder / "model", EMPTY, ("self_attn.k_proj", "self_attn.v_proj"), 0.0
    )


def conversations_on(options: ServerOptions, said: str = "") -> list[Conversation]:
    """Two conversations of three turns; device and host are flushed after each."""
    with Server(options) as server:
        assert said in server.log_text()
        found = converse(server, make_conversations(2, 3, tokens=100), reply_tokens=8)
        ours.assert_nothing_went_wrong(server)
    return [*found]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replies_are_the_same_in_every_mode(dtype: str, tmp_path: Path) -> None:
    model = model_with_empty_layers(MODELS, tmp_path)
    found: dict[str, list[Conversation]] = {}
    if dtype == "float32":
        plain = ServerOptions(model, tmp_path / "plain.log", cache="none", page_size=PAGE)
        found[WITHOUT] = conversations_on(plain)
        ours.assert_no_cache_output(model, found[WITHOUT])
    for mode, hcache in (FLOAT32 if dtype == "float32" else BFLOAT16).items():
        folder = tmp_path / mode
        folder.mkdir()
        options = ours.our_server(model, folder, hcache=dict(hcache), dtype=dtype, page_size=PAGE)
        said = f", codec {hcache['codec']}," if "codec" in hcache else ""
        found[mode] = conversations_on(options, said)
    replies = {mode: [each.outputs for each in those] for mode, those in found.items()}
    assert replies == dict.fromkeys(replies, next(iter(replies.values())))
    tokens = {
        mode: [turn.cached.storage for turn in turns_of(those)] for mode, those in found.items()
    }
    compare(
        f"conversations_{dtype}.txt", (f"{mode}: from L3 {those}" for mode, those in tokens.items())
    )
