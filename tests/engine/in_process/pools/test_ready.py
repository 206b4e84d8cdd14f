"""A load of pages of which some are restored already: the host pool launches what is missing."""

from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.host.loads import Prepared, QueuedLoad
from hcache_backend.restore.layers import Recompute
from hcache_backend.sglang.host_pool import OwnPagesPool
from tests.kit.host import LAYERS, PAGE, Host, slots_of


class Running:
    """Notes which layers somebody waited for. Each of ``events`` is behind as many layers."""

    failed = None

    def __init__(self, events: int = LAYERS) -> None:
        made = [object() for _ in range(events)]
        self.layers = [made[layer * events // LAYERS] for layer in range(LAYERS)]
        self.waited: list[int] = []

    def wait_for_layer(self, layer: int) -> None:
        self.waited.append(layer)


class Pipeline:
    def __init__(self) -> None:
        self.started: list[tuple[list[int], list[int], Recompute | None]] = []
        self.restore = Running()
        self.may_be_read = False

    def start(self, pages: Any, slots: torch.Tensor, recompute: Recompute | None) -> Running:
        self.started.append((pages.tolist(), (slots[::PAGE] // PAGE).tolist(), recompute))
        assert len(slots) == PAGE * len(pages)
        return self.restore

    def mark_handed_out(self) -> None:
        self.may_be_read = True

    def finished(self) -> list[Any]:
        return []


@pytest.fixture
def pool() -> OwnPagesPool:
    server = Host(codec="none")
    server.loads._pipeline = Pipeline()
    return server.pool


def load(pool: OwnPagesPool, host: list[int], device: list[int], given: Prepared) -> Pipeline:
    """Load host pages to device pages; others made the ``given`` pages of it."""
    loads: Any = pool._loads
    loads.add_load(QueuedLoad(np.array(host), prepared=given))
    indices = slots_of(*host), slots_of(*device)
    for layer in range(LAYERS):
        pool.load_to_device_per_layer(pool.device_pool, *indices, layer, "kernel")
    assert not loads._queued
    pipeline: Any = loads._pipeline
    return pipeline


@pytest.mark.parametrize(
    ("there", "started"),
    [([False, True, False], [([3, 4], [5, 2], None)]), ([True] * 3, [])],
    ids=["some", "all"],
)
def test_missing_pages_are_transferred(
    there: list[bool], started: list[Any], pool: OwnPagesPool
) -> None:
    early: Any = (Running(1), Running())
    pipeline = load(pool, [3, 1, 4], [5, 6, 2], Prepared(slots_of(5, 6, 2), np.array(there), early))
    assert pipeline.started == started and pipeline.may_be_read
    whole, layers = (restore.waited for restore in early)
    assert (whole, layers) == ([0], [*range(LAYERS)]), "one wait for each event"
    assert pipeline.restore.waited == (layers if started else [])
