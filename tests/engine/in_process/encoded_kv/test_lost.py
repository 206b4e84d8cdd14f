"""Pages of which nobody has the layers: loads recompute them, ranks agree, and L3 gets none."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import metrics
from hcache_backend.host.loads import QueuedLoad
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.sglang import controller as controllers
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.streams import Stream, WorkerStream, current_stream
from tests.engine.in_process.encoded_kv.test_service import saved
from tests.engine.in_process.pools.test_host_pool import new_pool
from tests.engine.in_process.test_backups import Checks, Pages
from tests.kit.host import LAYERS, PAGE, Host, bare_controller, bits, make_unfit, slots_of
from tests.kit.ranks import Ranks, together
from tests.unit.capture import machine as small
from tests.unit.capture.machine import Machine, slots


class Model:
    """Recomputes pages of a server: K and V are what its first pages held when it was made."""

    def __init__(self, device: Any) -> None:
        self.layers = len(device.k_buffer)
        self._planes = (*device.k_buffer, *device.v_buffer)
        self._values = [plane.clone() for plane in self._planes]
        self.tokens: list[int] = []

    def stream(self) -> Stream:
        return current_stream("cpu")

    def recompute(
        self, layers: int, positions: torch.Tensor, slots: torch.Tensor, spans: Any
    ) -> None:
        """All before a token is there, or comes now; a token's id is the slot that it had."""
        assert layers == LAYERS
        self.tokens += [token for span in spans for token in span.token_ids.tolist()]
        for plane, values in zip(self._planes, self._values, strict=True):
            plane[slots] = values[PAGE + positions]
        for span in spans:
            seen = torch.cat((span.prefix, slots[: len(span.token_ids)]))
            for plane, values in zip(self._planes, self._values, strict=True):
                before = torch.arange(PAGE, PAGE + len(span.prefix))
                same = plane[seen[: len(span.prefix)]] == values[before]
                assert same.logical_or(values[before].isnan()).all()


def controller(server: Host, request: range | None) -> OwnPagesController:
    """It loads from the start of a ``request``."""
    made: OwnPagesController = bare_controller(
        server.pool,
        server.loads,
        loading=(lambda: torch.empty(0, dtype=torch.int64), lambda: request),
    )
    return made


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        metrics.TOKENS,
        "count",
        lambda event, tokens: counts.update({event: counts.get(event, 0) + tokens}),
    )
    return counts


def load(server: Host, planned: QueuedLoad, *pages: int) -> torch.Tensor:
    host, slots = torch.cat([slots_of(page) for page in planned.host_pages]), slots_of(*pages)
    server.loads.add_load(planned, slots)
    for layer in range(LAYERS):
        server.pool.load_to_device_per_layer(server.device, host, slots, layer, "kernel")
    return bits(server.device, *pages)


def test_what_does_not_fit_is_recomputed_behind_what_is_before_it(counted: dict[str, int]) -> None:
    """Of four pages the second and the fourth do not."""
    server = Host()
    make_unfit(server.device, 2, 1)
    make_unfit(server.device, 4, 0)
    wanted, model = bits(server.device, 1, 2, 3, 4), Model(server.device)
    server.loads._recomputer = model  # type: ignore[assignment]
    host = server.pool.page_ids(server.back_up(1, 2, 3, 4))
    for buffer in (*server.device.k_buffer, *server.device.v_buffer):
        buffer.zero_()
    made, ids = controller(server, range(4 * PAGE)), [*range(4 * PAGE)]
    for _ in range(2):
        planned = made._planned(host)
        assert planned is not None
        assert torch.equal(load(server, planned, 8, 7, 6, 5), wanted)
    recomputed = ids[PAGE : 2 * PAGE] + ids[3 * PAGE :]
    assert model.tokens == 2 * recomputed
    assert counted["recomputed_at_load"] == 2 * len(recomputed)
    assert counted["not_encodable"] == 2 * PAGE
    assert not any(event.startswith("not_restored") for event in counted)
    assert not made._never_loaded


