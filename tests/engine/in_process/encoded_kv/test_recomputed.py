"""Encoded K and V of pages that were recomputed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hcache_backend.prefetch.eager_loads import EagerLoads
from tests.kit.host import PAGE, Host, bits, make_unfit, slots_of


def save(server: Host, *pages: int) -> torch.Tensor:
    """Save device pages as eager restores do; where to."""
    host = server.pool.alloc(PAGE * len(pages))
    assert host is not None
    server.pool.save_recomputed(server.pool.page_ids(host), slots_of(*pages), None)
    return host


def test_a_page_that_does_not_fit_is_lost_and_others_come_back() -> None:
    server = Host()
    make_unfit(server.device, 2, 1)
    want = bits(server.device, 1)
    host = save(server, 1, 2)
    assert (server.pool.arena.depth(server.pool.page_ids(host)) < 0).all()  # nobody knows yet
    server.device.k_buffer[0][slots_of(2)] = 0  # by now another's
    server.pool.settle()
    assert server.lost(host) == [False, True]
    assert torch.equal(server.load(host[:PAGE], 5), want)


def test_what_was_freed_meanwhile_is_another_page() -> None:
    server = Host(host_pages=1)
    make_unfit(server.device, 2, 0)
    server.pool.free(save(server, 2))
    again = server.back_up(1)
    server.pool.settle()
    assert server.lost(again) == [False]


def test_what_does_not_fit_is_known_before_a_page_goes_to_l3() -> None:
    """L3 would have it for ever: HiCache may write a node before the scheduler's next turn."""
    server = Host()
    make_unfit(server.device, 2, 0)
    host = save(server, 2)
    eager: Any = object.__new__(EagerLoads)
    eager._pool, eager._restores = server.pool, SimpleNamespace(until_saved=lambda pages: None)
    eager.until_saved(server.pool.page_ids(host))
    assert server.lost(host) == [True]
