"""What becomes of pages that cannot be encoded on the way to L3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.written: list[list[str]] = []
        self.problems: list[str] = []
        monkeypatch.setattr(metrics.PROBLEMS, "count", self.problems.append)
        monkeypatch.setattr(
            HybridCacheController,
            "_page_backup",
            lambda _, operation: self.written.append(operation.hash_value),
        )
        runtime = SimpleNamespace(
            weights=SimpleNamespace(suspended=None),
            page_namespace=lambda weights: bytes(16),
            writer=bytes(8),
            runner=SimpleNamespace(model_config=SimpleNamespace(context_len=1 << 20)),
        )
        self.controller = bare_controller(self.pool, runtime=runtime)

    def to_l3(self, first: int, *pages: int) -> torch.Tensor:
        """Back up device pages as the node whose first page is the ``first`` of a conversation, and
        write that to L3; where it is in host memory."""
        host = self.backed_up(*pages)
        operation: Any = SimpleNamespace(
            host_indices=host,
            token_ids=list(range(PAGE * len(pages))),
            prefix_keys=KEYS[:first],
            hash_value=KEYS[first : first + len(pages)],
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
    eager._pool, eager._restores = server.pool, SimpleNamespace(until_saved=lambda pages: None)
    eager.until_saved(server.pool.page_ids(host))
    assert server.lost(host) == [True]
