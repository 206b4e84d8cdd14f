"""What becomes of pages that cannot be encoded on the way to L3."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend import metrics
from hcache_backend.prefetch.eager_loads import EagerLoads
from tests.engine.in_process.encoded_kv.test_service import saved
from tests.kit.host import PAGE, Host, bare_controller, make_unfit

KEYS = [f"{i:064x}" for i in range(8)]


class Server(Host):
    """A host pool whose nodes are written to L3.

    Attributes:
        written: Keys of the pages that went there, node by node.
        operations: What SGLang was given for each.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.written: list[list[str]] = []
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
        self.written.append(operation.hash_value)

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


def test_a_node_goes_to_l3_up_to_the_first_page_that_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look-up would get no further."""
    server = Server(monkeypatch)
    make_unfit(server.device, 2, 0)
    server.to_l3(0, 1)
    server.to_l3(1, 3, 2, 4)
    assert server.written == [KEYS[:1], KEYS[1:2]]
    assert server.problems == ["page_with_lost_layers"]


def test_states_behind_a_page_that_is_lost_do_not_go_to_l3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do windows. SGLang gives pools that have a page for each of ours the same keys."""
    server = Server(monkeypatch)
    make_unfit(server.device, 2, 0)
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


def test_what_is_lost_is_known_before_a_node_goes_to_l3(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.controller.eager = None
    make_unfit(server.device, 2, 0)
    host = server.back_up(2)
    monkeypatch.setattr(HybridCacheController, "write_storage", lambda _, host: server.lost(host))
    assert server.controller.write_storage(host) == [True]


def test_what_is_lost_of_recomputed_pages_is_known_before_a_page_goes_to_l3() -> None:
    """L3 would have it for ever: HiCache may write a node before the scheduler's next turn."""
    server = Host()
    make_unfit(server.device, 2, 0)
    host = saved(server, 2)
    eager: Any = object.__new__(EagerLoads)
    eager._pool, eager.restores = server.pool, SimpleNamespace(until_saved=lambda pages: None)
    eager.until_saved(server.pool.page_ids(host))
    assert server.lost(host) == [True]
