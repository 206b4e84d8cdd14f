"""Pages with rows of hidden states that their codec cannot hold: they are backed up as lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.loads import LoadQueue
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.sglang.host_pool import HostPages, OwnPagesPool
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.streams import WorkerStream
from tests.engine.in_process.test_backups import Checks, Pages
from tests.kit.host import (
    DEVICE_PAGES,
    HOST_PAGES,
    LAYERS,
    PAGE,
    bare_controller,
    kv_pool,
    slots_of,
)
from tests.unit.capture import machine as small
from tests.unit.capture.machine import Machine, slots


@pytest.fixture
def device() -> Iterator[WorkerStream]:
    stream = WorkerStream("test-device")
    with stream.as_current():
        yield stream


def test_of_a_server_whose_rows_do_not_fit_and_are_not_kept_nothing_is_backed_up() -> None:
    machine = Machine(is_view=False)
    assert machine.forward(slots(1), rows=_unfit_rows())
    machine.settle()
    assert machine.arena.problem(np.array(slots(1))) == "rows not encodable"


def _unfit_rows() -> torch.Tensor:
    rows = torch.randn(small.LAYERS, small.SIZE, small.WIDTH)
    rows[1, 2, 0] = torch.nan
    return rows


@pytest.fixture
def machine(device: WorkerStream) -> Machine:
    return Machine(is_view=False, keeps_unfit=True)


def test_an_unfit_page_is_backed_up_as_one_that_loads_recompute(
    machine: Machine, runtime: Runtime
) -> None:
    made = bare_controller(Pages(machine), runtime=runtime, capture=machine.capture)
    assert machine.forward(slots(1), rows=_unfit_rows())
    assert machine.forward(slots(2))
    machine.settle()
    for host_page, device_page in enumerate((1, 2)):
        where = np.array(slots(device_page))
        assert made._backups._problem(SimpleNamespace(values=where)) is None
        machine.capture.back_up(where, np.array([host_page]))
    assert made._pool.depth(np.array([0, 1])).tolist() == [small.LAYERS, 0]


def test_the_check_in_service_says_nothing_of_an_unfit_page(
    machine: Machine, runtime: Runtime
) -> None:
    """Its projector finds every page wrong."""
    checks = Checks(machine, runtime)
    checks.backed_up(1, _unfit_rows())
    checks.read()
    assert runtime.quarantine is None
    checks.backed_up(2)
    checks.read()
    assert runtime.quarantine is not None


class Rows:
    """Pages of hidden states from a forward pass to K and V in other slots: K is twice a row of
    these, V three times, but where a row begins with a NaN, which the codec does not hold."""

    def __init__(self) -> None:
        codec = small.PickyCodec.of_rows(small.WIDTH, torch.float32)
        layout = PageLayout(PAGE, (hidden_layer(PAGE, codec.row_bytes, small.WIDTH),) * LAYERS)
        self.device = kv_pool(1, small.WIDTH, dtype=torch.float32)
        self.pool = OwnPagesPool(
            self.device,
            PAGE,
            "page_first",
            page_layout=layout,
            pages=HostPages(HOST_PAGES, DEVICE_PAGES + 1),
            kv=KVSegments(self.device, (), PAGE, WHOLE, 1),
            keeps_unfit=True,
            stamp=lambda page: layout.stamp(page, small.NAMESPACE, small.WRITER),
            pin_memory=False,
            allocator_type="default",
        )
        arena, memory = self.pool.arena, self.pool.kv_buffer
        staging = Staging(LAYERS, small.WIDTH, torch.float32, 8 * PAGE, "cpu")
        self.capture = StagedCapture(arena, memory, staging, range(LAYERS), codec)

        def restored(layer: int) -> RestoredLayer:
            def fill(segments: torch.Tensor, _: torch.Tensor, slots: torch.Tensor) -> None:
                self.write(layer, slots, codec.decode(segments.view(-1, codec.row_bytes)))

            return RestoredLayer("hidden", fill)

        pipeline = RestorePipeline(memory, layout, [*map(restored, range(LAYERS))], 8 * PAGE, "cpu")
        methods = Restore(None, None, Partition(0, LAYERS, 0), chunk_tokens=8 * PAGE)
        self.loads = LoadQueue(arena, pipeline, methods, None, "cpu")
        self.pool.use(self.loads, self.capture)

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

    def back_up(self, *pages: int) -> torch.Tensor:
        """Back up as the controller does it: where to."""
        host, where = self.pool.alloc(PAGE * len(pages)), slots_of(*pages)
        assert host is not None
        self.capture.ledger.settle()
        assert self.pool.arena.problem(where.numpy()) is None
        self.capture.back_up(where.numpy(), self.pool.page_ids(host))
        self.pool.backup_from_device_all_layer(self.device, host, where, "kernel")
        self.capture.transfers().synchronize()
        self.capture.ledger.settle(wait=False)
        return host

    def load(self, host: torch.Tensor, *pages: int) -> torch.Tensor:
        host_pages, slots = self.pool.page_ids(host), slots_of(*pages)
        depths = (self.pool.arena.depth(host_pages) > 0).astype(np.int64)
        start = torch.empty(0, dtype=torch.int64)
        planned = self.loads.plan(host_pages, depths, lambda: start)
        assert planned is not None
        self.loads.add(planned, slots)
        self.capture.ledger.loaded(slots, host_pages)
        for layer in range(LAYERS):
            self.pool.load_to_device_per_layer(self.device, host, slots, layer, "kernel")
        return self.bits(*pages)
