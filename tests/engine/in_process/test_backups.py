"""What HiCache's controller answers about hidden states, and when it waits for the device."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from hcache_backend import metrics
from hcache_backend.checks import service as service_check
from hcache_backend.checks.service import ServiceChecks
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.streams import WorkerStream
from hcache_kernels.codecs import ExactCodec
from tests.kit.host import bare_controller
from tests.kit.turns import turn_of_checks
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
        self.page_layout, self.kv_buffer = LAYOUT, machine.capture.memory
        self.page_size, self.layer_num = SIZE, LAYERS
        self.usable = machine.arena.usable
        self.device_pool = SimpleNamespace(device="cpu")

    def allocate(
        self, device_indices: torch.Tensor, *_: Any, **_named: Any
    ) -> tuple[torch.Tensor, None]:
        first, self.given = self.given, self.given + len(device_indices)
        return torch.arange(first, self.given), None

    def page_ids(self, indices: torch.Tensor) -> np.ndarray:
        return indices[::SIZE].numpy() // SIZE


@pytest.fixture
def controller(machine: Machine, runtime: Runtime) -> OwnPagesController:
    pool, capture = Pages(machine), machine.capture
    made: OwnPagesController = bare_controller(
        pool, runtime=runtime, capture=capture, page_size=SIZE
    )
    made.allocate_host_transfers = pool.allocate
    return made


def write(controller: OwnPagesController, where: list[int]) -> bool:
    return controller.write(torch.tensor(where), flush=False) is not None


def waits(machine: Machine) -> bool:
    return not machine.capture.ledger._wanted


def test_host_pages_do_not_wait_for_slots(controller: OwnPagesController, machine: Machine) -> None:
    assert machine.forward(slots(1))
    assert write(controller, slots(1))
    assert not waits(machine)


def test_behind_a_lost_row_a_node_waits(controller: OwnPagesController, machine: Machine) -> None:
    assert not machine.forward(slots(1), layers=LAYERS - 1)
    assert machine.forward(slots(2))
    assert write(controller, slots(2))
    assert waits(machine)
    assert not write(controller, slots(1))


@pytest.mark.parametrize("end", ["quarantine", "a broken ledger"])
def test_where_backups_have_ended_nothing_is_waited_for(
    end: str, controller: OwnPagesController, machine: Machine, runtime: Runtime
) -> None:
    assert machine.forward(slots(1))
    if end == "quarantine":
        runtime.weights.begin_quarantine("a test")
    else:
        machine.capture.ledger.give_up("a test")
    machine.capture.ledger.note_allocated(torch.tensor(slots(2)))
    assert not write(controller, slots(1))
    assert not waits(machine)


def test_tokens_of_other_weights_get_no_host_pages(
    controller: OwnPagesController, machine: Machine, runtime: Runtime
) -> None:
    runtime.weights.on_weights_changed.append(machine.capture.ledger.forget)
    assert machine.forward(slots(1))
    machine.settle()
    runtime.weights.begin_update()
    assert machine.capture.ledger.none_lost  # no pass has lost a row
    assert not write(controller, slots(1))
    assert machine.forward(slots(2))
    assert write(controller, slots(2))
    runtime.weights.caches_were_flushed()
    machine.capture.ledger.note_allocated(torch.tensor(slots(3)))
    assert write(controller, slots(2)) and not waits(machine)


class OtherWeights:
    """A projector that finds 0 where the pool has 1.

    Attributes:
        error: What it raises instead, while it is there.
    """

    def __init__(self, spec: object) -> None:
        self.specs = dict.fromkeys(range(LAYERS), spec)
        self.pool = SimpleNamespace(dtype=torch.float32, fetch=self.fetch)
        self.error: Exception | None = None

    def fetch(self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype) -> Any:
        return (torch.ones(len(slots), 1, 8),) * 2

    def project(self, layer: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        if self.error is not None:
            raise self.error
        return (torch.zeros(len(hidden), 1, 8),) * 2


class Checks:
    """The checks of a server that looks at each page that is backed up.

    Attributes:
        exchanged: How many segments the ranks brought together.
    """

    def __init__(self, machine: Machine, runtime: Runtime, *, by_module: bool = False) -> None:
        self.machine, self.exchanged = machine, 0
        self.projector = OtherWeights(None if by_module else object())
        exchange = SimpleNamespace(shards=1, on_scheduler_thread=True, gather_now=self.gather_now)
        layers = [SimpleNamespace(index=i, name=f"{i}", kernel=None) for i in range(LAYERS)]
        self.checks = ServiceChecks(
            runtime.weights,
            Pages(machine),  # type: ignore[arg-type]
            1,
            layers,  # type: ignore[arg-type]
            ExactCodec.of_rows(WIDTH, torch.float32),
            self.projector,  # type: ignore[arg-type]
            exchange=exchange,  # type: ignore[arg-type]
            order=None,
        )

    @property
    def waiting(self) -> list[int]:
        """Host pages whose checks are under way."""
        return [check.host_page for check in self.checks._waiting]

    def gather_now(self, shards: Any, fetch: Any) -> None:
        fetch(shards[0])
        self.exchanged += 1

    def backed_up(self, page: int, rows: torch.Tensor | None = None) -> None:
        assert self.machine.forward(slots(page), rows=rows)
        self.machine.settle()
        self.machine.capture.back_up(np.array(slots(page)), np.array([page]))
        self.checks.on_transfer(np.array([page]), torch.tensor(slots(page)))

    def read(self) -> None:
        self.machine.capture.transfers().synchronize()
        while self.checks._waiting:
            turn_of_checks(self.checks)


@pytest.fixture
def checks(machine: Machine, runtime: Runtime) -> Checks:
    return Checks(machine, runtime)


def test_a_check_under_way_says_nothing_of_other_weights(checks: Checks, runtime: Runtime) -> None:
    """It may have projected with them what the weights before them left."""
    checks.backed_up(1)
    runtime.weights.begin_update()
    checks.read()
    assert runtime.weights.quarantine is None
    checks.backed_up(2)  # the same where weights are one's own
    checks.read()
    assert runtime.weights.quarantine is not None


def test_a_check_without_memory_raises_nothing_and_says_nothing_of_the_page(
    machine: Machine, runtime: Runtime
) -> None:
    """SGLang's scheduler calls it while it launches a backup. The other ranks make theirs: they
    wait for this one's shard of each layer, and for its word."""
    checks = Checks(machine, runtime, by_module=True)
    counted = metrics.PROBLEMS.family.labels("page_not_checked")._value
    before = counted.get()
    checks.projector.error = torch.OutOfMemoryError("a test")
    checks.backed_up(1)
    assert (checks.exchanged, checks.waiting) == (LAYERS, [1])
    checks.read()
    assert runtime.weights.quarantine is None
    assert counted.get() == before + LAYERS
    checks.projector.error = None  # the next one is made, and found out
    checks.backed_up(2)
    checks.read()
    assert runtime.weights.quarantine is not None