def test_what_cannot_be_recomputed_is_evicted(counted: dict[str, int]) -> None:
    """A request with a picture, say."""
    server = Host()
    make_unfit(server.device, 2, 1)
    server.loads._recomputer = Model(server.device)  # type: ignore[assignment]
    host = server.pool.page_ids(server.backed_up(1, 2))
    made = controller(server, None)
    assert made._planned(host[:1]) is not None and not made._never_loaded
    assert made._planned(host) is None and made._never_loaded
    assert counted["not_restored_layers_not_recomputable"] == 2 * PAGE


def test_a_backup_that_has_not_arrived_is_loaded_later(counted: dict[str, int]) -> None:
    server, stream = Host(), WorkerStream("device to host")
    arrive = threading.Event()
    with stream.as_current():
        stream.run(arrive.wait)
        host = server.back_up(1)
    made = controller(server, None)
    assert made._planned(server.pool.page_ids(host)) is None and not made._never_loaded
    assert counted == {"not_restored_unsettled": PAGE}
    arrive.set()
    stream.record().synchronize()
    assert made._planned(server.pool.page_ids(host)) is not None


class Planned:
    """Loads whose plan is the depths of their pages."""

    stored_from = 0

    def plan(self, host_pages: Any, depths: Any, *_: Any) -> Any:
        return SimpleNamespace(depths=depths.tolist())


def asked_on_all_ranks(made: Sequence[Any], pages: int) -> list[list[int] | None]:
    """From which layer on each of the first host pages is there, as each rank says it."""

    def ask(one: Any) -> list[int] | None:
        found = one._planned(np.arange(pages))
        return None if found is None else found.depths

    return together(ask, made)


def test_what_does_not_fit_on_one_rank_is_lost_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is loaded as long as one of them does not know yet."""
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    servers, made = [Host(), Host()], []
    for rank, server in enumerate(servers):
        make_unfit(server.device, 1 + rank, rank)
        made.append(bare_controller(server.pool, Planned(), tp_group=rank))
        server.back_up(1, 2, 3)
    settle = servers[1].pool.mark_arrived
    servers[1].pool.mark_arrived = lambda: None  # type: ignore[method-assign]
    assert asked_on_all_ranks(made, 3) == [None, None]
    servers[1].pool.mark_arrived = settle  # type: ignore[method-assign]
    assert asked_on_all_ranks(made, 3) == 2 * [[LAYERS, LAYERS, 0]]


def test_ranks_agree_on_recomputed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the second page do not fit on one rank; a page that is prepared is there anyway."""
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    made: list[Any] = []
    prepared = np.array([False, False, False])
    for rank in range(2):
        pool, pages, tokens = new_pool(keeps_unfit=True), np.arange(3), np.arange(3 * PAGE)
        pool.arena.recomputed(pages, tokens, tokens)
        pool.arena.mark_saved(pages, np.array([True, rank == 1, True]))
        restores = SimpleNamespace(whole_pages=lambda pages: prepared, failed=lambda pages: False)
        eager = SimpleNamespace(restores=restores)
        made.append(bare_controller(pool, Planned(), tp_group=rank, eager=eager))
    assert asked_on_all_ranks(made, 3) == 2 * [[0, LAYERS, 0]]
    prepared[1] = True
    assert asked_on_all_ranks(made, 3) == 2 * [[0, 0, 0]]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with WorkerStream("test-device").as_current():
        yield Machine(is_view=False, keeps_unfit=True)


def _unfit_rows() -> torch.Tensor:
    rows = torch.randn(small.LAYERS, small.SIZE, small.WIDTH)
    rows[1, 2, 0] = torch.nan
    return rows


