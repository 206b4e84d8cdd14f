"""Pages with rows of hidden states that their codec cannot hold: K and V are kept instead."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hcache_backend.engine.kv_pages.overflow import Overflow

from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.engine.hidden_controller import HiddenStateController
from hcache_backend.engine.host_pool import HiddenStatePool, HostPages
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.loads import LoadQueue, QueuedLoad
from hcache_backend.engine.runtime import Runtime
from hcache_backend.page import PageLayout, hidden_layer
from hcache_backend.partition.costs import Partition
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.streams import WorkerStream
from hcache_backend.units import WHOLE
from tests.engine.in_process.encoded_kv.host import (
    DEVICE_PAGES,
    HOST_PAGES,
    LAYERS,
    PAGE,
    Ack,
    Host,
    Transferred,
    bits,
    kv_pool,
    make_unfit,
    slots_of,
    whole,
)
from tests.engine.in_process.test_backups import Checks, Pages
from tests.unit.capture import machine as small
from tests.unit.capture.machine import Machine, slots


@pytest.fixture
def device() -> Iterator[WorkerStream]:
    stream = WorkerStream("test-device")
    with stream.as_current():
        yield stream


def unfit_pages(server: Host, *pages: int) -> None:
    """Say that these host pages lack rows; all layers stand for hidden states."""
    server.overflow.rows_fit = lambda host_pages: ~np.isin(host_pages, pages)


def spoil(server: Host) -> None:
    """What the pages themselves hold means nothing."""
    server.pool.kv_buffer[: server.pool.page_num] = 0xA5


def test_k_and_v_of_an_unfit_page_come_back_to_the_bit_in_every_layer() -> None:
    server = Host(codec="none", unfit_layers=range(LAYERS))
    wanted = bits(server.device, 1, 2)
    unfit_pages(server, 0)
    host = server.backed_up(1, 2)
    assert server.pool.page_ids(host).tolist() == [0, 1]
    assert server.rows_in_use() == LAYERS
    found = server.load(host, 4, 3)
    assert torch.equal(found, wanted)
    spoil(server)
    found = server.load(host, 6, 5)
    assert torch.equal(found[:, :PAGE], wanted[:, :PAGE])
    assert not torch.equal(found[:, PAGE:], wanted[:, PAGE:])  # it is not in the overflow


def test_rows_and_units_of_one_page_that_do_not_fit_are_kept_together() -> None:
    """Layer 0 is stored as K and V, layer 1 stands for hidden states."""
    server = Host(unfit_layers=[1])
    server.kv.layers = server.overflow._kv.layers = (0,)
    make_unfit(server.device, 1, 0)
    wanted = bits(server.device, 1, 2)
    unfit_pages(server, 0, 1)
    host = server.backed_up(1, 2)
    kept = [set(server.overflow.kept(page)) for page in (0, 1)]
    assert kept == [{0, 1}, {1}]
    spoiled = server.pool.page_layout.segment(1)
    server.pool.kv_buffer[:2, spoiled] = 0xA5
    assert torch.equal(server.load(host, 4, 3), wanted)


def test_a_backup_ends_only_when_it_is_known_which_rows_fit() -> None:
    server = Host(codec="none", unfit_layers=range(LAYERS))
    known = False
    server.overflow.rows_fit = lambda pages: np.zeros(len(pages), np.bool_) if known else None
    _, ack = server.back_up(1)
    ack.finish_event._finish.done = True
    assert not ack.finish_event.query() and server.rows_in_use() == 0
    known = True
    assert ack.finish_event.query() and server.rows_in_use() == LAYERS


def test_what_is_not_known_at_a_backup_that_is_waited_for_is_kept_as_if_it_did_not_fit() -> None:
    server = Host(codec="none", unfit_layers=range(LAYERS))
    server.overflow.rows_fit = lambda pages: None
    wanted = bits(server.device, 1)
    host = server.backed_up(1)
    spoil(server)
    assert torch.equal(server.load(host, 4), wanted)


def test_without_room_an_unfit_page_is_lost_until_it_is_freed() -> None:
    server = Host(overflow=1, codec="none", unfit_layers=range(LAYERS))
    server.overflow.rows_fit = lambda pages: np.zeros(len(pages), np.bool_)
    room = server.overflow.pages.rows // LAYERS
    host = server.backed_up(1, 2, 3, 4, 5)
    found = [whole(server.overflow, np.array([page])) for page in range(5)]
    assert 0 < room < 5 and found == [True] * room + [False] * (5 - room)
    server.pool.free(host)
    assert whole(server.overflow, np.arange(5)) and server.rows_in_use() == 0


def test_of_a_server_whose_rows_do_not_fit_and_are_not_kept_nothing_is_backed_up() -> None:
    machine = Machine(is_view=False)
    assert machine.forward(slots(1), rows=_unfit_rows())
    machine.settle()
    assert machine.arena.problem(np.array(slots(1))) == "rows not encodable"


def _unfit_rows() -> torch.Tensor:
    rows = torch.randn(small.LAYERS, small.SIZE, small.WIDTH)
    rows[1, 2, 0] = torch.nan
    return rows


class Area:
    """An overflow of so many rows."""

    def __init__(self, rows: int) -> None:
        self.pages, self.hidden = Overflow(rows), tuple(range(small.LAYERS))

    def settled(self, host_page: int) -> bool:
        return True


@pytest.fixture
def machine(device: WorkerStream) -> Machine:
    return Machine(is_view=False, keeps_unfit=True)


def controller(machine: Machine, runtime: Runtime, rows: int) -> HiddenStateController:
    made = object.__new__(HiddenStateController)
    made._pool = pool = Pages(machine)  # type: ignore[assignment]
    pool.overflow = Area(rows)  # type: ignore[assignment]
    made._runtime, made._capture, made.eager = runtime, machine.capture, None
    made.tp_group = None
    return made


def depths(made: HiddenStateController, *pages: int) -> list[int] | None:
    found = made._depths(np.array(pages))
    return None if found is None else found.tolist()


def test_an_unfit_page_is_backed_up_where_there_is_room_and_loaded_where_it_was_kept(
    machine: Machine, runtime: Runtime
) -> None:
    made = controller(machine, runtime, rows=small.LAYERS)
    assert machine.forward(slots(1), rows=_unfit_rows())
    machine.settle()
    where = np.array(slots(1))
    known = SimpleNamespace(values=where)
    assert made._problem(known) is None  # type: ignore[arg-type]
    machine.capture.back_up(where, np.array([0]))
    assert depths(made, 0) == [small.LAYERS]  # nobody has kept anything
    assert made._encoded(np.array([0, 1])) == [False, True]
    overflow: Any = made._pool.overflow
    overflow.pages.take(0, range(small.LAYERS))
    assert depths(made, 0) == [0] and made._encoded(np.array([0])) == [False]
    assert machine.forward(slots(2), rows=_unfit_rows())
    machine.settle()
    known.values = np.array(slots(2))
    assert made._problem(known) is None  # type: ignore[arg-type]
    machine.capture.back_up(known.values, np.array([1]))
    overflow.pages.take(1, range(small.LAYERS))  # it is full
    assert depths(made, 1) == [small.LAYERS]  # the load recomputes it


def test_the_check_in_service_says_nothing_of_an_unfit_page(
    machine: Machine, runtime: Runtime
) -> None:
    """Its projector finds every page wrong."""
    checks = Checks(machine, runtime)
    checks.backed_up(1, _unfit_rows())
    checks.read()
    assert runtime.distrust is None
    checks.backed_up(2)
    checks.read()
    assert runtime.distrust is not None


class Rows:
    """Pages of hidden states from a forward pass to K and V in other slots: K is twice a row of
    these, V three times, but where a row begins with a NaN, which the codec does not hold."""

    def __init__(self, room: int) -> None:
        codec = small.PickyCodec(small.WIDTH, torch.float32)
        layout = PageLayout(PAGE, (hidden_layer(PAGE, codec.row_bytes, small.WIDTH),) * LAYERS)
        self.device = kv_pool(1, small.WIDTH, dtype=torch.float32)
        self.pool = HiddenStatePool(
            self.device,
            PAGE,
            "page_first",
            page_layout=layout,
            pages=HostPages(HOST_PAGES, DEVICE_PAGES + 1, room),
            kv=KVSegments(self.device, (), PAGE, WHOLE, 1),
            unfit_layers=range(LAYERS),
            stamp=lambda page: layout.stamp(page, small.NAMESPACE, small.WRITER),
            pin_memory=False,
            allocator_type="default",
        )
        arena, memory = self.pool.arena, self.pool.kv_buffer
        staging = Staging(LAYERS, small.WIDTH, torch.float32, 8 * PAGE, "cpu")
        self.capture = StagedCapture(arena, memory, staging, range(LAYERS), codec)
        self.pool.follow(self.capture)
        assert self.pool.overflow is not None
        self.overflow = self.pool.overflow

        def restored(layer: int) -> RestoredLayer:
            def fill(segments: torch.Tensor, _: torch.Tensor, slots: torch.Tensor) -> None:
                self.write(layer, slots, codec.decode(segments.view(-1, codec.row_bytes)))

            return RestoredLayer("hidden", fill)

        pipeline = RestorePipeline(memory, layout, [*map(restored, range(LAYERS))], 8 * PAGE, "cpu")
        methods = LayerMethods(Partition(0, LAYERS, 0), None, None, 8 * PAGE)
        self.loads = LoadQueue(arena, pipeline, methods, None, "cpu")
        self.pool.use(self.loads)

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        for times, planes in ((2, self.device.k_buffer), (3, self.device.v_buffer)):
            planes[layer][slots, 0] = rows * times

    def forward(self, *pages: int, unfit: Collection[int]) -> torch.Tensor:
        """Fill device pages, of which ``unfit`` have a row that is not to be encoded; what they
        hold."""
        slots, capture = slots_of(*pages), self.capture
        positions = torch.arange(len(slots))
        capture.ledger.pass_begins()
        step = capture.begin(slots, positions, positions)
        assert step is not None
        for layer in range(LAYERS):
            rows = torch.randn(len(slots), small.WIDTH)
            self.write(layer, slots, rows)
            if layer == 1:
                rows[[pages.index(page) * PAGE + 5 for page in unfit], 0] = torch.nan
            capture.take(layer, rows)
        assert capture.end(step, replayed=False)
        return self.bits(*pages)

    def bits(self, *pages: int) -> torch.Tensor:
        buffers = (*self.device.k_buffer, *self.device.v_buffer)
        return torch.stack([buffer[slots_of(*pages)].view(torch.int32) for buffer in buffers])

    def launch(self, *pages: int) -> tuple[torch.Tensor, Transferred, list[Ack]]:
        """Back up as the controller does it: where to, the transfer, and for what HiCache waits."""
        host, transfer = self.pool.alloc(PAGE * len(pages)), Transferred()
        assert host is not None
        self.capture.ledger.settle()
        assert self.pool.arena.problem(slots_of(*pages).numpy()) is None
        self.capture.back_up(slots_of(*pages).numpy(), self.pool.page_ids(host))
        self.pool.backup_from_device_all_layer(self.device, host, slots_of(*pages), "kernel")
        self.capture.transfers().synchronize()
        return host, transfer, self.overflow.awaited(Ack(transfer, transfer, [0]))

    def back_up(self, *pages: int) -> torch.Tensor:
        host, _, [ack] = self.launch(*pages)
        ack.finish_event.synchronize()
        return host

    def load(self, host: torch.Tensor, *pages: int) -> torch.Tensor:
        host_pages, slots = self.pool.page_ids(host), slots_of(*pages)
        assert whole(self.overflow, host_pages)
        self.loads.add(QueuedLoad(host_pages), slots)
        self.capture.ledger.loaded(slots, host_pages)
        for layer in range(LAYERS):
            self.pool.load_to_device_per_layer(self.device, host, slots, layer, "kernel")
        return self.bits(*pages)


def test_unfit_rows_go_to_host_memory_and_back_twice() -> None:
    """Each time to other slots, and what was on the device is gone."""
    server = Rows(room=4)
    wanted = server.forward(1, 2, 3, unfit=[2])
    host = server.back_up(1, 2, 3)
    assert server.pool.arena.unfit(server.pool.page_ids(host)).tolist() == [False, True, False]
    assert server.overflow.pages.rows_in_use == LAYERS
    for buffer in (*server.device.k_buffer, *server.device.v_buffer):
        buffer.zero_()
    assert torch.equal(server.load(host, 6, 5, 4), wanted)
    server.pool.free(host)  # as write_back does: the tokens are on the device only
    assert server.overflow.pages.rows_in_use == 0
    host = server.back_up(6, 5, 4)
    assert server.pool.arena.unfit(server.pool.page_ids(host)).tolist() == [False, True, False]
    for buffer in (*server.device.k_buffer, *server.device.v_buffer):
        buffer.zero_()
    assert torch.equal(server.load(host, 3, 2, 1), wanted)
