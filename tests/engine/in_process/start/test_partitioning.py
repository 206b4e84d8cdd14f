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
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.loads import LoadQueue, QueuedLoad
from hcache_backend.engine.recompute.batch import forward_stream
from hcache_backend.engine.startup.page_layout import page_layout
from hcache_backend.engine.startup.partition_choice import fixed_partition
from hcache_backend.engine.startup.quick_profile import copy_as_measured
from hcache_backend.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.partition import measure
from hcache_backend.partition.costs import Partition
from hcache_backend.partition.model_config import shape_from_config
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import CopyWay, Profile, Rate
from hcache_backend.restore.eager import HandOut
from hcache_backend.restore.layers import PoolParking, Recompute
from hcache_backend.streams import Stream, WorkerStream, current_stream
from hcache_backend.units import WHOLE
from hcache_kernels.codecs import make_codec
from tests.engine.in_process.pools.test_host_pool import PAGE, kv_pool

SIZE = PAGE
CONFIGS = Path(__file__).parents[3] / "unit" / "partition" / "configs"


def test_codes_that_encode_the_same_rows_otherwise_share_no_pages() -> None:
    """An earlier ``exp4`` had rows of the same length, which this one would decode to others."""
    methods = LayerMethods(Partition(0, 1, 0), None, None, 64)
    kv: Any = SimpleNamespace(layers=())
    codec = make_codec("exp4", 256, torch.bfloat16)
    layout = page_layout(64, methods, kv, codec, WHOLE)
    before = PageLayout(64, (hidden_layer(64, codec.row_bytes, 256, "exp4"),))
    assert layout.page_bytes == before.page_bytes
    assert layout.form != before.form


def test_kv_segments_come_back_to_other_slots_bit_for_bit() -> None:
    pool = kv_pool(8)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape))
    kv = KVSegments(pool, (1,), SIZE, WHOLE, 1)
    layout = PageLayout(SIZE, (RECOMPUTED, kv.stored_layer(1)))
    memory = torch.zeros((5, layout.page_bytes), dtype=torch.uint8)
    slots = torch.cat((torch.arange(3 * SIZE, 4 * SIZE), torch.arange(SIZE, 2 * SIZE)))
    pages = torch.tensor([4, 2])
    kv.save(layout, memory, pages, slots)
    held, segment = kv.held(kv.layers, slots[SIZE:]), layout.segment(1)
    assert kv.holds(memory[2, segment], held, 0)
    assert not kv.holds(memory[4, segment], held, 0)
    assert not memory[[0, 1, 3]].any()
    k, v = pool.k_buffer[1][slots].clone(), pool.v_buffer[1][slots].clone()
    others = pool.k_buffer[0].clone()
    target = torch.cat((torch.arange(6 * SIZE, 7 * SIZE), torch.arange(5 * SIZE, 6 * SIZE)))
    copy = kv.restored_layer(1).copy
    assert copy is not None
    copy(memory, pages, layout.segment_offsets[1], target)
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
    """What the queue asks of the arena: page i holds the positions from i * size on."""

    layout = PageLayout(SIZE, (hidden_layer(SIZE, 8, 8),) * 4)

    def __init__(self) -> None:
        self.memory = np.zeros((8, self.layout.page_bytes), np.uint8)
        for page in range(8):
            self.layout.positions(self.memory)[page] = np.arange(SIZE) + page * SIZE
            self.layout.token_ids(self.memory)[page] = page
        self.first = 0

    def pages(self, host_pages: np.ndarray, *, header: bool = False) -> list[np.ndarray]:
        return [self.memory[page] for page in host_pages]

    def host_access(self, pages: np.ndarray, *, write: bool, header: bool = False) -> None:
        assert not write

    def physical(self, host_pages: np.ndarray) -> np.ndarray:
        return host_pages

    def first_layers(self, host_pages: np.ndarray) -> np.ndarray:
        return np.full(len(host_pages), self.first)


class Pipeline:
    """Notes how what it restores is recomputed; a recomputation ends with ``problem``."""

    def __init__(self) -> None:
        self.recomputed: list[Recompute | None] = []
        self.problem: Exception | None = None

    def start(self, pages: Any, slots: Any, recompute: Recompute | None = None) -> Any:
        self.recomputed.append(recompute)
        problem = self.problem if recompute is not None else None
        return SimpleNamespace(failed=problem, layers=[current_stream("cpu").record()])


