"""K and V that are stored encoded: same output, smaller pages, and units that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
)
from tests.engine.harness.ours import our_server, partition

pytestmark = pytest.mark.engine

PAGE = 128
THREE_BITS = {"codec": "exp3"}
KV, MIXED = {"mode": "kv"}, {"partition": partition(0, 2, 2)}
HIDDEN = {"partition": partition(0, 4, 0)}
RANKS, BACK = {"tp": 2}, {"write_policy": "write_back"}
NEVER = HIDDEN | {"recompute": "never"}
UNITS, ROWS = "units_do_not_fit", "rows_do_not_fit"
SHORT = {"page_size": 32}
OFTEN = "mixed", ROWS
"""What ranks agree on: tests/engine/in_process/encoded_kv/test_unfit.py."""


@pytest.mark.parametrize(
    ("name", "hcache", "options", "fault"),
    [
        pytest.param(*server, fault, id=f"{label}, {fault}", marks=marks)
        for label, server, faults in (
            ("kv", ("qwen3", KV, {}), (UNITS,)),
            ("three bits", ("qwen3", KV | THREE_BITS, SHORT), (UNITS,)),
            ("write back", ("qwen3", KV, BACK), (UNITS,)),
            ("kv, two ranks", ("qwen3", KV, RANKS), (UNITS,)),
            ("mixed", ("llama", MIXED, {}), (UNITS, ROWS)),
            ("mixed, two ranks", ("llama", MIXED, RANKS), (UNITS, ROWS)),
            ("hidden", ("llama", HIDDEN, {}), (ROWS,)),
            ("hidden, two ranks", ("llama", HIDDEN, RANKS), (ROWS,)),
            ("two ranks, write back", ("llama", HIDDEN, RANKS | BACK), (ROWS,)),
            ("two stages", ("llama", {"partition": partition(0, 2, 0)}, {"pp": 2}), (ROWS,)),
            ("hidden, write back", ("llama", HIDDEN, BACK), (ROWS,)),
            ("layer-wise", ("llama", HIDDEN | {"restore": "layerwise"}, {}), (ROWS,)),
            ("recomputed", ("llama", {"partition": partition(1, 2, 1)}, {}), (ROWS,)),
            ("never recomputed", ("llama", NEVER, {}), (ROWS,)),
            ("kv, never recomputed", ("qwen3", KV | {"recompute": "never"}, {}), (UNITS,)),
        )
        for fault in faults
        for marks in [() if (label, fault) == OFTEN else pytest.mark.long]
    ],
)
def test_units_that_do_not_fit_are_misses(
    name: str,
    hcache: dict[str, Any],
    options: dict[str, Any],
    fault: str,
    model_cache: Path,
    tmp_path: Path,
) -> None:
    """The device holds two conversations of four; a part of their units is not encodable."""
    model = build_model(name, model_cache)
    asked_for = our_server(
        model,
        tmp_path,
        hcache={"codec": "exp4", **hcache},
        extra_env=ours.faulty(fault),
        dtype="bfloat16",
        max_total_tokens=1024,
        hicache_ratio=3.0,
        metrics=True,
        **{"page_size": 16, **options},
    )
    with Server(asked_for) as server:
        conversations = make_conversations(4, turns=3, tokens=120, seed=5)
        for turns in (1, 2, 3):
            converse(server, conversations, turns=turns, flush=False)
        # Others share a front with them, which is in host memory only.
        fronts = [c.turns[-1].prompt[:200] for c in conversations]
        shared = [*ask(server, [[*front, 7, 8, 9, tail] for tail in (1, 2) for front in fronts])]
        tokens = fetch(server.url).counters["tokens"]
        assert tokens["not_encodable"]
        server.flush_cache()
        # What was not encodable is not in L3, which serves what stands before it.
        again = ask(server, [c.turns[0].prompt for c in conversations])
        assert all(c.turns[0].cached.storage < 112 for c in again)
        ours.assert_sound_own_pages(server, "kv" if hcache.get("mode") else "hidden")
    asked: list[Conversation] = [*conversations, *shared, *again]
    with Server(asked_for) as server:  # after a restart as well
        again = ask(server, [c.turns[-1].prompt for c in conversations])
        assert all(c.turns[0].cached.storage < 300 for c in again)
        ours.assert_nothing_went_wrong(server)
    asked += again
    ours.assert_no_cache_output_up_to_ties(model, tmp_path, asked)
