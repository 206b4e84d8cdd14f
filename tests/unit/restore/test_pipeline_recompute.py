"""Restores whose first layers are recomputed while segments of later ones arrive."""

from __future__ import annotations

import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

from hcache_backend.restore.layers import Recompute
from hcache_backend.restore.report import RunningRestore
from hcache_backend.streams import Event, WorkerStream
from tests.unit.restore.pipeline_server import (
    SIZE,
    WIDTH,
    Server,
    recompute,
    some,
    wait,
    without_first_layer,
)


@pytest.mark.parametrize("first", [1, 2, 3])
def test_recomputed_layers_take_no_copy_and_come_before_projections(first: int) -> None:
    server, calls = Server(["hidden", "hidden", "kv", "hidden"]), []
    pipeline = without_first_layer(server)
    pages, slots = some(2)

    def fill(positions: np.ndarray, where: torch.Tensor) -> None:
        assert not server.calls or server.methods[server.calls[0][0]] == "kv"
        calls.append((positions.tolist(), where.tolist()))

    restore = pipeline.start(pages, slots, recompute(first, fill))
    assert restore.failed is None
    for layer in range(4):
        restore.wait_for_layer(layer)
        if layer >= first:
            server.assert_restored(layer, pages.tolist(), slots)
    want = [1000 * int(page) + i for page in pages for i in range(SIZE)]
    assert calls == [(want, slots.tolist())]  # once, with all tokens
    (report,) = pipeline.finished()
    copied = {span.layer for span in report.spans if span.stream == "copy"}
    assert copied == set(range(first, 4))
    lengths = zip(server.methods[first:], pipeline._layout.segment_bytes[first:], strict=True)
    assert sum(report.bytes.values()) == 2 * sum(length for _, length in lengths)


def test_segments_arrive_while_the_first_layers_are_recomputed() -> None:
    server = Server(["hidden", "hidden", "kv", "hidden"])
    pipeline = without_first_layer(server)
    pages, slots = some(1)

    def fill(positions: np.ndarray, where: torch.Tensor) -> None:
        # KV does not go through the compute stream, which waits for this.
        until = time.monotonic() + 240
        while server.k[2, slots].isnan().any() and time.monotonic() < until:
            time.sleep(0.001)
        server.assert_restored(2, pages.tolist(), slots)

    restore = pipeline.start(pages, slots, recompute(1, fill))
    assert restore.failed is None
    restore.wait_for_layer(3)
    server.assert_restored(3, pages.tolist(), slots)


class Parked:
    """Segments of a layer in the slots of its V."""

    def __init__(self, server: Server, layer: int) -> None:
        self.v, self.puts, self.takes = server.v[layer], 0, 0

    def put(self, segments: torch.Tensor, slots: torch.Tensor) -> None:
        self.v[slots] = segments.view(torch.float32).view(-1, WIDTH)
        self.puts += 1

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        self.takes += 1
        return self.v[slots].view(torch.uint8)


@pytest.mark.parametrize("pages", [1, 4])
def test_nothing_waits_for_room_while_layers_are_recomputed(pages: int) -> None:
    methods = ["hidden"] * 6 + ["kv", "hidden", "kv"]
    server = Server(methods, chunk_tokens=2 * SIZE)
    parking = [Parked(server, layer) for layer in range(len(methods))]
    server.pipeline._layers = [
        layer if layer.method == "kv" else layer._replace(parking=parked)
        for layer, parked in zip(server.pipeline._layers, parking, strict=True)
    ]
    chosen, slots = some(pages)
    slots = slots[: pages * SIZE]
    arrived = threading.Event()

    def fill(positions: np.ndarray, where: torch.Tensor) -> None:
        # The last layer has arrived although nothing was projected yet.
        until = time.monotonic() + 240
        while server.k[8, slots].isnan().any() and time.monotonic() < until:
            time.sleep(0.001)
        server.assert_restored(8, chosen.tolist(), slots)
        assert {layer for layer, _ in server.calls} == {6, 8}
        arrived.set()

    restore = server.pipeline.start(chosen, slots, recompute(1, fill))
    assert restore.failed is None
    for layer in range(1, len(methods)):
        restore.wait_for_layer(layer)
        server.assert_restored(layer, chosen.tolist(), slots)
    assert arrived.is_set()
    assert [parked.puts for parked in parking] == [parked.takes for parked in parking]
    assert sum(parked.puts for parked in parking) > 0


def test_segments_wait_for_room_where_they_cannot_be_parked() -> None:
    server = Server(["hidden"] * 6, chunk_tokens=2 * SIZE)
    chosen, slots = some(2)
    restore = server.pipeline.start(chosen, slots, recompute(1, lambda *_: time.sleep(0.05)))
    for layer in range(1, 6):
        restore.wait_for_layer(layer)
        server.assert_restored(layer, chosen.tolist(), slots)


def test_layers_of_which_nothing_is_stored_must_be_recomputed() -> None:
    pipeline = without_first_layer(Server())
    with pytest.raises(ValueError, match="layers after the first 0 are not stored"):
        pipeline.start(*some(1))


def test_a_restore_may_have_nothing_to_do_but_to_recompute() -> None:
    server, calls = Server(["hidden"] * 3), []
    restore = server.pipeline.start(
        np.empty(0, np.int64),
        torch.empty(0, dtype=torch.int64),
        recompute(2, lambda positions, slots: calls.append(len(slots))),
    )
    restore.wait()
    assert (calls, server.calls) == ([0], [])
    assert len(restore.layers) == 3
    (report,) = server.pipeline.finished()
    assert report.tokens == 0


