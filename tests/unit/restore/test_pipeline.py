"""The restore pipeline: right whatever the streams do, and as far ahead as its ring allows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hcache_backend.restore import parts, pipeline
from hcache_backend.restore.ring import RUN_AHEAD, ring_bytes
from hcache_backend.streams import StreamFailed, WorkerStream, new_stream
from tests.unit.restore.pipeline_server import (
    PAGES,
    SIZE,
    SLOTS,
    Server,
    recompute,
    some,
    wait,
    without_first_layer,
)


@pytest.mark.parametrize("pages", [1, 2, 7, PAGES])
@pytest.mark.parametrize("chunk_tokens", [1, SIZE, 3 * SIZE, 1024])
def test_every_layer_of_every_page_comes_back(pages: int, chunk_tokens: int) -> None:
    server = Server(chunk_tokens=chunk_tokens)
    wait(server, *some(pages))


def test_nothing_else_is_written() -> None:
    server = Server()
    chosen, slots = some(3)
    wait(server, chosen, slots)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert server.k[:, others].isnan().all()
    assert server.v[:, others].isnan().all()


def test_the_copy_engine_is_given_pages_that_the_cpu_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "copies_by_engine", lambda: True)
    held: list[torch.Tensor] = []
    hold = pipeline.held_for_device

    def holding(values: Any, device: torch.device | str) -> torch.Tensor:
        held.append(hold(values, device))
        return held[-1]

    monkeypatch.setattr(pipeline, "held_for_device", holding)
    server, given = Server(chunk_tokens=3 * SIZE), []
    gather = server.pipeline._gather

    def looking(memory: torch.Tensor, pages: torch.Tensor, offset: int, out: torch.Tensor) -> None:
        given.append(pages)
        gather(memory, pages, offset, out)

    server.pipeline._gather = looking
    wait(server, *some(7))
    there = {tensor.untyped_storage().data_ptr() for tensor in held}
    assert given and all(pages.untyped_storage().data_ptr() in there for pages in given)


def test_many_pages_are_one_copy_and_one_projection_a_layer() -> None:
    server = Server()
    wait(server, *some(PAGES))
    assert sorted(server.calls) == [(layer, PAGES * SIZE) for layer in range(5)]


@pytest.mark.parametrize("pages", [1, 2, 7, PAGES])
def test_projection_begins_when_a_piece_of_the_first_layer_is_there(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "FIRST_PIECE_TOKENS", 2 * SIZE)
    server, (chosen, slots) = Server(["hidden"] * 3), some(pages)
    wait(server, chosen, slots)
    piece = max(2, -(-pages // 4))
    pieces = [min(piece, pages - start) * SIZE for start in range(0, pages, piece)]
    assert server.calls == [*((0, n) for n in pieces), (1, pages * SIZE), (2, pages * SIZE)]
    # Others wait for the first layers anyway.
    server.calls.clear()
    nothing = recompute(1, lambda positions, slots: None)
    server.pipeline.start(chosen, slots, nothing).wait()
    assert server.calls == [(1, pages * SIZE), (2, pages * SIZE)]


def test_layer_0_is_ready_while_later_layers_are_still_on_their_way() -> None:
    server, gate = Server(["hidden"] * 4), threading.Event()
    gather, copies = server.pipeline._gather, []

    def slow(memory: torch.Tensor, pages: torch.Tensor, offset: int, out: torch.Tensor) -> None:
        copies.append(offset)
        if len(copies) > 1:
            gate.wait()
        gather(memory, pages, offset, out)

    server.pipeline._gather = slow
    pages, slots = some(3)
    restore = server.pipeline.start(pages, slots)
    restore.wait_for_layer(0)
    server.assert_restored(0, pages.tolist(), slots)
    assert not restore.layers[1].query()
    gate.set()
    restore.wait_for_layer(3)


def test_copies_run_ahead_of_a_stalled_projection_until_the_ring_is_full() -> None:
    # One page a chunk: the ring holds RUN_AHEAD segments of exactly this restore.
    server, gate = Server(["hidden"] * 8, chunk_tokens=SIZE), threading.Event()
    copied, gather = threading.Semaphore(0), server.pipeline._gather

    def counted(memory: torch.Tensor, pages: torch.Tensor, offset: int, out: torch.Tensor) -> None:
        gather(memory, pages, offset, out)
        copied.release()

    server.pipeline._gather = counted
    for layer in range(8):
        server.before_filling(layer, gate.wait)
    pages, slots = some(1)
    restore = server.pipeline.start(pages, slots)
    for _ in range(RUN_AHEAD):
        assert copied.acquire(timeout=240)
    assert not copied.acquire(timeout=0.05)
    gate.set()
    restore.wait_for_layer(7)
    server.assert_restored(7, pages.tolist(), slots)


def test_segments_of_kv_do_not_wait_for_projections() -> None:
    server = Server(["kv", "kv", "hidden"])
    gate = threading.Event()
    pages, slots = some(2)
    server.before_filling(2, gate.wait)
    restore = server.pipeline.start(pages, slots)
    restore.wait_for_layer(1)
    assert not restore.layers[2].query()
    gate.set()
    restore.wait_for_layer(2)
    server.assert_restored(2, pages.tolist(), slots)


def test_layers_that_are_somebody_elses_are_left_alone() -> None:
    server = Server(["hidden", "hidden", "kv", "hidden"])
    pipeline = without_first_layer(server)
    pages, slots = some(3)
    restore = pipeline.start(pages, slots, first_layer=2)
    restore.wait()
    for layer in (2, 3):
        server.assert_restored(layer, pages.tolist(), slots)
    assert server.k[:2].isnan().all()
    assert len(restore.layers) == 4


def test_waiting_for_a_restore_is_waiting_for_every_layer() -> None:
    server, gate = Server(["kv", "hidden", "kv"]), threading.Event()
    server.before_filling(1, gate.wait)
    pages, slots = some(2)
    restore = server.pipeline.start(pages, slots)
    threading.Timer(0.05, gate.set).start()
    restore.wait()
    for layer in range(3):
        server.assert_restored(layer, pages.tolist(), slots)


def test_a_restore_right_behind_another_does_not_disturb_it() -> None:
    server, rng = Server(chunk_tokens=2 * SIZE), random.Random(2)
    started = []
    for seed in range(12):
        pages, _ = some(rng.choice([1, 2, 5]), seed)
        slots = torch.arange(len(pages) * SIZE) + seed * 5 * SIZE % (SLOTS - 5 * SIZE)
        started.append((server.pipeline.start(pages, slots), pages, slots))
    for restore, *_ in started:
        restore.wait()  # K and V of the last layer do not wait for projections before
    seen = torch.zeros(SLOTS, dtype=torch.bool)
    for _, pages, slots in reversed(started):  # the last one to write a slot has it
        if not seen[slots].any():
            for layer in range(5):
                server.assert_restored(layer, pages.tolist(), slots)
        seen[slots] = True


def test_random_delays_and_a_poisoned_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, run = random.Random(3), WorkerStream.run

    def late(self: WorkerStream, work: Callable[[], object]) -> None:
        pause = rng.choice([0, 0, 0.0005])
        run(self, lambda: (time.sleep(pause), work()))

    monkeypatch.setattr(WorkerStream, "run", late)
    server = Server(chunk_tokens=2 * SIZE)
    for seed in range(40):
        server.pipeline._ring._memory.fill_(0xEE)
        server.k.fill_(float("nan"))
        server.v.fill_(float("nan"))
        wait(server, *some(rng.choice([1, 3, 9]), seed))


def test_the_restore_waits_for_what_its_caller_waited_for() -> None:
    server = Server(["hidden"])
    engine, gate = new_stream("cpu", "engine"), threading.Event()
    engine.run(gate.wait)
    pages, slots = some(2)
    with engine.as_current():
        restore = server.pipeline.start(pages, slots)
    time.sleep(0.05)
    assert not restore.layers[0].query()
    assert not server.calls
    gate.set()
    restore.wait_for_layer(0)


def test_a_projection_that_fails_reaches_whoever_waits_for_the_layer() -> None:
    server = Server(["hidden", "hidden"])

    def fail() -> None:
        raise RuntimeError("no such weights")

    server.before_filling(1, fail)
    restore = server.pipeline.start(*some(1))
    restore.wait_for_layer(0)
    with pytest.raises(StreamFailed, match="no such weights"):
        restore.wait_for_layer(1)


def test_reports_say_what_each_stream_did() -> None:
    server = Server()
    pages, slots = some(3)
    assert server.pipeline.finished() == []
    wait(server, pages, slots)
    (report,) = server.pipeline.finished()
    assert report.tokens == 3 * SIZE
    assert sum(report.bytes.values()) == 3 * sum(server.layout.segment_bytes)
    assert report.bytes["kv"] == 3 * 2 * server.layout.segment_bytes[1]
    copied = [span.layer for span in report.spans if span.stream == "copy"]
    projected = [span.layer for span in report.spans if span.stream == "compute"]
    assert copied == list(range(5))
    assert projected == [0, 2, 3]
    assert report.busy_ms("copy") + report.idle_ms("copy") == pytest.approx(report.total_ms)
    assert server.pipeline.finished() == []


def test_device_memory_is_bounded_by_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(chunk_tokens=2 * SIZE)
    largest = server.layout.segment_bytes[0]  # of hidden states: K and V go past the ring
    assert ring_bytes(server.layout, 2 * SIZE, [0]) == RUN_AHEAD * 2 * largest
    assert server.pipeline._ring._memory.nbytes == RUN_AHEAD * 2 * largest
    wait(server, *some(PAGES))
    hidden = [tokens for layer, tokens in server.calls if server.methods[layer] == "hidden"]
    assert max(hidden) == 2 * SIZE
