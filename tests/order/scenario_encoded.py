"""Scenario of encoded K and V: what does not fit goes to the overflow, and comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend import streams
from hcache_backend.engine.kv_pages.overflow import OverflowArea
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.page import PageLayout
from hcache_backend.units import WHOLE
from tests.order.checker import Checker

GPU = torch.device("cpu")
"""A variable: on a machine with a GPU it would name that."""
SIZE, WIDTH, LAYERS, PAGES = 4, 64, 2, 6


class Ack(NamedTuple):
    """The parts of SGLang's ``HiCacheAck`` that are ours."""

    start_event: Any
    finish_event: Any


def overflow(checker: Checker) -> None:
    """Backups, of which one page does not fit in one layer. Loads are asked for before that is
    known, and made when it is; slots are used again at once."""
    shape = (SIZE * PAGES, 1, WIDTH)
    k, v = (
        [checker.on_device(torch.ones(shape).bfloat16(), name) for _ in range(LAYERS)]
        for name in "KV"
    )
    kvcache = SimpleNamespace(k_buffer=k, v_buffer=v)
    kv = KVSegments(kvcache, range(LAYERS), SIZE, WHOLE, 1, "exp4")
    layout = PageLayout(SIZE, tuple(map(kv.stored_layer, range(LAYERS))))
    arena = checker.pinned(torch.zeros((PAGES, layout.page_bytes), dtype=torch.uint8), "arena")
    memory = checker.pinned(torch.zeros((PAGES, kv.plain_bytes), dtype=torch.uint8), "overflow")
    area = OverflowArea(kv, memory, GPU)
    schedule, forward, save, load = (
        checker.stream(name) for name in ("schedule", "forward", "device to host", "host to device")
    )
    any_bits = torch.arange(-(1 << 15), 1 << 15, 64, dtype=torch.int16).view(torch.bfloat16)

    def write(slots: torch.Tensor) -> None:
        forward.wait_stream(schedule)
        with checker.on(forward):
            slots.record_stream(forward)
            v[1][slots] = any_bits[: SIZE * WIDTH].view(SIZE, 1, WIDTH).to(GPU).repeat(2, 1, 1)

    def loaded(host_pages: npt.NDArray[np.int64], slots: torch.Tensor) -> bool:
        """Whether the pages may be loaded; then they are."""
        pages = host_pages.tolist()
        if not area.pages.lost.isdisjoint(pages) or not all(map(area.settled, pages)):
            return False
        load.wait_stream(schedule)
        with checker.on(load):
            slots.record_stream(load)
            ids = streams.to_device(host_pages, GPU)
            for layer in range(LAYERS):
                copy = kv.restored_layer(layer).copy
                assert copy is not None
                copy(arena, ids, layout.segment_offsets[layer], slots)
                area.load(layer, area.pages.of_pages(host_pages), slots)
        return True

    checker.begin()
    for turn in range(3):
        host_pages = np.array([turn, turn + 1])
        with checker.on(schedule):
            slots = streams.to_device(np.arange(2 * SIZE), GPU)
            others = streams.to_device(np.arange(2 * SIZE) + 2 * SIZE, GPU)
        write(slots)
        save.wait_stream(forward)
        with checker.on(save):
            slots.record_stream(save)
            start = save.record_event()
            fits = kv.save(layout, arena, streams.to_device(host_pages, GPU), slots)
            assert fits is not None
            area.saved(host_pages, slots, fits)
            [ack] = area.awaited(Ack(start, save.record_event()))
        loaded(host_pages, others)
        with checker.on(schedule):
            while not ack.finish_event.query():
                pass  # then HiCache may give the slots to others
        write(slots)
        assert loaded(host_pages, others)
        forward.wait_stream(load)
        write(others)
        save.wait_stream(load)
        load.synchronize()
        area.freed(host_pages)
    checker.host_joins()
