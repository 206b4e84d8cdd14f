"""Partitions on a real server: whatever is stored of a layer, the output is that of no cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness.conversations import converse, make_conversations
from tests.engine.harness.models import build_model
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    our_server,
)
from tests.engine.harness.server import Server

pytestmark = pytest.mark.engine

PARTITIONS = {
    "all hidden": (0, 4, 0),
    "all KV": (0, 0, 4),
    "half and half": (0, 2, 2),
    "one recomputed": (1, 3, 0),
    "two recomputed": (2, 2, 0),
    "all three": (1, 2, 1),
    "no hidden": (2, 0, 2),
}


def partition_of(numbers: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("recompute", "hidden", "kv"), numbers, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # MHA, GQA
@pytest.mark.parametrize("name", PARTITIONS)
def test_output_is_that_of_no_cache(
    name: str, family: str, model_cache: Path, tmp_path: Path
) -> None:
    model = build_model(family, model_cache)
    hcache = {"partition": partition_of(PARTITIONS[name])}
    with Server(our_server(model, tmp_path, hcache=hcache)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=300))
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)
