"""Scenario of pairs of layers: the last tokens of nodes are asked again behind forward passes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hcache_backend import streams
from hcache_backend.krul.pairs import PairChoice
from hcache_backend.krul.plugin import NodePairs
from tests.kit.turns import answered
from tests.order.checker import Checker
from tests.order.scenario_restore import GPU, SIZE

LAYERS, TOKENS = 2, 2 * SIZE


def probes(checker: Checker) -> None:
    """Nodes come one after the other; the memory that says where their tokens are is used again."""
    keys = checker.on_device(torch.ones((4 * TOKENS, 8)), "K")
    schedule, forward = checker.stream("schedule"), checker.stream("forward")

    def attention_inputs(layers: int, token_ids: Any, slots: torch.Tensor) -> list[Any]:
        asked = SimpleNamespace(
            q=torch.ones(len(token_ids), 1, 8),
            scale=1.0,
            length=len(slots),
            kv_heads=1,
            keys=lambda heads: keys[slots][:, None],
        )
        return [asked] * layers

    def slots_of(node: int, root: int) -> torch.Tensor:
        return streams.to_device(np.arange(TOKENS) + node * TOKENS, GPU)

    recomputer: Any = SimpleNamespace(
        attention_inputs=attention_inputs, stream=lambda: streams.wrap_engine_stream(forward)
    )
    tree = SimpleNamespace(
        build_storage_backup_spec=lambda *_: SimpleNamespace(
            token_ids=[1, 2], hash_value=None, prefix_keys=None
        ),
        empty_match_result=SimpleNamespace(last_device_node=0),
        collect_full_device_indices=slots_of,
    )
    layout: Any = SimpleNamespace(pairs=())
    choice = PairChoice(LAYERS, 0, (), 1.0, 0.5)
    pairs = NodePairs(recomputer, choice, layout, None, 1)
    checker.begin()
    for node in range(4):
        forward.wait_stream(schedule)
        with checker.on(forward):
            keys[node * TOKENS : (node + 1) * TOKENS] = 1.0  # the node's own forward pass
        with checker.on(schedule):
            pairs.add_node(tree, [node])
            slots_of(node, 0)
            answered(pairs)
