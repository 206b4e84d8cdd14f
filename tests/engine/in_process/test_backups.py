"""What HiCache's controller answers about hidden states, and when it waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.engine.hidden_controller import HiddenStateController
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.service_check import ServiceChecks
from hcache_backend.streams import WorkerStream
from hcache_kernels.codecs import ExactCodec
from tests.unit.capture.machine import LAYERS, LAYOUT, SIZE, WIDTH, Machine, slots


@pytest.fixture(autouse=True)
def device() -> Iterator[WorkerStream]:
    stream = WorkerStream("test-device")
    with stream.as_current():
        yield stream


@pytest.fixture
def machine() -> Machine:
    return Machine()


class Pages:
    """HiCache's host pages in turn, and what was queued for them."""

    def __init__(self, machine: Machine) -> None:
        self.arena, self.given = machine.arena, 0
        self.page_layout, self.kv_buffer = LAYOUT, machine.capture._memory
        self.page_size = SIZE
        self.overflow = None

    def allocate(self, device_indices: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        first, self.given = self.given, self.given + len(device_indices)
        return torch.arange(first, self.given), None

    def page_ids(self, indices: torch.Tensor) -> np.ndarray:
        return indices[::SIZE].numpy() // SIZE


@pytest.fixture
def controller(machine: Machine, runtime: Runtime) -> HiddenStateController:
    made = object.__new__(HiddenStateController)
    made._pool = pool = Pages(machine)  # type: ignore[assignment]
    made.allocate_host_transfers = pool.allocate
    made._runtime, made.tp_group = runtime, None
    made.page_size, made.write_policy, made.write_queue = SIZE, "write_through", []
    alone = SimpleNamespace(alone=True, talk=lambda: None)
    no_checks = SimpleNamespace()
    made.use_hidden_states(machine.capture, no_checks, no_checks, alone)  # type: ignore[arg-type]
    return made


def write(controller: HiddenStateController, where: list[int]) -> bool:
    """Whether a node gets host pages."""
    return controller.write(torch.tensor(where), flush=False) is not None


def waits(machine: Machine) -> bool:
    """Whether everything that the device was asked for has arrived."""
    return not machine.capture.ledger._wanted


def test_a_node_gets_host_pages_before_its_slots_are_known(
    controller: HiddenStateController, machine: Machine
) -> None:
    assert machine.forward(slots(1))
    assert write(controller, slots(1))
    assert not waits(machine)


def test_where_a_row_was_lost_a_node_waits_for_its_own(
    controller: HiddenStateController, machine: Machine
) -> None:
    assert not machine.forward(slots(1), layers=LAYERS - 1)
    assert machine.forward(slots(2))
    assert write(controller, slots(2))
    assert waits(machine)
    assert not write(controller, slots(1))


@pytest.mark.parametrize("end", ["distrust", "a broken ledger"])
def test_where_backups_have_ended_nothing_is_waited_for(
    end: str, controller: HiddenStateController, machine: Machine, runtime: Runtime
) -> None:
    assert machine.forward(slots(1))
    if end == "distrust":
        runtime.lose_trust("a test")
    else:
        machine.capture.ledger.give_up("a test")
    machine.capture.ledger.allocated(torch.tensor(slots(2)))
    assert not write(controller, slots(1))
    assert not waits(machine)


def test_tokens_of_other_weights_get_no_host_pages(
    controller: HiddenStateController, machine: Machine, runtime: Runtime
) -> None:
    runtime.on_weights_changed.append(machine.capture.ledger.forget)
    assert machine.forward(slots(1))
    machine.settle()
    runtime.begin_weight_update()
    assert machine.capture.ledger.none_lost  # no pass has lost a row
    assert not write(controller, slots(1))
    assert machine.forward(slots(2))
    assert write(controller, slots(2))
    runtime.caches_were_flushed()
    machine.capture.ledger.allocated(torch.tensor(slots(3)))
    assert write(controller, slots(2)) and not waits(machine)


def test_a_check_under_way_says_nothing_of_other_weights(
    machine: Machine, runtime: Runtime
) -> None:
    """It may have projected with them what the weights before them left."""
    runtime.config = SimpleNamespace(check_every_pages=1)  # type: ignore[assignment]

    class OtherWeights:
        specs = dict.fromkeys(range(LAYERS), object())
        pool = SimpleNamespace(
            dtype=torch.float32,
            fetch=lambda kernel, slots, dtype: (torch.ones(len(slots), 1, 8),) * 2,
        )

        def project(self, layer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
            return (torch.zeros(len(hidden), 1, 8),) * 2

    checks = ServiceChecks(
        runtime,
        Pages(machine),  # type: ignore[arg-type]
        [SimpleNamespace(index=0, name="first", kernel=None)],  # type: ignore[list-item]
        ExactCodec(WIDTH, torch.float32),
        OtherWeights(),  # type: ignore[arg-type]
        exchange=None,
        order=None,
        group=None,
    )

    def backed_up(page: int) -> None:
        assert machine.forward(slots(page))
        machine.settle()
        machine.capture.back_up(np.array(slots(page)), np.array([page]))
        checks.backed_up(np.array([page]), torch.tensor(slots(page)))

    backed_up(1)
    runtime.begin_weight_update()
    checks.read()
    assert runtime.distrust is None
    backed_up(2)  # the same where weights are one's own
    machine.capture.transfers().synchronize()
    while checks._running:
        checks.read()
    assert runtime.distrust is not None