def test_checks_rest_when_they_took_too_long(
    machine: Machine, runtime: Runtime, monkeypatch: MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: now[0])
    monkeypatch.setattr(service_check, "time", clock)
    monkeypatch.setattr(service_check, "_BURST_SECONDS", 0.1)
    checks = Checks(machine, runtime)

    def slow(*_: object) -> None:
        now[0] += 0.5 / LAYERS  # a check takes half a second
        raise torch.OutOfMemoryError("a test")

    monkeypatch.setattr(checks.projector, "project", slow)
    checks.backed_up(1)
    assert checks.waiting == [1]
    checks.read()
    # 0.35 seconds are to be made up for: 3.5 seconds at a tenth
    for page, seconds, waiting in ((2, 0.0, []), (3, 3.4, []), (4, 0.2, [4])):
        now[0] += seconds
        turn_of_checks(checks.checks)
        checks.backed_up(page)
        assert checks.waiting == waiting


def test_all_ranks_rest_while_one_of_them_has_to(checks: Checks, machine: Machine) -> None:
    tired = [True]

    def with_another(numbers: torch.Tensor, _: object) -> None:
        numbers[0] *= not tired[0]

    checks.backed_up(1)
    machine.capture.transfers().synchronize()
    checks.checks._waiting[0].event.synchronize()
    turn_of_checks(checks.checks, with_another)
    checks.backed_up(2)
    assert checks.waiting == []
    tired[0] = False
    turn_of_checks(checks.checks, with_another)
    checks.backed_up(3)
    assert checks.waiting == [3]


def test_memory_that_results_of_checks_are_copied_to_is_used_again(checks: Checks) -> None:
    seen = set()
    for page in (1, 2, 3):
        checks.backed_up(page)
        [check] = checks.checks._waiting
        assert check.buffer is not None
        seen.add(check.buffer.memory.data_ptr())
        checks.read()
    assert len(seen) == 1


def test_no_further_page_is_checked_while_many_are_under_way(
    checks: Checks, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(service_check, "_WAITING", 2)
    for page in (1, 2, 3):
        checks.backed_up(page)
    assert checks.waiting == [1, 2]