class Recomputer:
    """Notes what it was to recompute."""

    def stream(self) -> Stream:
        return current_stream("cpu")

    def run(self, layers: int, positions: Any, slots: Any, spans: Any) -> None:
        self.tokens = [token for span in spans for token in span.token_ids.tolist()]
        self.spans = [(len(span.token_ids), span.prefix.tolist()) for span in spans]


def queue(
    host: HostPages, partition: Partition, recomputer: object = None, **fields: Any
) -> LoadQueue:
    parts = LayerMethods(partition, None, None, 1024, **fields)
    return LoadQueue(host, Pipeline(), parts, recomputer, "cpu")  # type: ignore[arg-type]


def plan(loads: LoadQueue, *pages: int, known: int | None = None) -> QueuedLoad | None:
    """A load of ``pages``, of which the slots of ``known`` tokens before them are known."""
    return loads.plan(np.array(pages), lambda: None if known is None else torch.arange(known))


def add(loads: LoadQueue, load: QueuedLoad | None, *whole: bool) -> torch.Tensor:
    """Queue ``load``; other restores wrote the ``whole`` ones of its pages. Its slots."""
    assert load is not None
    slots = torch.arange(SIZE * len(load.host_pages)).flip(0)
    if whole:
        load.handed = HandOut(slots, np.array(whole), np.array(whole), (SimpleNamespace(),))
    loads.add(load, slots)
    return slots


def recomputed(loads: LoadQueue, *, any_ready: bool = False) -> Recompute | None:
    """How the queued loads are recomputed, which are queued no more."""
    loads_now, loads._queued = loads._queued, []
    return loads._recompute_queued(loads_now, any_ready=any_ready)


