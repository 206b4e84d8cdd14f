"""The restore pipeline: right whatever the streams do, and as far ahead as its ring allows."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from hcache_backend.page import PageLayout
from hcache_backend.restore import pipeline
from hcache_backend.restore.pipeline import Recompute, RestoredLayer, RestorePipeline
from hcache_backend.restore.ring import RUN_AHEAD, ring_bytes
from hcache_backend.streams import StreamFailed, WorkerStream, current_is, new_stream

SIZE, WIDTH, PAGES, SLOTS = 4, 6, 20, 160
METHODS = ("hidden", "kv", "hidden", "hidden", "kv")


class Server:
    """Pages with random content, a pool that starts poisoned, and a pipeline between them."""

    def __init__(self, methods: Sequence[str] = METHODS, chunk_tokens: int = 1024) -> None:
        row = 4 * WIDTH
        segments = tuple(SIZE * row * (2 if method == "kv" else 1) for method in methods)
        self.layout = PageLayout(SIZE, segments)
        self.memory = torch.zeros((PAGES, self.layout.page_bytes), dtype=torch.uint8)
        self.methods = methods
        for page in range(PAGES):
            for layer in range(len(methods)):
                values = torch.randn(segments[layer] // 4)
                self.memory[page, self.layout.segment(layer)] = values.view(torch.uint8)
            self.layout.positions(self.memory.numpy())[page] = np.arange(SIZE) + 1000 * page
        self.k = torch.full((len(methods), SLOTS, WIDTH), float("nan"))
        self.v = torch.full((len(methods), SLOTS, WIDTH), float("nan"))
        self.calls: list[tuple[int, int]] = []  # layer, tokens
        layers = [RestoredLayer(method, self.fill(i)) for i, method in enumerate(methods)]
        self.pipeline = RestorePipeline(self.memory, self.layout, layers, chunk_tokens, "cpu")

    def fill(self, layer: int) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
        def hidden(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            rows = segments.view(torch.float32).view(-1, WIDTH)
            self.k[layer, slots] = rows + positions[:, None]
            self.v[layer, slots] = rows * 2
            self.calls.append((layer, len(slots)))

        def kv(segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
            k, v = segments.view(torch.float32).view(-1, 2, SIZE, WIDTH).unbind(1)
            self.k[layer, slots] = k.reshape(-1, WIDTH)
            self.v[layer, slots] = v.reshape(-1, WIDTH)
            self.calls.append((layer, len(slots)))

        return hidden if self.methods[layer] == "hidden" else kv

    def assert_restored(self, layer: int, pages: Sequence[int], slots: torch.Tensor) -> None:
        for page, at in zip(pages, slots.view(-1, SIZE), strict=True):
            segment = self.memory[page, self.layout.segment(layer)].clone().view(torch.float32)
            if self.methods[layer] == "kv":
                want_k, want_v = segment.view(2, SIZE, WIDTH)
            else:
                rows = segment.view(SIZE, WIDTH)
                want_k = rows + (torch.arange(SIZE)[:, None] + 1000 * page)
                want_v = rows * 2
            assert torch.equal(self.k[layer, at], want_k), (layer, page)
            assert torch.equal(self.v[layer, at], want_v), (layer, page)


def some(pages: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor]:
    """Pages in any order, and as many slots, in any order too."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(PAGES)[:pages].astype(np.int64)
    return chosen, torch.from_numpy(rng.permutation(SLOTS)[: pages * SIZE])


def wait(server: Server, pages: np.ndarray, slots: torch.Tensor) -> None:
    restore = server.pipeline.start(pages, slots)
    for layer in range(len(server.methods)):
        restore.wait_for_layer(layer)
        server.assert_restored(layer, pages.tolist(), slots)


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


def test_many_pages_are_one_copy_and_one_projection_a_layer() -> None:
    server = Server()
    wait(server, *some(PAGES))
    assert sorted(server.calls) == [(layer, PAGES * SIZE) for layer in range(5)]


