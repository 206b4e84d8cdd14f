"""Pages that the codec cannot hold: they are misses on all ranks, and L3 gets none."""

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
from hcache_backend.arena import NOT_ENCODABLE
from hcache_backend.prefetch.eager_loads import EagerLoads
from hcache_backend.sglang import controller as controllers
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.streams import WorkerStream
from tests.engine.in_process.encoded_kv.test_service import saved
from tests.engine.in_process.pools.test_host_pool import new_pool
from tests.engine.in_process.test_backups import Checks, Pages
from tests.kit.host import PAGE, Host, bare_controller, make_unfit
from tests.kit.ranks import Ranks, together
from tests.unit.capture import machine as small
from tests.unit.capture.machine import Machine, slots


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        metrics.TOKENS,
        "count",
        lambda event, tokens: counts.update({event: counts.get(event, 0) + tokens}),
    )
    return counts


def test_what_does_not_fit_is_a_miss_and_empties_nothing(counted: dict[str, int]) -> None:
    server = Host()
    make_unfit(server.device, 2, 1)
    host = server.pool.page_ids(server.backed_up(1, 2))
    made = bare_controller(server.pool, server.loads)
    assert made._plan_load(host[:1]) is not None
    assert made._plan_load(host) is None and not made._never_loaded
    assert counted == {"not_encodable": PAGE, "not_restored_not_encodable": 2 * PAGE}


def test_a_backup_that_has_not_arrived_is_loaded_later(counted: dict[str, int]) -> None:
    server, stream = Host(), WorkerStream("device to host")
    arrive = threading.Event()
    with stream.as_current():
        stream.run(arrive.wait)
        host = server.back_up(1)
    made = bare_controller(server.pool, server.loads)
    assert made._plan_load(server.pool.page_ids(host)) is None and not made._never_loaded
    assert counted == {"not_restored_unsettled": PAGE}
    arrive.set()
    stream.record().synchronize()
    assert made._plan_load(server.pool.page_ids(host)) is not None


class Planned:
    """Loads that can always be planned."""

    stored_from = 0  # first stored layer

    def plan(self, host_pages: Any, prefix: Any) -> Any:
        return SimpleNamespace(host_pages=host_pages.tolist())


def loaded_on_all_ranks(made: Sequence[Any], *pages: int) -> list[bool]:
    return together(lambda one: one._plan_load(np.array(pages)) is not None, made)


def test_what_does_not_fit_on_one_rank_is_a_miss_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is loaded as long as one of them does not know yet."""
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    servers, made = [Host(), Host()], []
    for rank, server in enumerate(servers):
        make_unfit(server.device, 1 + rank, rank)
        made.append(bare_controller(server.pool, Planned(), tp_group=rank))
        server.back_up(1, 2, 3)
    settle = servers[1].pool.mark_arrived
    servers[1].pool.mark_arrived = lambda: None  # type: ignore[method-assign]
    assert loaded_on_all_ranks(made, 2) == [False, False]
    servers[1].pool.mark_arrived = settle  # type: ignore[method-assign]
    found = [loaded_on_all_ranks(made, page) for page in range(3)]
    assert found == [[False, False], [False, False], [True, True]]


def test_ranks_agree_on_recomputed_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the second page do not fit on one rank; a page that is prepared is there anyway, if
    no first layers must be recomputed by its header."""
    monkeypatch.setattr(controllers, "smallest", Ranks(2).smallest)
    made: list[Any] = []
    prepared = np.array([False, False, False])
    for rank in range(2):
        pool, pages, tokens = new_pool(), np.arange(3), np.arange(3 * PAGE)
        ticket = pool.arena.expect_recomputed(pages, tokens, tokens)
        pool.arena.settle(pages, ticket, np.array([True, rank == 1, True]))
        restores = SimpleNamespace(
            ready_pages=lambda pages: prepared, any_failed=lambda pages: False
        )
        eager = SimpleNamespace(restores=restores)
        made.append(bare_controller(pool, Planned(), tp_group=rank, eager=eager))
    assert loaded_on_all_ranks(made, 0, 1, 2) == [False, False]
    prepared[1] = True
    assert loaded_on_all_ranks(made, 0, 1, 2) == [True, True]
    for one in made:
        one._loads.stored_from = 1
    assert loaded_on_all_ranks(made, 0, 1, 2) == [False, False]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with WorkerStream("test-device").as_current():
        yield Machine(is_view=False)


def _unfit_rows() -> torch.Tensor:
    rows = torch.randn(small.LAYERS, small.SIZE, small.WIDTH)
    rows[1, 2, 0] = torch.nan
    return rows


def test_rows_that_do_not_fit_are_not_backed_up(machine: Machine, runtime: Runtime) -> None:
    made = bare_controller(Pages(machine), runtime=runtime, capture=machine.capture)
    assert machine.forward(slots(1), rows=_unfit_rows())
    assert machine.forward(slots(2))
    machine.settle()
    problems = [
        made.node_backups._problem(SimpleNamespace(values=np.array(slots(page)))) for page in (1, 2)
    ]
    assert problems == [NOT_ENCODABLE, None]


def test_an_unfit_page_is_not_checked_in_service(machine: Machine, runtime: Runtime) -> None:
    """Its projector finds every page wrong."""
    checks = Checks(machine, runtime)
    checks.backed_up(1, _unfit_rows())
    checks.read()
    assert runtime.weights.quarantine is None
    checks.backed_up(2)
    checks.read()
    assert runtime.weights.quarantine is not None


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
            weights=SimpleNamespace(
                present=SimpleNamespace(suspended=None), page_namespace=lambda weights: bytes(16)
            ),
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


def test_a_node_goes_to_l3_up_to_the_first_page_that_is_unfit(server: Server) -> None:
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
    assert server.problems == ["page_not_encodable"]


def test_unfit_pages_are_known_before_l3(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.controller.eager = None
    host = server.back_up(2)
    monkeypatch.setattr(HybridCacheController, "write_storage", lambda _, host: server.unfit(host))
    assert server.controller.write_storage(host) == [True]


def test_unfit_recomputed_pages_are_known_before_l3(server: Server) -> None:
    """L3 would have it for ever: HiCache may write a node before the scheduler's next turn."""
    host = saved(server, 2)
    eager: Any = object.__new__(EagerLoads)
    eager._pool, eager.restores = server.pool, SimpleNamespace(wait_until_saved=lambda pages: None)
    eager.wait_until_saved(server.pool.page_ids(host))
    assert server.unfit(host) == [True]