class TestQueuedLoads:
    def test_whole_pages_are_loaded_whole(self) -> None:
        loads = queue(HostPages(), Partition(0, 4, 0))
        add(loads, plan(loads, 0, 1))
        assert recomputed(loads) is None

    def test_what_is_restored_already_is_not_recomputed(self) -> None:
        loads = queue(HostPages(), Partition(2, 2, 0), Recomputer(), can_recompute=True)
        loads.methods = SimpleNamespace(first_layers=lambda *_: 4)  # type: ignore[assignment]
        for any_ready, layers in ((False, 4), (True, 2)):
            add(loads, plan(loads, 0, 1))
            recompute = recomputed(loads, any_ready=any_ready)
            assert recompute is not None and recompute.layers == layers

    def test_layers_that_are_not_stored_need_the_prefix(self) -> None:
        loads = queue(HostPages(), Partition(2, 2, 0), Recomputer())
        assert plan(loads, 1, 2) is None  # nobody said what is before page 1
        assert plan(loads, 1, 2, known=SIZE - 1) is None  # that is not all of it
        load = plan(loads, 1, 2, known=SIZE)
        assert load is not None and load.missing == 2
        slots = add(loads, load)
        pipeline: Any = loads._pipeline
        loads.launch(slots)
        [recompute] = pipeline.recomputed
        assert recompute is not None and recompute.layers == 2
        assert not loads._queued  # it was for that restore only

    def test_pages_that_do_not_follow_each_other_are_not_recomputed(self) -> None:
        loads = queue(HostPages(), Partition(1, 3, 0), Recomputer())
        assert plan(loads, 0, 2) is None

    def test_pages_without_first_layers_need_somebody_who_recomputes(self) -> None:
        host = HostPages()
        host.first = 3
        assert plan(queue(host, Partition(0, 4, 0)), 0) is None
        loads = queue(host, Partition(0, 4, 0), Recomputer())
        add(loads, plan(loads, 0))
        recompute = recomputed(loads)
        assert recompute is not None and recompute.layers == 3

    def test_one_load_that_cannot_be_recomputed_keeps_out_those_that_must(self) -> None:
        host = HostPages()
        loads = queue(host, Partition(0, 4, 0), Recomputer())
        unknown = plan(loads, 2)
        assert unknown is not None and unknown.spans == [None]
        add(loads, unknown)
        host.first = 1
        assert plan(loads, 0) is None
        assert plan(loads, 0) is None
        assert recomputed(loads) is None

    def test_only_pages_that_lack_layers_are_recomputed_behind_all_before_them(self) -> None:
        loads = queue(HostPages(), Partition(2, 2, 0), recomputer := Recomputer())
        slots = add(loads, plan(loads, 1, 2, 3, 4, known=SIZE), False, True, True, False)
        recompute = recomputed(loads, any_ready=True)
        assert recompute is not None and recompute.layers == 2
        recompute.fill(np.empty(0, np.int64), torch.empty(0))
        assert recomputer.spans == [
            (SIZE, list(range(SIZE))),
            (SIZE, [*range(SIZE), *slots[: 3 * SIZE].tolist()]),
        ]
        assert recomputer.tokens == [1] * SIZE + [4] * SIZE

    def test_nothing_is_recomputed_where_no_page_lacks_layers(self) -> None:
        loads = queue(HostPages(), Partition(2, 2, 0), Recomputer())
        slots = add(loads, plan(loads, 0), True)
        assert len(loads.launch(slots)) == 1  # what was handed out
        pipeline: Any = loads._pipeline
        assert pipeline.recomputed == []

    def test_pages_of_a_prefetch_are_recomputed_behind_what_is_known(self) -> None:
        loads = queue(HostPages(), Partition(1, 3, 0), recomputer := Recomputer())
        pages, known = np.array([2, 3]), torch.arange(2 * SIZE) + 9
        assert loads.recompute_of(pages, 1, lambda: None) is None
        assert loads.recompute_of(pages, 1, lambda: known[1:]) is None  # that is not all of it
        assert loads.recompute_of(np.array([2, 4]), 1, lambda: known) is None
        recompute = loads.recompute_of(pages, 1, lambda: known)
        assert recompute is not None and recompute.layers == 1
        recompute.fill(np.empty(0, np.int64), torch.empty(0))
        assert recomputer.spans == [(2 * SIZE, known.tolist())]
        assert recomputer.tokens == [2] * SIZE + [3] * SIZE

    def test_stored_layers_that_cannot_be_recomputed_are_loaded(self) -> None:
        loads = queue(HostPages(), Partition(0, 4, 0), Recomputer(), can_recompute=True)
        loads.methods = SimpleNamespace(first_layers=lambda *_: 2, ranks=1)  # type: ignore[assignment]
        pipeline: Any = loads._pipeline
        pipeline.problem = RuntimeError("out of memory")
        slots = add(loads, plan(loads, 0))
        assert len(loads.launch(slots)) == 2
        [tried, loaded] = pipeline.recomputed
        assert tried is not None and loaded is None
        add(loads, plan(loads, 0))
        assert recomputed(loads) is None  # it is not tried again

    def test_nobody_gets_layers_that_are_stored_nowhere_and_were_not_recomputed(self) -> None:
        loads = queue(HostPages(), Partition(2, 2, 0), Recomputer())
        pipeline: Any = loads._pipeline
        pipeline.problem = RuntimeError("out of memory")
        slots = add(loads, plan(loads, 0))
        with pytest.raises(RuntimeError, match="out of memory"):
            loads.launch(slots)
        assert plan(loads, 0) is None
        assert loads.recompute_of(np.array([0]), 2, lambda: None) is None

    @pytest.mark.parametrize("stored_from", [0, 2])
    def test_without_recomputation_pages_that_lack_layers_are_of_no_use(
        self, stored_from: int
    ) -> None:
        loads, told = queue(HostPages(), Partition(stored_from, 2, 0), Recomputer()), list[str]()
        loads.on_failed.append(told.append)
        for _ in range(2):
            loads.recomputation_failed(RuntimeError("out of memory"))
        reason = "layers that are not stored cannot be recomputed any more"
        assert told == ([reason] if stored_from else [])

    def test_one_of_several_ranks_does_not_go_on_when_its_recomputation_failed(self) -> None:
        """The others wait for it in the model's collectives."""
        loads = queue(HostPages(), Partition(2, 2, 0), Recomputer(), ranks=2)
        with pytest.raises(RuntimeError, match="out of memory"):
            loads.recomputation_failed(RuntimeError("out of memory"))

    def test_dropped_loads_are_forgotten(self) -> None:
        loads = queue(HostPages(), Partition(1, 3, 0), Recomputer())
        add(loads, plan(loads, 0))
        loads.forget()
        assert recomputed(loads) is None


@pytest.mark.parametrize(("overlap", "stages"), [(True, 1), (False, 2), (False, 1)])
def test_recomputation_goes_where_sglang_runs_forward_passes(overlap: bool, stages: int) -> None:
    args = SimpleNamespace(disable_overlap_schedule=not overlap, pp_size=stages)
    runner = SimpleNamespace(server_args=args, device="cpu", forward_stream=object())
    scheduler = WorkerStream("scheduler")
    with scheduler.as_current():
        on_the_schedulers = forward_stream(runner) is scheduler
    assert on_the_schedulers == (not overlap and stages == 1)


