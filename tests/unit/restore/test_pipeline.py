"""The restore pipeline: right whatever the streams do, and as far ahead as its ring allows."""

import random
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hcache_backend.restore import layers, pipeline
from hcache_backend.restore.layers import Recompute
from hcache_backend.restore.report import RunningRestore
from hcache_backend.restore.ring import RUN_AHEAD, Ring, ring_bytes
from hcache_backend.streams import Event, Stream, StreamFailed, WorkerStream, new_stream
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
def test_every_layer_of_every_page_comes_back_and_nothing_else_is_written(
    pages: int, chunk_tokens: int
) -> None:
    server, (chosen, slots) = Server(chunk_tokens=chunk_tokens), some(pages)
    wait(server, chosen, slots)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert server.k[:, others].isnan().all() and server.v[:, others].isnan().all()
    if chunk_tokens == 1024:  # all of a layer at once
        assert sorted(server.calls) == [(layer, pages * SIZE) for layer in range(5)]


@pytest.mark.parametrize("pages", [1, 2, 7, PAGES])
def test_projection_begins_when_a_piece_of_the_first_layer_is_there(
    pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "FIRST_PIECE_TOKENS", 2 * SIZE)
    server, (chosen, slots) = Server(["hidden"] * 3), some(pages)
    wait(server, chosen, slots)
    piece = max(2, -(-pages // 4))
    pieces = [min(piece, pages - start) * SIZE for start in range(0, pages, piece)]
    assert server.calls == [*((0, n) for n in pieces), (1, pages * SIZE), (2, pages * SIZE)]
    # Others wait for the first layers anyway.
    server.calls.clear()
    nothing = recompute(1, slots, lambda: None)
    server.pipeline.start(chosen, slots, nothing).wait()
    assert server.calls == [(1, pages * SIZE), (2, pages * SIZE)]


def test_copies_run_ahead_of_a_stalled_projection_until_the_ring_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One page a chunk: the ring holds RUN_AHEAD segments of exactly this restore.
    server, gate = Server(["hidden"] * 8, chunk_tokens=SIZE), threading.Event()
    copied, gather = threading.Semaphore(0), pipeline.gather_pages

    def counted(*pages: Any, **out: Any) -> None:
        gather(*pages, **out)
        copied.release()

    monkeypatch.setattr(pipeline, "gather_pages", counted)
    for layer in range(8):
        server.before_filling(layer, gate.wait)
    pages, slots = some(1)
    restore = server.pipeline.start(pages, slots)
    for _ in range(RUN_AHEAD):
        assert copied.acquire(timeout=240)
    assert not copied.acquire(timeout=0.05)
    gate.set()
    server.assert_whole(restore, pages, slots)


def test_segments_of_kv_do_not_wait_for_projections() -> None:
    server, gate = Server(["kv", "kv", "hidden"]), threading.Event()
    pages, slots = some(2)
    server.before_filling(2, gate.wait)
    restore = server.pipeline.start(pages, slots)
    restore.wait_for_layer(1)
    assert not restore.layers[2].query()
    gate.set()
    server.assert_whole(restore, pages, slots)


def test_layers_that_are_somebody_elses_are_left_alone() -> None:
    server = Server(["hidden", "hidden", "kv", "hidden"])
    pipeline = without_first_layer(server)
    pages, slots = some(3)
    restore = pipeline.start(pages, slots, first_layer=2)
    server.assert_whole(restore, pages, slots, first=2)
    assert server.k[:2].isnan().all()
    assert len(restore.layers) == 4


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
    for restore, pages, slots in reversed(started):  # the last one to write a slot has it
        if not seen[slots].any():
            server.assert_whole(restore, pages, slots)
        seen[slots] = True


def test_the_restore_waits_for_what_its_caller_waited_for() -> None:
    server, gate = Server(["hidden"]), threading.Event()
    engine = new_stream("cpu", "engine")
    engine.run(gate.wait)
    with engine.as_current():
        restore = server.pipeline.start(*some(2))
    time.sleep(0.05)
    assert not restore.layers[0].query() and not server.calls
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


def test_what_was_launched_of_a_restore_that_raises_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first layer; there is no memory for the second one."""
    server, gate, (pages, slots) = Server(["kv", "hidden"]), threading.Event(), some(2)
    server.pipeline._copy.run(partial(gate.wait, 240))

    def full(ring: Ring, stream: Stream) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Ring, "next", full)
        with pytest.raises(torch.OutOfMemoryError):
            server.pipeline.start(pages, slots, ahead=True)
    restore = server.pipeline.failed_restore(len(slots))
    assert restore.failed is not None and not restore.copied.query() and not restore.done()
    gate.set()
    restore.wait()
    assert restore.copied.query()
    server.assert_restored(0, pages.tolist(), slots)
    wait(server, *some(3))


def test_reports_say_what_each_stream_did() -> None:
    server = Server()
    wait(server, *some(3))
    (report,) = server.pipeline.take_finished()
    assert report.tokens == 3 * SIZE
    assert sum(report.bytes.values()) == 3 * sum(server.layout.segment_bytes)
    assert report.bytes["kv"] == 3 * 2 * server.layout.segment_bytes[1]
    assert [span.layer for span in report.spans if span.stream == "copy"] == [*range(5)]
    assert [span.layer for span in report.spans if span.stream == "compute"] == [0, 2, 3]
    assert report.busy_ms("copy") + report.idle_ms("copy") == pytest.approx(report.total_ms)
    assert server.pipeline.take_finished() == []


def test_device_memory_is_bounded_by_the_chunk() -> None:
    server = Server(chunk_tokens=2 * SIZE)
    largest = server.layout.segment_bytes[0]  # of hidden states: K and V go past the ring
    assert ring_bytes(server.layout, 2 * SIZE, [range(1)]) == RUN_AHEAD * 2 * largest
    assert server.pipeline._ring._memory.nbytes == RUN_AHEAD * 2 * largest
    wait(server, *some(PAGES))
    hidden = [tokens for layer, tokens in server.calls if server.methods[layer] == "hidden"]
    assert max(hidden) == 2 * SIZE


# ---- first layers are recomputed while segments of later ones arrive ----


@pytest.mark.parametrize("first", [1, 2, 3])
def test_recomputed_layers_take_no_copy_and_come_before_projections(first: int) -> None:
    server, calls = Server(["hidden", "hidden", "kv", "hidden"]), []
    pipeline = without_first_layer(server)
    pages, slots = some(2)

    def fill() -> None:
        assert not server.calls or server.methods[server.calls[0][0]] == "kv"
        calls.append(first)

    restore = pipeline.start(pages, slots, recompute(first, slots, fill))
    assert restore.failed is None
    server.assert_whole(restore, pages, slots, first)
    assert calls == [first]
    (report,) = pipeline.take_finished()
    copied = {span.layer for span in report.spans if span.stream == "copy"}
    assert copied == set(range(first, 4))
    lengths = zip(server.methods[first:], pipeline._layout.segment_bytes[first:], strict=True)
    assert sum(report.bytes.values()) == 2 * sum(length for _, length in lengths)


def test_layers_of_which_nothing_is_stored_must_be_recomputed() -> None:
    pipeline = without_first_layer(Server())
    with pytest.raises(ValueError, match="layers after the first 0 are not stored"):
        pipeline.start(*some(1))


def test_a_restore_may_have_nothing_to_do_but_to_recompute() -> None:
    server, calls = Server(["hidden"] * 3), []
    first = recompute(2, some(1)[1], lambda: calls.append(2))
    nothing = torch.empty(0, dtype=torch.int64)
    restore = server.pipeline.start(nothing.numpy(), nothing, first)
    restore.wait()
    assert (calls, server.calls, len(restore.layers)) == ([2], [], 3)
    (report,) = server.pipeline.take_finished()
    assert report.tokens == 0


def test_recomputation_is_in_turn_with_forward_passes_and_copies_are_beside_it() -> None:
    server, forward, order = Server(["hidden", "kv", "kv"]), WorkerStream("forward"), []
    gate = threading.Event()
    pages, slots = some(1)

    forward.run(partial(gate.wait, 240))
    forward.run(lambda: order.append("forward pass"))
    first = Recompute(1, slots, lambda: order.append(threading.current_thread().name), forward)
    restore = server.pipeline.start(pages, slots, first)
    forward.run(lambda: order.append("next forward pass"))
    assert passed(restore.layers[2])  # copied while a forward pass runs
    server.assert_restored(2, pages.tolist(), slots)
    assert order == []
    gate.set()
    restore.layers[0].synchronize()
    forward.record().synchronize()
    assert restore.failed is None
    assert order == ["forward pass", "hcache-forward", "next forward pass"]


def passed(event: Event) -> bool:
    until = time.monotonic() + 240
    while not event.query() and time.monotonic() < until:
        time.sleep(0.001)
    return event.query()


@pytest.mark.parametrize("methods", [["hidden"] * 3, ["hidden", "kv", "kv"]])
def test_copies_of_others_do_not_wait_for_a_recomputation(methods: list[str]) -> None:
    server, forward, gate = Server(methods), WorkerStream("forward"), threading.Event()
    pages, slots = some(4)
    forward.run(partial(gate.wait, 240))
    first, others = slots.split(2 * SIZE)
    recomputed = Recompute(1, first, lambda: None, forward)
    waiting = server.pipeline.start(pages[:2], first, recomputed)
    beside = server.pipeline.start(pages[2:], others)
    assert passed(waiting.copied) and passed(beside.copied)
    assert not waiting.layers[0].query()
    waiting.wait_until_copied()  # as who writes to host pages next
    gate.set()
    for restore, part in ((waiting, slice(2)), (beside, slice(2, 4))):
        server.assert_whole(restore, pages[part], slots.view(-1, SIZE)[part].flatten(), first=1)


def test_a_recomputation_does_not_wait_for_copies_of_layers_above_it() -> None:
    server, forward, gate = Server(["hidden"] * 3), WorkerStream("forward"), threading.Event()
    pages, slots = some(3)
    server.before_filling(1, partial(gate.wait, 240))
    first, last = slots[: 2 * SIZE], slots[2 * SIZE :]
    above = server.pipeline.start(pages[:2], first, first_layer=1)
    behind = server.pipeline.start(pages[2:], last, Recompute(1, last, lambda: None, forward))
    assert passed(behind.layers[0])
    assert not above.layers[1].query()
    gate.set()
    behind.wait()


def test_a_slice_waits_for_pages_restored_ahead_once_they_were_handed_out() -> None:
    server, forward, gate = Server(["hidden"] * 3), WorkerStream("forward"), threading.Event()
    pages, slots = some(3)
    parts = slots.split(SIZE)

    def slice_of(part: int) -> RunningRestore:
        return server.pipeline.start_recomputation(Recompute(3, parts[part], lambda: None, forward))

    server.pipeline.start(pages[:1], parts[0]).wait()
    server.before_filling(1, partial(gate.wait, 240))
    back = server.pipeline.start(pages[1:2], parts[1], ahead=True)
    beside = slice_of(2)
    assert passed(beside.layers[-1]) and not back.layers[1].query()
    server.pipeline.mark_handed_out()
    behind = slice_of(0)
    time.sleep(0.05)
    assert not behind.layers[-1].query()
    gate.set()
    behind.wait()
    assert back.done()


def test_a_recomputation_that_fails_is_told_and_the_other_layers_come() -> None:
    server = Server(["hidden", "hidden", "kv"])
    pages, slots = some(2)

    def fail() -> None:
        raise RuntimeError("out of memory")

    restore = server.pipeline.start(pages, slots, recompute(1, slots, fail))
    assert str(restore.failed) == "out of memory"
    server.assert_whole(restore, pages, slots, first=1)
    wait(server, pages, slots)  # the next restore is as good as any


def test_a_recomputation_sees_what_the_restore_before_it_wrote() -> None:
    server = Server(["hidden"] * 3)
    pages, slots = np.array([0, 1]), torch.arange(2 * SIZE)
    server.before_filling(1, lambda: time.sleep(0.1))
    server.pipeline.start(pages, slots)

    def fill() -> None:
        for layer in range(3):
            server.assert_restored(layer, pages.tolist(), slots)

    others = torch.arange(40, 40 + SIZE)
    behind = server.pipeline.start(np.array([2]), others, recompute(3, others, fill))
    assert behind.failed is None


RING = 24


class Use(Event):
    """The end of a projection that uses some bytes."""

    def __init__(self, part: torch.Tensor) -> None:
        self.bytes = set(range(part.storage_offset(), part.storage_offset() + len(part)))


class Copies:
    """Notes what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def wait(self, event: Event) -> None:
        self.waited.append(event)


RESTORES = st.lists(
    st.tuples(st.integers(1, RING), st.lists(st.booleans(), max_size=12), st.booleans()), max_size=8
)
"""Bytes of a part; for each step whether a part is taken or one is given to a projection; whether
the last part taken stays without one."""


@given(RESTORES)
def test_who_takes_a_part_waits_for_those_that_use_its_memory_and_nobody_else(
    restores: list[tuple[int, list[bool], bool]],
) -> None:
    ring, copies = Ring(torch.zeros(RING, dtype=torch.uint8)), Copies()
    users: dict[int, Use] = {}  # of each byte, the last one
    for part_bytes, steps, passes in restores:
        parts = ring.begin(part_bytes)
        assert parts == RING // part_bytes
        held: list[torch.Tensor] = []
        for takes in steps:
            if takes and len(held) < parts:
                copies.waited.clear()
                part = ring.next(copies)
                assert len(part) == part_bytes
                use = Use(part)
                assert not any(use.bytes & Use(other).bytes for other in held), "still held"
                due = {id(users[byte]) for byte in use.bytes if byte in users}
                assert {id(event) for event in copies.waited} == due
                for byte in use.bytes:  # whoever comes next is behind this copy
                    users.pop(byte, None)
                held.append(part)
            elif held and not takes:
                use = Use(held.pop(0))
                ring.mark_used(use)
                users.update(dict.fromkeys(use.bytes, use))
        while held and not passes:
            use = Use(held.pop(0))
            ring.mark_used(use)
            users.update(dict.fromkeys(use.bytes, use))


def test_parts_go_round_from_where_the_restore_before_ended() -> None:
    ring, copies = Ring(torch.zeros(RING, dtype=torch.uint8)), Copies()
    starts = []
    for part_bytes, taken in ((6, 1), (6, 2), (12, 1), (5, 5)):
        ring.begin(part_bytes)
        starts.append([ring.next(copies).storage_offset() for _ in range(taken)])
    assert starts == [[0], [6, 12], [0], [15, 0, 5, 10, 15]]
