"""Random conversations while L3 fails, pages are damaged, and weights change: replies are right."""

import os
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from hcache_backend.cli.metrics_page import fetch
from tests.engine.harness.clients import Clients
from tests.engine.harness.conversations import Conversation
from tests.engine.harness.ours import (
    assert_no_cache_output_up_to_ties,
    assert_no_cache_replies_up_to_ties,
)
from tests.engine.harness.trouble import Trouble
from tests.engine.hits.eager_servers import (
    FAULTS,
    assert_fine,
    counted,
    eager_server,
    tell_faults,
    tokens,
)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(3000)]

CONVERSATIONS = int(os.environ.get("HCACHE_TEST_CONVERSATIONS", "100"))
"""Of each server."""
ABREAST, A_BOUT = 4, 10
"""Conversations at a time, and between two moments when nobody talks."""
STALL_S = 5.0
KINDS = ("aborted", "disconnected", "device", "host", "storage", "flushes", "weight updates")
HALF = {"dtype": "bfloat16"}
SERVERS: dict[str, dict[str, Any]] = {
    "hidden": {"stored": "recompute"},
    "K and V": {"stored": "recompute, kv", "family": "qwen3"},
    "mixed": {"stored": "recompute, mixed"},
    "codec": {"stored": "recompute, kv", "family": "qwen3", **HALF},
    "codec, mixed": {"stored": "recompute, mixed", **HALF},
    "two ranks": {"stored": "recompute, mixed", "tp": 2},
    "codec, two ranks": {"stored": "recompute, mixed", **HALF, "tp": 2},
    "from the back": {"stored": "kv, from the back", "family": "qwen3"},
    "from the back, codec": {"stored": "kv, from the back", "family": "qwen3", **HALF},
    "from the back, two ranks": {"stored": "kv, from the back", "tp": 2},
    "from the back, hidden": {"stored": "hidden, from the back"},
    "from the back, mixed, codec": {"stored": "mixed, from the back", **HALF},
    "from the back, mixed, two ranks": {"stored": "mixed, from the back", "tp": 2},
    "from the back, mixed, codec, two ranks": {"stored": "mixed, from the back", **HALF, "tp": 2},
    "not recomputed": {"stored": "kv", "family": "qwen3"},
    "latents": {"stored": "kv, from the back", "family": "deepseek"},
    "latents, two ranks": {"stored": "kv, from the back", "family": "deepseek", "tp": 2},
}


@pytest.mark.parametrize("name", SERVERS)
def test_random_conversations(
    name: str, model_cache: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    how = dict(SERVERS[name])
    stored, family = how.pop("stored"), how.pop("family", "llama")
    model, other = (build_model(family, model_cache, seed=seed) for seed in (0, 1))
    encoded = how.get("dtype") == "bfloat16"  # all of them, but for some rows and units
    faults = f"{FAULTS},some_do_not_fit" if encoded else FAULTS
    options = eager_server(
        model, tmp_path, stored, faults=faults, max_total_tokens=1536, hicache_ratio=1.1, **how
    )
    dice = random.Random(name)
    with Server(options) as server:
        server.update_weights_from_disk(model)  # from now on replies name their weights
        clients = Clients(server, ABREAST, aborted=0.2, kept=1 << 30, seed=1)
        trouble = Trouble(tmp_path, partial(tell_faults, server), stall_s=STALL_S, seed=1)
        weights = model

        def everything() -> bool:
            """Each kind of end and of hit, slices, and units that do not fit."""
            seen = [clients.counts[kind] for kind in KINDS]
            if "from the back" in stored:
                seen.append(counted(server, "l3_tokens", "recomputed"))
            return all(seen) and (not encoded or bool(tokens(server, "not_encodable")))

        while clients.counts["conversations"] < CONVERSATIONS or not everything():
            with trouble.going_on():
                clients.begin(A_BOUT)
            server.wait_backed_up()
            if dice.random() < 0.3:
                weights = other if weights == model else model
                server.update_weights_from_disk(weights)  # which flushes
                clients.counts["weight updates"] += 1
            elif dice.random() < 0.8:
                server.flush_cache()
                clients.counts["flushes"] += 1
        counters = fetch(server.url).counters
        assert_fine(server, stored)
    found: dict[str, Mapping[str, float]] = {"talk": clients.counts, "trouble": trouble.counts}
    found |= {what: counters[what] for what in ("slices", "l3_tokens", "tokens")}
    for what, counts in found.items():
        record_property(what, dict(sorted(counts.items())))
    for weights in (model, other):
        turns = [t for t in clients.turns if t.reply.meta_info["weight_version"] == weights.name]
        if encoded:
            talks = [Conversation([], turns=turns)]
            folder, ranks = tmp_path / weights.name, how.get("tp", 1)
            assert_no_cache_output_up_to_ties(weights, folder, talks, ranks)
        else:
            assert_no_cache_replies_up_to_ties(weights, turns)
        record_property(f"replies_equal_to_no_cache_{weights.name}", len(turns))