SLOW, FAST = Rate(per_second=1.0), Rate(per_second=1e18)


def slow_bus(l3: Rate | None) -> Profile:
    """A machine where everything that is copied takes long, and nothing else does."""
    rates = {"hidden_copy": SLOW, "kv_load": SLOW, "projection": FAST, "dense": FAST}
    return Profile(device="none", source="a test", dtype="float32", l3=l3, attention=FAST, **rates)


def gpt2() -> ModelShape:
    return shape_from_config(json.loads((CONFIGS / "gpt2.json").read_text()), "a test")


def test_a_server_copies_as_its_profile_found_to_be_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[tuple[int, bool]] = []
    monkeypatch.setattr(measure, "engine_works", lambda device: True)
    monkeypatch.setattr(
        measure, "use_copies", lambda programs, engine: used.append((programs, engine))
    )
    engine = CopyWay(programs=None, alone=5e10, beside=5e10, products=1.0)
    kernel = CopyWay(programs=8, alone=5e10, beside=4e10, products=0.9)
    whole = 64 * gpt2().hidden * gpt2().element_bytes
    for copies, segment in (
        ((kernel, engine), whole),
        ((engine, kernel), whole),
        ((engine, kernel), whole // 2 - 1),  # a page so small that the engine would be slower
        ((engine, kernel), 0),
        ((), whole),
    ):
        profile = slow_bus(None).model_copy(update={"copies": copies, "model": gpt2()})
        copy_as_measured(profile, "cpu", segment)
    assert used == [(8, False), (8, True), (8, False), (8, False)]


class TestPartition:
    def test_kv_takes_the_place_of_recomputation_that_is_not_possible(self) -> None:
        parts = LayerMethods(Partition(1, 2, 1), None, None, 1024)
        assert parts.methods == ("recompute", "hidden", "hidden", "kv")
        without = parts.without_recompute()
        assert without.methods == ("kv", "hidden", "hidden", "kv")
        assert without.layers("hidden") == parts.layers("hidden")  # what is captured stays
        assert without.first_layers(100, 0, "none") == 0

    def test_ranks_recompute_what_they_must_and_no_more(self) -> None:
        """A bus so slow that one rank recomputes everything it may."""
        profile, shape = slow_bus(l3=None), gpt2()
        stored = Partition(1, shape.layers - 1, 0)
        alone = LayerMethods(stored, profile, shape, 1024)
        assert alone.first_layers(100, 0, "none") == shape.layers
        assert replace(alone, ranks=2).first_layers(100, 0, "none") == 1

    def test_nothing_more_is_recomputed_where_layers_are_projected_during_the_prefetch(
        self,
    ) -> None:
        """What is recomputed is known before it is read; what L2 has, all can be recomputed."""
        profile, shape = slow_bus(l3=SLOW), gpt2()
        layerwise = LayerMethods(Partition(1, shape.layers - 1, 0), profile, shape, 1024)
        eager = replace(layerwise, eager=True)
        assert layerwise.first_layers(100, 0, "first") == shape.layers
        assert eager.first_layers(100, 0, "first") == 1
        assert eager.first_layers(100, 0, "none") == shape.layers

    def test_fewer_layers_are_recomputed_the_less_of_the_gpu_they_get(self) -> None:
        """Of layers that need not be; a share of nothing leaves those that must."""
        profile, shape = slow_bus(l3=SLOW), gpt2()
        parts = LayerMethods(Partition(1, shape.layers - 1, 0), profile, shape, 1024)
        shares = (1.0, 0.1, 1e-3, 1e-9, 0.0)
        layers = [parts.first_layers(100, 0, "first", share) for share in shares]
        assert layers == sorted(layers, reverse=True)
        assert layers[0] == shape.layers and layers[-2:] == [1, 1]

    def test_options_decide_before_the_profile(self) -> None:
        hidden = parse_config({"mode": "hidden"}, "hcache")
        assert fixed_partition(hidden, 4) == Partition(0, 4, 0)
        assert fixed_partition(parse_config({}, "hcache"), 4) is None
        given = parse_config({"partition": {"recompute": 1, "kv": 3}}, "hcache")
        assert fixed_partition(given, 4) == Partition(1, 0, 3)
        with pytest.raises(ConfigError, match="that is 4 layers, and the model has 5"):
            fixed_partition(given, 5)
