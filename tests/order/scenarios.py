"""Scenarios without an engine: a part of the product at work on modelled streams, in a second."""

from collections.abc import Callable
from functools import partial

from hcache_backend import streams
from hcache_backend.plan.restore import Partition
from tests.order.checker import Checker
from tests.order.product import CheckedDoor
from tests.order.scenario_capture import EncodingCodec, captures, step_that_cannot_begin
from tests.order.scenario_loads import (
    eager,
    eager_behind_a_pass,
    eager_behind_what_was_restored_ahead,
    eager_from_the_back,
    loads,
    loads_whose_recomputation_fails,
    sends,
)
from tests.order.scenario_pairs import probes
from tests.order.scenario_restore import restores, restores_between_ranks

ALL_KV = Partition(recompute=0, hidden=0, kv=4)
LATENTS = ["recompute", *["latent"] * 4]

Scenario = Callable[[Checker], None]

SCENARIOS: dict[str, Scenario] = {
    "restore, hidden states": partial(restores, methods=["hidden"] * 5),
    "restore, mixed": partial(restores, methods=["hidden", "kv", "hidden", "kv"]),
    "restore, first layers recomputed": partial(
        restores, methods=["recompute", "hidden", "hidden", "kv"], recomputed=2
    ),
    "restore, encoded": partial(restores, methods=["kv"] * 4, codec="exp4"),
    "restore, between ranks": restores_between_ranks,
    "restore, between ranks, encoded": partial(restores_between_ranks, codec="exp4"),
    "restore, latents": partial(restores, methods=["latent"] * 4, codec="exp4"),
    "restore, latents between ranks": partial(restores_between_ranks, methods=LATENTS),
    "restore, latents between ranks, encoded": partial(
        restores_between_ranks, methods=LATENTS, codec="exp4"
    ),
    "loads": loads,
    "loads, encoded": partial(loads, partition=ALL_KV, codec="exp4"),
    "loads, recomputation fails": loads_whose_recomputation_fails,
    "eager": eager,
    "eager, encoded": partial(eager, partition=ALL_KV, codec="exp4"),
    "eager, behind a pass": eager_behind_a_pass,
    "eager, behind what was restored ahead": eager_behind_what_was_restored_ahead,
    "eager, from the back": partial(eager_from_the_back, partition=Partition(0, 0, 3)),
    "eager, from the back, hidden states": partial(
        eager_from_the_back, partition=Partition(0, 2, 1)
    ),
    "sends": sends,
    "probes": probes,
    "capture": partial(captures, replay=False),
    "capture, decode graphs": partial(captures, replay=True),
    "capture, encoded": partial(captures, replay=True, codec=EncodingCodec),
    "capture, a step that cannot begin": step_that_cannot_begin,
}


def run(scenario: Scenario, checker: Checker) -> None:
    """One scenario, its streams through the checker's door."""
    door = CheckedDoor(checker)
    with streams.through(door), checker.watching():
        scenario(checker)
    assert not door.errors
