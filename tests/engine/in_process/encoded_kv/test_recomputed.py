"""Encoded K and V of pages that were recomputed: nothing keeps on the device what does not fit."""

from __future__ import annotations

from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hcache_backend.engine.kv_pages.overflow import SavedPages

from hcache_backend import streams
from hcache_backend.engine.eager_loads import EagerLoads
from tests.engine.in_process.encoded_kv.host import PAGE, Host, bits, make_unfit, slots_of, whole


def save(server: Host, *pages: int) -> tuple[torch.Tensor, SavedPages]:
    """Save device pages as eager restores do; where to."""
    host = server.pool.alloc(PAGE * len(pages))
    assert host is not None
    ids = server.pool.page_ids(host)
    fits = server.pool.save(ids, slots_of(*pages))
    assert fits is not None
    return host, server.overflow.told(ids, slots_of(*pages), fits)


def loadable(server: Host, host: torch.Tensor) -> list[bool]:
    return [whole(server.overflow, server.pool.page_ids(page)) for page in host.split(PAGE)]


def test_a_page_that_does_not_fit_is_lost_and_others_come_back() -> None:
    server = Host()
    make_unfit(server.device, 2, 1)
    want = bits(server.device, 1)
    host, saved = save(server, 1, 2)
    assert loadable(server, host) == [False, False]  # nobody knows yet
    server.device.k_buffer[0][slots_of(2)] = 0  # by now another's
    server.overflow.lose_unfit(saved)
    assert loadable(server, host) == [True, False]
    assert server.rows_in_use() == 0
    assert torch.equal(server.load(host[:PAGE], 5), want)
    unfit = int(server.pool.page_ids(host)[1])
    assert unfit in server.overflow.pages  # so it does not go to L3


def test_what_was_freed_meanwhile_is_another_page() -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    host, saved = save(server, 2)
    server.pool.free(host)
    again = server.backed_up(1)
    while not set(again.tolist()) & set(host.tolist()):
        again = server.backed_up(1)
    server.overflow.lose_unfit(saved)
    assert loadable(server, again) == [True]


def test_a_backup_that_is_launched_meanwhile_keeps_what_does_not_fit() -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    want = bits(server.device, 2)
    host, ack = server.back_up(2)
    saved_host, saved = save(server, 3)
    ack.finish_event.synchronize()
    server.overflow.lose_unfit(saved)
    assert loadable(server, host) == loadable(server, saved_host) == [True]
    assert torch.equal(server.load(host, 5), want)


def test_what_does_not_fit_is_known_before_a_page_goes_to_l3() -> None:
    """L3 would have it for ever: HiCache may write a node before the scheduler's next turn."""
    server = Host()
    make_unfit(server.device, 2, 0)
    host, saved = save(server, 2)
    eager: Any = object.__new__(EagerLoads)
    eager._pool, eager._restores = server.pool, SimpleNamespace(until_saved=lambda pages: None)
    eager._pages = SimpleNamespace(device="cpu")
    settle = partial(server.overflow.lose_unfit, saved)
    eager._unsettled = deque([(settle, streams.current_stream("cpu").record())])
    [unfit] = server.pool.page_ids(host).tolist()
    assert unfit not in server.overflow.pages
    eager.until_saved(server.pool.page_ids(host))
    assert unfit in server.overflow.pages
