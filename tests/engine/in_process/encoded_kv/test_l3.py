"""What becomes of pages that cannot be encoded, and of those behind them, on the way to L3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend.engine import metrics
from hcache_backend.engine.kv_pages.controller import KVController
from hcache_backend.page import key_bytes
from tests.engine.in_process.encoded_kv.host import LAYERS, PAGE, Host, make_unfit, slots_of

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
        self.controller = made = object.__new__(KVController)
        made._pool, made.page_size = self.pool, PAGE
        made._runtime = SimpleNamespace(  # type: ignore[assignment]
            weights=SimpleNamespace(suspended=None),
            page_namespace=lambda weights: bytes(16),
            writer=bytes(8),
        )

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


def test_nothing_behind_a_page_that_is_not_encodable_goes_to_l3(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look-up would never get there."""
    server = Server(monkeypatch)
    make_unfit(server.device, 2, 0)
    server.to_l3(0, 1)
    server.to_l3(1, 3, 2, 4)
    server.to_l3(4, 5)
    assert server.written == [KEYS[:1], KEYS[1:2], []]
    assert server.problems == ["page_not_encodable", "page_not_encodable"]
    keeps = server.overflow.pages.keeps_from_l3
    assert [keeps(key_bytes(key)) for key in KEYS[:4]] == [False, False, True, False]


def test_a_page_that_can_be_encoded_by_now_opens_the_way_for_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch)
    make_unfit(server.device, 2, 0)
    server.pool.free(server.to_l3(0, 2))
    for layer in range(LAYERS):
        server.device.v_buffer[layer][slots_of(2)] = 1.0
    server.to_l3(0, 2)
    server.to_l3(1, 3)
    assert server.written == [[], KEYS[:1], KEYS[1:2]]


def test_few_pages_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hcache_backend.engine.kv_pages.overflow._KEYS", 2)
    pages = Host().overflow.pages
    for number in range(4):
        pages.note(bytes([number]), encodable=False)
    assert [pages.keeps_from_l3(bytes([number])) for number in range(4)] == [
        False,
        False,
        True,
        True,
    ]
