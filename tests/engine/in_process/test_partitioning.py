"""KV segments, queued loads and the choice of a partition, against SGLang's own classes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend.config import ConfigError, parse_config
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.loads import LoadPlanner
from hcache_backend.engine.parking import PoolParking
from hcache_backend.engine.startup.partitioning import Partitioning, _fixed_partition
from hcache_backend.page import PageLayout
from hcache_backend.partition.layers import Partition
from hcache_backend.partition.model_config import shape_from_config
from hcache_backend.partition.profile import Profile, Rate
from tests.engine.in_process.test_host_pool import PAGE, kv_pool

SIZE = PAGE
CONFIGS = Path(__file__).parents[2] / "unit" / "partition" / "configs"


def test_kv_segments_come_back_to_other_slots_bit_for_bit() -> None:
    pool = kv_pool(8)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    kv = KVSegments(pool, (1,), SIZE)
    layout = PageLayout(SIZE, (0, kv.segment_bytes(1)))
    memory = torch.zeros((5, layout.page_bytes), dtype=torch.uint8)
    slots = torch.cat((torch.arange(3 * SIZE, 4 * SIZE), torch.arange(SIZE, 2 * SIZE)))
    pages = torch.tensor([4, 2])
    kv.save(layout, memory, pages, slots)
    assert kv.differs(layout, memory[2], slots[SIZE:]) is None
    assert kv.differs(layout, memory[4], slots[SIZE:]) == 1
    assert not memory[[0, 1, 3]].any()
    k, v = pool.k_buffer[1][slots].clone(), pool.v_buffer[1][slots].clone()
    others = pool.k_buffer[0].clone()
    target = torch.cat((torch.arange(6 * SIZE, 7 * SIZE), torch.arange(5 * SIZE, 6 * SIZE)))
    fill = kv.restored_layer(1).fill
    assert fill is not None
    fill(memory[pages, layout.segment(1)].contiguous(), target, target)
    assert torch.equal(pool.k_buffer[1][target], k)
    assert torch.equal(pool.v_buffer[1][target], v)
    assert torch.equal(pool.k_buffer[0], others)


def test_hidden_states_wait_in_the_slots_of_their_v() -> None:
    pool = kv_pool(8)
    row_bytes = pool.v_buffer[1][0].nbytes - 8
    assert PoolParking.fits(pool, row_bytes)
    assert not PoolParking.fits(pool, row_bytes + 16)  # as with few KV heads
    assert not PoolParking.fits(pool, row_bytes - 4)
    parking = PoolParking(pool, 1, row_bytes)
    segments = torch.randint(0, 256, (2, SIZE * row_bytes), dtype=torch.uint8)
    slots = torch.cat((torch.arange(3 * SIZE, 4 * SIZE), torch.arange(SIZE, 2 * SIZE)))
    others = (*pool.k_buffer, pool.v_buffer[0])
    for buffer in others:
        buffer.fill_(1)
    parking.put(segments, slots)
    assert torch.equal(parking.take(slots).view(2, -1), segments)
    assert all((buffer == 1).all() for buffer in others)


class HostPages:
    """What the planner asks of the host pool: page i holds the positions from i * size on."""

    page_size = SIZE
    page_layout = PageLayout(SIZE, (64,) * 4)

    def __init__(self) -> None:
        self.arena = self
        self.memory = np.zeros((8, self.page_layout.page_bytes), np.uint8)
        for page in range(8):
            self.page_layout.positions(self.memory)[page] = np.arange(SIZE) + page * SIZE
            self.page_layout.token_ids(self.memory)[page] = page
        self.first = 0

    def pages_of(self, host_indices: torch.Tensor) -> list[np.ndarray]:
        return [self.memory[page] for page in host_indices.tolist()]

    def physical(self, host_pages: np.ndarray) -> np.ndarray:
        return host_pages

    def first_layer(self, host_indices: torch.Tensor) -> int:
        return self.first


def planner(
    host: HostPages, partition: Partition, recomputer: object = None, **fields: Any
) -> LoadPlanner:
    parts = Partitioning(partition, None, None, 1024, **fields)
    return LoadPlanner(host, parts, recomputer, "cpu")  # type: ignore[arg-type]


class Recomputer:
    """Notes what it was to recompute."""

    def run(
        self, layers: int, token_ids: torch.Tensor, positions: Any, slots: Any, spans: Any
    ) -> None:
        self.tokens = token_ids.tolist()
        self.spans = [(span.tokens, span.prefix.tolist()) for span in spans]


class TestQueuedLoads:
    def test_whole_pages_are_loaded_whole(self) -> None:
        loads = planner(HostPages(), Partition(0, 4, 0))
        span = loads.span(torch.tensor([0, 1]))
        assert span is not None
        loads.add(span)
        assert loads.next_recompute() is None

    def test_what_is_restored_already_is_not_recomputed(self) -> None:
        loads = planner(HostPages(), Partition(2, 2, 0), SimpleNamespace(), can_recompute=True)
        loads._partitioning = SimpleNamespace(first_layers=lambda *_: 4)  # type: ignore[assignment]
        for any_ready, layers in ((False, 4), (True, 2)):
            span = loads.span(torch.tensor([0, 1]))
            assert span is not None
            loads.add(span)
            recompute = loads.next_recompute(any_ready=any_ready)
            assert recompute is not None and recompute.layers == layers

    def test_layers_that_are_not_stored_need_the_prefix(self) -> None:
        loads = planner(HostPages(), Partition(2, 2, 0), SimpleNamespace())
        assert loads.span(torch.tensor([1, 2])) is None  # nobody said what is before page 1
        loads.prefix = lambda: torch.arange(SIZE - 1)
        assert loads.span(torch.tensor([1, 2])) is None  # that is not all of it
        loads.prefix = lambda: torch.arange(SIZE)
        span = loads.span(torch.tensor([1, 2]))
        assert span is not None and span.missing == 2
        loads.add(span)
        recompute = loads.next_recompute()
        assert recompute is not None and recompute.layers == 2
        assert loads.next_recompute() is None  # it was for that restore only

    def test_pages_that_do_not_follow_each_other_are_not_recomputed(self) -> None:
        loads = planner(HostPages(), Partition(1, 3, 0), SimpleNamespace())
        assert loads.span(torch.tensor([0, 2])) is None

    def test_pages_without_first_layers_need_somebody_who_recomputes(self) -> None:
        host = HostPages()
        host.first = 3
        assert planner(host, Partition(0, 4, 0)).span(torch.tensor([0])) is None
        loads = planner(host, Partition(0, 4, 0), SimpleNamespace())
        span = loads.span(torch.tensor([0]))
        assert span is not None
        loads.add(span)
        recompute = loads.next_recompute()
        assert recompute is not None and recompute.layers == 3

    def test_one_load_that_cannot_be_recomputed_keeps_out_those_that_must(self) -> None:
        host = HostPages()
        loads = planner(host, Partition(0, 4, 0), SimpleNamespace())
        unknown = loads.span(torch.tensor([2]))
        assert unknown is not None and unknown.prefix is None
        loads.add(unknown)
        host.first = 1
        assert loads.span(torch.tensor([0])) is None
        assert loads.next_recompute() is None

    def test_only_pages_that_lack_layers_are_recomputed_behind_all_before_them(self) -> None:
        loads = planner(HostPages(), Partition(2, 2, 0), recomputer := Recomputer())
        loads.prefix = lambda: torch.arange(SIZE)
        span = loads.span(torch.tensor([1, 2, 3, 4]))
        assert span is not None
        slots = torch.cat([torch.arange(SIZE) + SIZE * page for page in (7, 3, 5, 2)])
        loads.add_lacking(span, slots, np.array([False, True, True, False]))
        recompute = loads.next_recompute(any_ready=True)
        assert recompute is not None and recompute.layers == 2
        recompute.fill(torch.empty(0), torch.empty(0))
        assert recomputer.spans == [
            (SIZE, list(range(SIZE))),
            (SIZE, [*range(SIZE), *slots[: 3 * SIZE].tolist()]),
        ]
        assert recomputer.tokens == [1] * SIZE + [4] * SIZE

    def test_nothing_is_recomputed_where_no_page_lacks_layers(self) -> None:
        loads = planner(HostPages(), Partition(2, 2, 0), Recomputer())
        span = loads.span(torch.tensor([0]))
        assert span is not None
        loads.add_lacking(span, torch.arange(SIZE), np.array([True]))
        assert loads.next_recompute(any_ready=True) is None

    def test_pages_of_a_prefetch_are_recomputed_behind_what_is_known(self) -> None:
        loads = planner(HostPages(), Partition(1, 3, 0), recomputer := Recomputer())
        pages, known = np.array([2, 3]), torch.arange(2 * SIZE) + 9
        assert loads.recompute_of(pages, 1, lambda: None) is None
        assert loads.recompute_of(pages, 1, lambda: known[1:]) is None  # that is not all of it
        assert loads.recompute_of(np.array([2, 4]), 1, lambda: known) is None
        recompute = loads.recompute_of(pages, 1, lambda: known)
        assert recompute is not None and recompute.layers == 1
        recompute.fill(torch.empty(0), torch.empty(0))
        assert recomputer.spans == [(2 * SIZE, known.tolist())]
        assert recomputer.tokens == [2] * SIZE + [3] * SIZE

    def test_dropped_loads_are_forgotten(self) -> None:
        loads = planner(HostPages(), Partition(1, 3, 0), SimpleNamespace())
        span = loads.span(torch.tensor([0]))
        assert span is not None
        loads.add(span)
        loads.forget()
        assert loads.next_recompute() is None


class TestPartition:
    def test_kv_takes_the_place_of_recomputation_that_is_not_possible(self) -> None:
        parts = Partitioning(Partition(1, 2, 1), None, None, 1024)
        assert parts.methods == ("recompute", "hidden", "hidden", "kv")
        without = parts.without_recompute("tensor parallelism")
        assert without.methods == ("kv", "hidden", "hidden", "kv")
        assert without.layers("hidden") == parts.layers("hidden")  # what is captured stays
        assert without.first_layers(100, 0, "none") == 0

    def test_ranks_recompute_what_they_must_and_no_more(self) -> None:
        """A bus so slow that one rank recomputes everything it may."""
        slow, fast = Rate(per_second=1.0), Rate(per_second=1e18)
        rates = {"hidden_copy": slow, "kv_load": slow, "projection": fast, "dense": fast}
        profile = Profile(
            device="none", source="a test", dtype="float32", l3=None, attention=fast, **rates
        )
        config = json.loads((CONFIGS / "gpt2.json").read_text())
        shape = shape_from_config(config, "a test")
        stored = Partition(1, shape.layers - 1, 0)
        alone = Partitioning(stored, profile, shape, 1024)
        assert alone.first_layers(100, 0, "none") == shape.layers
        assert replace(alone, ranks=2).first_layers(100, 0, "none") == 1

    def test_nothing_more_is_recomputed_where_layers_are_projected_during_the_prefetch(
        self,
    ) -> None:
        """What is recomputed is known before it is read; what L2 has, all can be recomputed."""
        slow, fast = Rate(per_second=1.0), Rate(per_second=1e18)
        rates = {"hidden_copy": slow, "kv_load": slow, "projection": fast, "dense": fast}
        profile = Profile(
            device="none", source="a test", dtype="float32", l3=slow, attention=fast, **rates
        )
        config = json.loads((CONFIGS / "gpt2.json").read_text())
        shape = shape_from_config(config, "a test")
        layerwise = Partitioning(Partition(1, shape.layers - 1, 0), profile, shape, 1024)
        eager = replace(layerwise, eager=True)
        assert layerwise.first_layers(100, 0, "first") == shape.layers
        assert eager.first_layers(100, 0, "first") == 1
        assert eager.first_layers(100, 0, "none") == shape.layers

    def test_options_decide_before_the_profile(self) -> None:
        hidden = parse_config({"mode": "hidden"}, "hcache")
        assert _fixed_partition(hidden, 4) == Partition(0, 4, 0)
        assert _fixed_partition(parse_config({}, "hcache"), 4) is None
        given = parse_config({"partition": {"recompute": 1, "kv": 3}}, "hcache")
        assert _fixed_partition(given, 4) == Partition(1, 0, 3)
        with pytest.raises(ConfigError, match="that is 4 layers, and the model has 5"):
            _fixed_partition(given, 5)