def test_recomputation_is_in_turn_with_forward_passes_and_copies_are_beside_it() -> None:
    server, forward, order = Server(["hidden", "kv", "kv"]), WorkerStream("forward"), []
    gate = threading.Event()
    pages, slots = some(1)

    def fill(positions: np.ndarray, where: torch.Tensor) -> None:
        order.append((threading.current_thread().name, positions.tolist(), where.tolist()))

    forward.run(partial(gate.wait, 240))
    forward.run(lambda: order.append("forward pass"))
    restore = server.pipeline.start(pages, slots, Recompute(1, fill, forward))
    forward.run(lambda: order.append("next forward pass"))
    assert passed(restore.layers[2])  # copied while a forward pass runs
    server.assert_restored(2, pages.tolist(), slots)
    assert order == []
    gate.set()
    restore.layers[0].synchronize()
    forward.record().synchronize()
    assert restore.failed is None
    positions = [1000 * int(page) + i for page in pages for i in range(SIZE)]
    recomputed = ("hcache-forward", positions, slots.tolist())
    assert order == ["forward pass", recomputed, "next forward pass"]


def passed(event: Event) -> bool:
    """Whether ``event`` passes in time."""
    until = time.monotonic() + 240
    while not event.query() and time.monotonic() < until:
        time.sleep(0.001)
    return event.query()


@pytest.mark.parametrize("methods", [["hidden"] * 3, ["hidden", "kv", "kv"]])
def test_copies_of_others_do_not_wait_for_a_recomputation(methods: list[str]) -> None:
    server, forward, gate = Server(methods), WorkerStream("forward"), threading.Event()
    pages, slots = some(4)
    forward.run(partial(gate.wait, 240))
    first = Recompute(1, lambda *_: None, forward)
    waiting = server.pipeline.start(pages[:2], slots[: 2 * SIZE], first)
    beside = server.pipeline.start(pages[2:], slots[2 * SIZE :])
    assert passed(waiting.copied) and passed(beside.copied)
    assert not waiting.layers[0].query()
    waiting.wait_until_copied()  # as who writes to host pages next
    gate.set()
    for restore, part in ((waiting, slice(2)), (beside, slice(2, 4))):
        restore.wait()
        for layer in range(1, 3):
            server.assert_restored(
                layer, pages[part].tolist(), slots.view(-1, SIZE)[part].flatten()
            )


def test_a_recomputation_does_not_wait_for_copies_of_layers_above_it() -> None:
    server, forward, gate = Server(["hidden"] * 3), WorkerStream("forward"), threading.Event()
    pages, slots = some(3)
    server.before_filling(1, partial(gate.wait, 240))
    above = server.pipeline.start(pages[:2], slots[: 2 * SIZE], first_layer=1)
    behind = server.pipeline.start(
        pages[2:], slots[2 * SIZE :], Recompute(1, lambda *_: None, forward)
    )
    assert passed(behind.layers[0])
    assert not above.layers[1].query()
    gate.set()
    behind.wait()


def test_a_slice_waits_for_pages_restored_ahead_only_where_it_may_read_them() -> None:
    server, forward, gate = Server(["hidden"] * 3), WorkerStream("forward"), threading.Event()
    pages, slots = some(3)
    parts = slots.split(SIZE)

    def slice_of(part: int, *after: RunningRestore) -> RunningRestore:
        recompute = Recompute(3, lambda *_: None, forward)
        return server.pipeline.start_recomputation(recompute, np.arange(4), parts[part], after)

    server.pipeline.start(pages[:1], parts[0]).wait()
    server.before_filling(1, partial(gate.wait, 240))
    back = server.pipeline.start(pages[1:2], parts[1], ahead=True)
    beside = slice_of(2)
    assert passed(beside.layers[-1])
    behind = slice_of(2, back)
    assert not back.layers[1].query()
    time.sleep(0.05)
    assert not behind.layers[-1].query()
    gate.set()
    assert passed(behind.layers[-1])

    gate.clear()
    back = server.pipeline.start(pages[2:], parts[2], ahead=True)
    server.pipeline.handed_out()
    behind = slice_of(0)
    time.sleep(0.05)
    assert not behind.layers[-1].query()
    gate.set()
    behind.wait()
    assert back.done()


def test_a_recomputation_that_fails_is_told_and_the_other_layers_come() -> None:
    server = Server(["hidden", "hidden", "kv"])
    pages, slots = some(2)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    restore = server.pipeline.start(pages, slots, recompute(1, fail))
    assert str(restore.failed) == "out of memory"
    restore.wait()
    for layer in (1, 2):
        server.assert_restored(layer, pages.tolist(), slots)
    wait(server, pages, slots)  # the next restore is as good as any


def test_a_recomputation_sees_what_the_restore_before_it_wrote() -> None:
    server = Server(["hidden"] * 3)
    first_pages, first_slots = np.array([0, 1]), torch.arange(2 * SIZE)
    server.before_filling(1, lambda: time.sleep(0.1))
    server.pipeline.start(first_pages, first_slots)

    def fill(positions: np.ndarray, where: torch.Tensor) -> None:
        for layer in range(3):
            server.assert_restored(layer, first_pages.tolist(), first_slots)

    behind = server.pipeline.start(np.array([2]), torch.arange(40, 40 + SIZE), recompute(3, fill))
    assert behind.failed is None