def test_an_unfit_page_is_backed_up_as_lost(machine: Machine, runtime: Runtime) -> None:
    made = bare_controller(Pages(machine), runtime=runtime, capture=machine.capture)
    assert machine.forward(slots(1), rows=_unfit_rows())
    assert machine.forward(slots(2))
    machine.settle()
    for host_page, device_page in enumerate((1, 2)):
        where = np.array(slots(device_page))
        assert made._backups._problem(SimpleNamespace(values=where)) is None
        machine.capture.back_up(where, np.array([host_page]))
    assert made._pool.depth(np.array([0, 1])).tolist() == [small.LAYERS, 0]


def test_an_unfit_page_is_not_checked_in_service(machine: Machine, runtime: Runtime) -> None:
    """Its projector finds every page wrong."""
    checks = Checks(machine, runtime)
    checks.backed_up(1, _unfit_rows())
    checks.read()
    assert runtime.quarantine is None
    checks.backed_up(2)
    checks.read()
    assert runtime.quarantine is not None


KEYS = [f"{i:064x}" for i in range(8)]


class Server(Host):
    """A host pool whose nodes are written to L3; device page 2 does not fit.

    Attributes:
        operations: What SGLang was given for each node.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        make_unfit(self.device, 2, 0)
        self.operations: list[Any] = []
        self.problems: list[str] = []
        monkeypatch.setattr(metrics.PROBLEMS, "count", self.problems.append)
        monkeypatch.setattr(HybridCacheController, "_page_backup", self._write)
        runtime = SimpleNamespace(
            weights=SimpleNamespace(suspended=None),
            page_namespace=lambda weights: bytes(16),
            writer=bytes(8),
            runner=SimpleNamespace(model_config=SimpleNamespace(context_len=1 << 20)),
        )
        self.controller = bare_controller(self.pool, runtime=runtime)

    def _write(self, operation: Any) -> None:
        self.operations.append(operation)

    def to_l3(self, first: int, *pages: int, others: Sequence[PoolTransfer] = ()) -> torch.Tensor:
        """Back up device pages as the node whose first page is the ``first`` of a conversation, and
        write that to L3, with pages of ``others``; where it is in host memory."""
        host = self.backed_up(*pages)
        operation: Any = SimpleNamespace(
            host_indices=host,
            token_ids=list(range(PAGE * len(pages))),
            prefix_keys=KEYS[:first],
            hash_value=KEYS[first : first + len(pages)],
            pool_transfers=[*others],
        )
        self.controller._page_backup(operation)
        return host


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_a_node_goes_to_l3_up_to_the_first_page_that_is_lost(server: Server) -> None:
    """A look-up would get no further. Of other pools, states and windows behind it do not go
    either. SGLang gives pools that have a page for each of ours the same keys."""
    state = PoolTransfer(PoolName.MAMBA, host_indices=torch.zeros(1), keys=KEYS[2:3])
    window = PoolTransfer(PoolName.SWA, host_indices=torch.zeros(2 * PAGE), keys=KEYS[1:3])
    draft = PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV)
    others = [state, draft, window]
    server.to_l3(0, 1, 3, 4, others=others)
    host = server.to_l3(3, 5, 2, 6, others=others)
    whole, cut = server.operations
    assert (whole.pool_transfers, len(whole.host_indices)) == (others, 3 * PAGE)
    assert (cut.pool_transfers, cut.hash_value) == ([draft], KEYS[3:4])
    assert torch.equal(cut.host_indices, host[:PAGE])
    assert server.problems == ["page_with_lost_layers"]


def test_lost_pages_are_known_before_l3(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.controller.eager = None
    host = server.back_up(2)
    monkeypatch.setattr(HybridCacheController, "write_storage", lambda _, host: server.lost(host))
    assert server.controller.write_storage(host) == [True]


def test_lost_recomputed_pages_are_known_before_l3(server: Server) -> None:
    """L3 would have it for ever: HiCache may write a node before the scheduler's next turn."""
    host = saved(server, 2)
    eager: Any = object.__new__(EagerLoads)
    eager._pool, eager.restores = server.pool, SimpleNamespace(until_saved=lambda pages: None)
    eager.until_saved(server.pool.page_ids(host))
    assert server.lost(host) == [True]
