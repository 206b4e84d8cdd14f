"""Stage one and stage two with real overlap, and what the arena hears of them."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend import streams
from hcache_backend.capture import staging
from hcache_backend.streams import StreamFailed, WorkerStream, host_tensor
from hcache_kernels.codecs import make_codec
from hcache_kernels.staging import WRONG_STEP, stage_rows
from tests.unit.capture.machine import (
    CAPACITY,
    DEVICE_PAGES,
    LAYERS,
    LAYOUT,
    SIZE,
    WIDTH,
    Machine,
    slots,
)


def test_a_backup_copies_nothing_and_later_rows_go_to_the_new_shadow(machine: Machine) -> None:
    where = slots(1, 2)
    assert machine.forward(where)
    machine.settle()
    filled = machine.arena.shadows[[1, 2]]
    machine.capture.back_up(np.array(where), np.array([3, 0]))
    kept = machine.arena.memory[filled, LAYOUT.header_bytes :].copy()
    assert machine.forward(where)
    machine.assert_captured(where)
    assert np.array_equal(machine.arena.memory[filled, LAYOUT.header_bytes :], kept)


def test_a_backup_before_the_transfer_gets_the_rows_all_the_same(machine: Machine) -> None:
    gate = machine.hold_transfers()
    where = slots(1)
    assert machine.forward(where)
    machine.capture.ledger.settle()
    assert machine.arena.problem(np.array(where)) is None
    machine.capture.back_up(np.array(where), np.array([0]))
    [page] = machine.arena.pages(np.array([0]))
    assert machine.arena.usable(np.array([0])) is None
    gate.set()
    machine.settle()
    assert machine.arena.usable(np.array([0]))
    for layer in range(LAYERS):
        got = page[LAYOUT.segment(layer)].view(np.float32).reshape(SIZE, WIDTH)
        assert np.array_equal(got, np.stack([machine.rows[slot][layer] for slot in where]))


def test_a_stalled_writer_holds_up_neither_the_cpu_nor_the_forward_pass(
    device: WorkerStream, machine: Machine
) -> None:
    gate = machine.hold_transfers()
    for step in range(3):  # as many tokens as staging has rows
        assert machine.forward(slots(step))
    device.record().synchronize()  # the forward passes are done
    assert machine.capture.waits_for_staging == 0
    assert machine.forward(slots(4))  # staging is full: the CPU goes on all the same ...
    assert machine.capture.waits_for_staging == 1
    blocked = device.record()
    machine.capture.ledger.settle(wait=False)
    assert not blocked.query()  # ... and the device's stream is what waits
    gate.set()
    blocked.synchronize()
    machine.assert_captured(slots(0, 1, 2, 4))


def test_a_short_step_moves_layer_by_layer_where_it_is_told_to(machine: Machine) -> None:
    machine.capture.most_at_once = SIZE - 1
    assert machine.forward(slots(1))
    assert machine.capture._ring is not None
    machine.assert_captured(slots(1))


def test_long_steps_in_a_row_wait_only_for_the_parts_that_they_use(machine: Machine) -> None:
    long, others = slots(1, 2, 3, 4), slots(5, 6, 7, 8)
    capture, gates, waits = machine.capture, [], []

    def hold_the_last_layer(layer: int) -> None:
        if layer == LAYERS - 1:
            capture.transfers().synchronize()
            gates.append(machine.hold_transfers())

    assert machine.forward(long, before=hold_the_last_layer)
    assert machine.forward(others, before=lambda _: waits.append(capture.waits_for_staging))
    assert waits[1] == 0 < capture.waits_for_staging
    gates[0].set()
    machine.assert_captured([*long, *others])


def test_a_step_longer_than_staging_is_not_captured(machine: Machine) -> None:
    assert not machine.forward(list(range(DEVICE_PAGES * SIZE)))
    machine.settle()
    assert not machine.arena._rows.any()
    assert machine.forward(slots(5))
    machine.assert_captured(slots(5))


@pytest.mark.parametrize("pages", [1, 4])
def test_a_layer_that_was_not_seen_leaves_the_rows_void(machine: Machine, pages: int) -> None:
    where = slots(*range(pages))
    assert machine.forward(where)
    assert not machine.forward(where, layers=LAYERS - 1)
    machine.settle()
    assert not machine.arena._rows.any()


def test_a_replay_that_recorded_no_copy_of_a_layer_proves_nothing(machine: Machine) -> None:
    assert machine.forward(slots(1), replay=4)
    assert machine.forward(slots(2), replay=4, layers=LAYERS - 1)
    machine.assert_captured(slots(1))
    assert not machine.arena._rows[slots(2)].any()
    assert machine.capture.ledger.missing_tokens == SIZE


def test_step_numbers_that_begin_anew_believe_no_earlier_marks(machine: Machine) -> None:
    """As after the check at the start, which captures with the staging of the server."""
    assert machine.forward(slots(1), replay=4)
    machine.settle()
    machine.staging.forget_marks()
    trial = machine.capture
    parts = trial.arena, trial.memory, machine.staging, range(LAYERS), trial.codec
    machine.capture = staging.StagedCapture(*parts)
    assert machine.forward(slots(2), replay=4, layers=LAYERS - 1)
    machine.settle()
    assert not machine.arena._rows[slots(2)].any()


def test_hidden_states_of_another_type_are_not_captured(machine: Machine) -> None:
    rows = torch.randn(LAYERS, SIZE, WIDTH, dtype=torch.float64)
    assert not machine.forward(slots(1), rows=rows)


def test_the_scheduler_does_not_wait_for_slots(device: WorkerStream, machine: Machine) -> None:
    """Those of a step are on the device: what is known without them is applied."""
    gate = threading.Event()
    device.run(gate.wait)
    assert machine.forward(slots(1))
    machine.capture.settle()  # before the gate opens: otherwise the test hangs here
    assert not machine.arena._rows.any()
    gate.set()
    machine.assert_captured(slots(1))


def test_a_step_that_cannot_begin_is_lost_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, perhaps; the graph that is replayed all the same spoils no other step."""
    gate = machine.hold_transfers()
    assert machine.forward(slots(1), replay=4)
    machine.capture.ledger.note_not_captured(torch.tensor(slots(2)))

    def no_memory() -> None:
        raise torch.OutOfMemoryError("a test")

    with monkeypatch.context() as patched:
        patched.setattr(machine.capture.ledger, "copy_wanted", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            machine.capture.begin(*[torch.tensor(slots(2))] * 3)
        machine.capture.give_up_step()
    machine.overwrite()
    gate.set()
    machine.assert_captured(slots(1))
    assert machine.forward(slots(3))


def test_a_replay_that_is_not_captured_leaves_the_memory_of_a_long_step_alone(
    machine: Machine,
) -> None:
    gate = machine.hold_transfers()
    long = slots(1, 2, 3, 4)[: CAPACITY + 1]
    assert machine.forward(long)
    machine.capture.skip()
    machine.overwrite()
    time.sleep(0.05)  # the device does what it may do by now
    gate.set()
    machine.assert_captured(long)


def test_a_replay_leaves_memory_alone_that_was_given_back(machine: Machine) -> None:
    """Hidden mode may be refused behind the recording of graphs: their copies are replayed on."""
    before, targets = machine.staging.staged, machine.staging._now.targets
    rows, marks = before.rows.clone(), before.marks.clone()
    machine.staging.begin((torch.arange(3),) * 3, 1, range(3))(
        torch.empty((3, 3), dtype=torch.int64), torch.empty(9, dtype=torch.int64)
    )
    machine.staging.free()
    hidden = torch.full((3, WIDTH), 9.0).view(torch.uint8)
    stage_rows(hidden, targets[:3], torch.tensor([1]), before, 0)  # as it was recorded
    assert torch.equal(before.rows, rows)
    assert torch.equal(before.marks, marks)
    after = machine.staging.staged
    assert after.rows.nbytes == after.marks.nbytes == 0
    machine.staging.stage(0, torch.full((3, WIDTH), 9.0), 3)


@pytest.mark.parametrize("pages", [1, 4])
def test_rows_that_the_codec_cannot_hold_are_not_proven(device: WorkerStream, pages: int) -> None:
    machine = Machine(is_view=False)
    where = slots(*range(1, pages + 1))
    rows = torch.randn(LAYERS, len(where), WIDTH)
    rows[1, 2, 0] = float("nan")
    assert machine.forward(where, rows=rows)
    machine.settle()
    assert not machine.all_valid(where[2:3])
    assert machine.all_valid([*where[:2], *where[3:]])
    assert (machine.capture.ledger.missing_tokens, machine.capture.ledger.unfit_tokens) == (0, 1)


def test_slots_that_are_allocated_again_lose_rows_that_are_still_on_their_way(
    machine: Machine,
) -> None:
    gate = machine.hold_transfers()
    assert machine.forward(slots(1))
    machine.capture.ledger.note_allocated(torch.tensor(slots(1)[:1]))
    machine.capture.ledger.settle()
    gate.set()
    machine.settle()
    assert not machine.all_valid(slots(1)[:1])
    assert machine.all_valid(slots(1)[1:])


def test_a_transfer_that_fails_ends_capture_and_nothing_else(machine: Machine) -> None:
    def fail() -> None:
        raise OSError("no such memory")

    assert machine.forward(slots(1))
    machine.capture._transfer.run(fail)
    assert machine.forward(slots(2))
    with pytest.raises(StreamFailed, match="no such memory"):
        machine.capture.ledger._results[-1].done.synchronize()
    machine.capture.ledger.settle()
    assert machine.capture.ledger.broken == "capture broke: OSError: no such memory"
    assert not machine.arena._rows.any()
    assert not machine.forward(slots(3))


@pytest.mark.parametrize("rows_at_once", [1, 3, 4, 7, 8, 99])
def test_rows_are_encoded_in_parts_that_the_memory_has_room_for(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several layers together, or a part of the tokens of one, into the same memory."""
    codec = make_codec("exp4", 256, torch.bfloat16)
    values = torch.randn(3, 4, 256).bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, (256,), dtype=torch.int16)
    values[1, 2] = bits.view(torch.bfloat16)  # too many exponents
    want, marks = codec.encode(values.view(-1, 256))[0].view(3, 4, -1), torch.zeros(3, 4).long()
    monkeypatch.setattr(staging, "_AT_ONCE_BYTES", rows_at_once * 512)
    found = torch.zeros_like(want)
    for layers, tokens, rows in staging.stored_rows(codec, values.view(torch.uint8), marks):
        assert rows.shape[0] * rows.shape[1] <= rows_at_once
        found[layers, tokens] = rows
    assert marks.nonzero().tolist() == [[1, 2]] and marks[1, 2] == WRONG_STEP
    found[1, 2] = want[1, 2]
    assert torch.equal(found, want)


@pytest.mark.parametrize("is_view", [True, False])
def test_two_hundred_steps_with_random_delays_on_every_stream(
    is_view: bool, monkeypatch: pytest.MonkeyPatch, device: WorkerStream
) -> None:
    """Captured by Python and by replays that were recorded for more rows, and longer than staging's
    ring has rows."""
    rng, run = random.Random(1), WorkerStream.run

    def late(self: WorkerStream, work: Callable[[], object]) -> None:
        pause = rng.choice([0, 0, 0, 0.0005])
        run(self, lambda: (time.sleep(pause), work()))

    monkeypatch.setattr(WorkerStream, "run", late)
    machine = Machine(is_view=is_view)
    assert machine.capture.row_bytes == LAYERS * WIDTH * 4
    captured: set[int] = set()
    for _ in range(200):
        n = rng.choice([1, 1, 2, 3, 5, 8, 12, 16, 24])
        chosen = rng.sample(range(SIZE, DEVICE_PAGES * SIZE), n)
        replay = min(CAPACITY, n + rng.randrange(3)) if n <= CAPACITY and rng.random() < 0.5 else 0
        assert machine.forward(chosen, replay=replay)
        captured.update(chosen)
    machine.assert_captured(sorted(captured))
    assert machine.capture.ledger.missing_tokens == 0


def test_steps_allocate_no_pinned_memory_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, device: WorkerStream, machine: Machine
) -> None:
    made: list[torch.Tensor] = []

    def counted(*args: Any) -> torch.Tensor:
        made.append(host_tensor(*args))
        return made[-1]

    monkeypatch.setattr(streams, "host_tensor", counted)
    capture, ledger = machine.capture, machine.capture.ledger

    def decode(steps: int) -> tuple[int, ...]:
        for number in range(steps):
            where = [SIZE + number % 3]
            ledger.note_allocated(torch.tensor(where))
            assert machine.forward(where)
            device.record().synchronize()
            capture.transfers().synchronize()
        parts = (ledger._wanted, ledger._copies, ledger._entries, ledger._results)
        return len(made), len(capture._in_flight), *map(len, parts)

    assert decode(10) == decode(200)


def test_passes_that_are_not_captured_bring_what_is_wanted(
    device: WorkerStream, machine: Machine
) -> None:
    ledger = machine.capture.ledger
    read = ledger.read(torch.tensor(slots(1)))
    for _ in range(2):
        ledger.pass_begins()
        machine.capture.skip()
        device.record().synchronize()
    ledger.settle(wait=False)
    assert read.values is not None and read.values.tolist() == slots(1)


def test_the_rows_of_a_step_that_is_not_captured_are_known_to_be_lost(machine: Machine) -> None:
    ledger = machine.capture.ledger
    assert machine.forward(slots(1)) and ledger.none_lost
    assert not machine.forward(slots(2), layers=LAYERS - 1)
    assert not ledger.none_lost  # also before the arena has heard of it
    machine.settle()
    assert not ledger.none_lost
    for lose, none_lost in ((ledger.note_allocated, True), (ledger.note_not_captured, False)):
        lose(torch.tensor(slots(2)))
        machine.settle()
        assert ledger.none_lost == none_lost


def test_what_is_forgotten_is_not_believed_and_its_memory_is_used_again(machine: Machine) -> None:
    gate = machine.hold_transfers()
    assert machine.forward(slots(1))
    machine.capture.ledger.forget()  # nobody may have the memory that verdicts are written to
    assert machine.forward(slots(2))
    gate.set()
    machine.settle()
    assert not machine.all_valid(slots(1)) and machine.all_valid(slots(2))
    buffers = machine.capture.ledger.buffers
    free = {kind: len(free) for kind, free in buffers._free.items()}
    assert machine.forward(slots(1))
    machine.settle()
    assert {kind: len(free) for kind, free in buffers._free.items()} == free