@pytest.mark.parametrize("pages", [1, 2, 7, PAGES])
def test_projection_begins_when_a_piece_of_the_first_layer_is_there(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "FIRST_PIECE_TOKENS", 2 * SIZE)
    server, (chosen, slots) = Server(["hidden"] * 3), some(pages)
    wait(server, chosen, slots)
    piece = max(2, -(-pages // 4))
    pieces = [min(piece, pages - start) * SIZE for start in range(0, pages, piece)]
    assert server.calls == [*((0, n) for n in pieces), (1, pages * SIZE), (2, pages * SIZE)]
    # Others wait for the first layers anyway.
    server.calls.clear()
    recompute = Recompute(1, lambda positions, slots: None)
    server.pipeline.start(chosen, slots, recompute).wait()
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
    server.pipeline._layers = [
        RestoredLayer("hidden", lambda *parts, fill=layer.fill: (gate.wait(), fill(*parts)))
        for layer in server.pipeline._layers
    ]
    pages, slots = some(1)
    restore = server.pipeline.start(pages, slots)
    for _ in range(RUN_AHEAD):
        assert copied.acquire(timeout=10)
    assert not copied.acquire(timeout=0.05)
    gate.set()
    restore.wait_for_layer(7)
    server.assert_restored(7, pages.tolist(), slots)


def test_segments_of_kv_do_not_wait_for_projections() -> None:
    server = Server(["kv", "kv", "hidden"])
    gate = threading.Event()
    pages, slots = some(2)
    projected = server.pipeline._layers[2]
    server.pipeline._layers = [
        *server.pipeline._layers[:2],
        RestoredLayer("hidden", lambda *a: (gate.wait(), projected.fill(*a))),
    ]
    restore = server.pipeline.start(pages, slots)
    restore.wait_for_layer(1)
    assert not restore.layers[2].query()
    gate.set()
    restore.wait_for_layer(2)
    server.assert_restored(2, pages.tolist(), slots)


def without_first_layer(server: Server) -> RestorePipeline:
    """The server's pages as if nothing were stored of layer 0."""
    layout = PageLayout(SIZE, (0, *server.layout.segment_bytes[1:]))
    memory = torch.zeros((PAGES, layout.page_bytes), dtype=torch.uint8)
    memory[:, layout.header_bytes :] = server.memory[:, server.layout.segment(1).start :]
    layout.positions(memory.numpy())[:] = server.layout.positions(server.memory.numpy())
    layers = [RestoredLayer("recompute", None), *server.pipeline._layers[1:]]
    return RestorePipeline(memory, layout, layers, SIZE, "cpu")  # one page a chunk


@pytest.mark.parametrize("first", [1, 2, 3])
def test_recomputed_layers_take_no_copy_and_come_before_projections(first: int) -> None:
    server, calls = Server(["hidden", "hidden", "kv", "hidden"]), []
    pipeline = without_first_layer(server)
    pages, slots = some(2)

    def fill(positions: torch.Tensor, where: torch.Tensor) -> None:
        assert not server.calls or server.methods[server.calls[0][0]] == "kv"
        calls.append((positions.tolist(), where.tolist()))

    restore = pipeline.start(pages, slots, Recompute(first, fill))
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

    def fill(positions: torch.Tensor, where: torch.Tensor) -> None:
        # KV does not go through the compute stream, which waits for this.
        until = time.monotonic() + 10
        while server.k[2, slots].isnan().any() and time.monotonic() < until:
            time.sleep(0.001)
        server.assert_restored(2, pages.tolist(), slots)

    restore = pipeline.start(pages, slots, Recompute(1, fill))
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

    def fill(positions: torch.Tensor, where: torch.Tensor) -> None:
        # The last layer has arrived although nothing was projected yet.
        until = time.monotonic() + 10
        while server.k[8, slots].isnan().any() and time.monotonic() < until:
            time.sleep(0.001)
        server.assert_restored(8, chosen.tolist(), slots)
        assert {layer for layer, _ in server.calls} == {6, 8}
        arrived.set()

    restore = server.pipeline.start(chosen, slots, Recompute(1, fill))
    for layer in range(1, len(methods)):
        restore.wait_for_layer(layer)
        server.assert_restored(layer, chosen.tolist(), slots)
    assert arrived.is_set()
    assert [parked.puts for parked in parking] == [parked.takes for parked in parking]
    assert sum(parked.puts for parked in parking) > 0


def test_segments_wait_for_room_where_they_cannot_be_parked() -> None:
    server = Server(["hidden"] * 6, chunk_tokens=2 * SIZE)
    chosen, slots = some(2)
    restore = server.pipeline.start(chosen, slots, Recompute(1, lambda *_: time.sleep(0.05)))
    for layer in range(1, 6):
        restore.wait_for_layer(layer)
        server.assert_restored(layer, chosen.tolist(), slots)


def test_layers_of_which_nothing_is_stored_must_be_recomputed() -> None:
    pipeline = without_first_layer(Server())
    with pytest.raises(ValueError, match="layers after the first 0 are not stored"):
        pipeline.start(*some(1))


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
    slow = server.pipeline._layers[1].fill
    assert slow is not None
    server.pipeline._layers = [
        server.pipeline._layers[0],
        RestoredLayer("hidden", lambda *a: (gate.wait(), slow(*a))),
        server.pipeline._layers[2],
    ]
    pages, slots = some(2)
    restore = server.pipeline.start(pages, slots)
    threading.Timer(0.05, gate.set).start()
    restore.wait()
    for layer in range(3):
        server.assert_restored(layer, pages.tolist(), slots)


def test_a_restore_may_have_nothing_to_do_but_to_recompute() -> None:
    server, calls = Server(["hidden"] * 3), []
    restore = server.pipeline.start(
        np.empty(0, np.int64),
        torch.empty(0, dtype=torch.int64),
        Recompute(2, lambda positions, slots: calls.append(len(slots))),
    )
    restore.wait()
    assert (calls, server.calls) == ([0], [])
    assert len(restore.layers) == 3
    (report,) = server.pipeline.finished()
    assert report.tokens == 0


def test_a_recomputation_sees_what_the_restore_before_it_wrote() -> None:
    server = Server(["hidden"] * 3)
    first_pages, first_slots = np.array([0, 1]), torch.arange(2 * SIZE)
    slow = server.pipeline._layers[1].fill
    assert slow is not None
    server.pipeline._layers = [
        server.pipeline._layers[0],
        RestoredLayer("hidden", lambda *a: (time.sleep(0.1), slow(*a))),
        server.pipeline._layers[2],
    ]
    server.pipeline.start(first_pages, first_slots)

    def fill(positions: torch.Tensor, where: torch.Tensor) -> None:
        for layer in range(3):
            server.assert_restored(layer, first_pages.tolist(), first_slots)

    server.pipeline.start(np.array([2]), torch.arange(40, 40 + SIZE), Recompute(1, fill))


def test_a_restore_right_behind_another_does_not_disturb_it() -> None:
    server, rng = Server(chunk_tokens=2 * SIZE), random.Random(2)
    started = []
    for seed in range(12):
        pages, _ = some(rng.choice([1, 2, 5]), seed)
        slots = torch.arange(len(pages) * SIZE) + seed * 5 * SIZE % (SLOTS - 5 * SIZE)
        started.append((server.pipeline.start(pages, slots), pages, slots))
    for restore, *_ in started:
        restore.wait_for_layer(4)
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
        server.pipeline._ring.fill_(0xEE)
        server.k.fill_(float("nan"))
        server.v.fill_(float("nan"))
        wait(server, *some(rng.choice([1, 3, 9]), seed))


def test_the_restore_waits_for_what_its_caller_waited_for() -> None:
    server = Server(["hidden"])
    engine, gate = new_stream("cpu", "engine"), threading.Event()
    engine.run(gate.wait)
    pages, slots = some(2)
    with current_is(engine):
        restore = server.pipeline.start(pages, slots)
    time.sleep(0.05)
    assert not restore.layers[0].query()
    assert not server.calls
    gate.set()
    restore.wait_for_layer(0)


def test_a_projection_that_fails_reaches_whoever_waits_for_the_layer() -> None:
    server = Server(["hidden", "hidden"])

    def fail(*args: torch.Tensor) -> None:
        raise RuntimeError("no such weights")

    server.pipeline._layers = [server.pipeline._layers[0], RestoredLayer("hidden", fail)]
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
    largest = max(server.layout.segment_bytes)
    assert ring_bytes(server.layout, 2 * SIZE, [0]) == RUN_AHEAD * 2 * largest
    assert server.pipeline._ring.nbytes == RUN_AHEAD * 2 * largest
    wait(server, *some(PAGES))
    assert max(tokens for _, tokens in server.calls) == 2 * SIZE
