"""What the arena hears of, when, and what it costs."""

from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend import streams
from hcache_backend.streams import WorkerStream, host_tensor
from tests.integrity import assert_sound_arena
from tests.unit.capture.machine import LAYERS, SIZE, Machine, slots


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
            ledger.allocated(torch.tensor(where))
            assert machine.forward(where)
            device.record().synchronize()
            capture.transfers().synchronize()
        parts = (ledger._wanted, ledger._copies, ledger._entries, ledger._proofs)
        return len(made), len(capture._in_flight), *map(len, parts)

    assert decode(10) == decode(200)


def test_what_was_allocated_for_a_step_is_not_read_twice(machine: Machine) -> None:
    where = torch.tensor(slots(1))
    machine.capture.ledger.allocated(where)
    assert machine.forward(slots(1), allocated=where)
    lengths = [copy.lengths for copy in machine.capture.ledger._copies]
    assert lengths == [[3 * SIZE]]
    machine.capture.ledger.allocated(where[:2])  # others: these are
    assert machine.forward(slots(1), allocated=where)
    lengths = [copy.lengths for copy in machine.capture.ledger._copies]
    assert lengths[-2:] == [[2], [3 * SIZE]]


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
    assert machine.forward(slots(1))
    assert ledger.none_lost
    assert not machine.forward(slots(2), layers=LAYERS - 1)
    assert not ledger.none_lost  # also before the arena has heard of it
    machine.settle()
    assert not ledger.none_lost
    ledger.allocated(torch.tensor(slots(2)))
    machine.settle()
    assert ledger.none_lost
    ledger.not_captured(torch.tensor(slots(3)))
    machine.settle()
    assert not ledger.none_lost


def test_pages_that_no_duplicate_is_of_are_freed_without_a_wait(machine: Machine) -> None:
    where = slots(1)
    assert machine.forward(where)
    machine.settle()
    machine.capture.back_up(np.array(where), np.array([0]))
    machine.settle()
    gate = machine.hold_transfers()
    machine.capture.ledger.allocated(torch.tensor(where))  # not known yet
    machine.capture.host_freed(np.array([0]), duplicates=False)
    assert machine.capture.ledger._wanted
    assert machine.arena.problem(np.array(where)) == "rows not valid"
    gate.set()
    machine.settle()
    assert_sound_arena(machine.arena)


def test_what_is_forgotten_is_not_believed_and_its_memory_is_used_again(machine: Machine) -> None:
    gate = machine.hold_transfers()
    assert machine.forward(slots(1))
    machine.capture.ledger.forget()  # nobody may have the memory that verdicts are written to
    assert machine.forward(slots(2))
    gate.set()
    machine.settle()
    assert not machine.proven(slots(1)) and machine.proven(slots(2))
    buffers = machine.capture.ledger.buffers
    free = {kind: len(free) for kind, free in buffers._free.items()}
    assert machine.forward(slots(1))
    machine.settle()
    assert {kind: len(free) for kind, free in buffers._free.items()} == free
