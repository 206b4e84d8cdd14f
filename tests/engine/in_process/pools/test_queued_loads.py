"""Queued loads: what of them is recomputed, behind what, and what becomes of failures."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.host.loads import LoadQueue, Prepared, QueuedLoad
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.restore.layers import Recompute
from hcache_backend.restore.recompute import TokenSpan
from hcache_backend.sglang import radix_cache
from hcache_backend.sglang.hook_registry import guarded
from hcache_backend.sglang.radix_cache import TURN
from hcache_backend.streams import Stream, current_stream
from tests.kit.host import PAGE
from tests.kit.turns import alone

SIZE = PAGE


class HostPages:
    """What the queue asks of the arena: page i holds the positions from i * size on."""

    layout = PageLayout(SIZE, (hidden_layer(SIZE, 8, 8),) * 4)

    def __init__(self) -> None:
        self.memory = np.zeros((8, self.layout.stride), np.uint8)
        for page in range(8):
            self.layout.positions(self.memory)[page] = np.arange(SIZE) + page * SIZE
            self.layout.token_ids(self.memory)[page] = page

    def pages(self, host_pages: np.ndarray, *, header: bool = False) -> list[np.ndarray]:
        return [self.memory[page] for page in host_pages]

    def host_access(self, pages: np.ndarray, *, write: bool, header: bool = False) -> None:
        assert not write

    def physical(self, host_pages: np.ndarray) -> np.ndarray:
        return host_pages


class Pipeline:
    """Notes which pages it restores, and how they are recomputed; a recomputation ends with
    ``problem``."""

    def __init__(self) -> None:
        self.pages: list[list[int]] = []
        self.recomputed: list[Recompute | None] = []
        self.problem: Exception | None = None

    def mark_handed_out(self) -> None:
        pass

    def start(self, pages: Any, slots: Any, recompute: Recompute | None = None) -> Any:
        self.pages.append(pages.tolist())
        self.recomputed.append(recompute)
        problem = self.problem if recompute is not None else None
        return SimpleNamespace(failed=problem, layers=[current_stream("cpu").record()])


class Recomputer:
    """Notes what it was to recompute; of so many first layers, or of all."""

    def __init__(self, layers: int = 0) -> None:
        self.layers = layers

    def stream(self) -> Stream:
        return current_stream("cpu")

    def recompute(self, layers: int, slots: torch.Tensor, spans: Any) -> None:
        self.slots = slots.tolist()
        self.tokens = [token for span in spans for token in span.token_ids.tolist()]
        self.spans = [(len(span.token_ids), span.prefix.tolist()) for span in spans]


def queue(partition: Partition, recomputer: Recomputer | None = None, **fields: Any) -> Any:
    """Of loads of pages that are divided so."""
    recomputer = recomputer or Recomputer()
    recomputer.layers = recomputer.layers or partition.layers
    parts = Restore(None, None, partition, chunk_tokens=1024, **fields)
    return LoadQueue(HostPages(), Pipeline(), parts, recomputer, "cpu")  # type: ignore[arg-type]


def plan(loads: Any, *pages: int, known: int | None = None) -> QueuedLoad | None:
    """A load of ``pages``, of which the slots of ``known`` tokens before them are known."""
    prefix = None if known is None else torch.arange(known)
    found: QueuedLoad | None = loads.plan(np.array(pages), lambda: prefix)
    return found


def add(loads: Any, load: QueuedLoad | None, *ready: bool) -> torch.Tensor:
    """Queue ``load``; other restores wrote the ``ready`` ones of its pages. Its slots."""
    assert load is not None
    slots = torch.arange(SIZE * len(load.host_pages)).flip(0)
    if ready:
        load.prepared = Prepared(slots, np.array(ready), (SimpleNamespace(),))
    loads.add_load(load)
    return slots


def recomputed(loads: Any, *, only_unstored: bool = False) -> Any:
    """How the queued loads are recomputed, which are queued no more."""
    loads_now, loads._queued = loads._queued, []
    return loads._recompute_queued(loads_now, torch.empty(0), only_unstored=only_unstored)


def no_memory(loads: Any) -> list[str]:
    """From now on every recomputation fails. Why pages cannot be restored any more."""
    told: list[str] = []
    loads._pipeline.problem, loads._on_failure = RuntimeError("out of memory"), told.append
    return told


def test_what_is_restored_already_is_not_recomputed() -> None:
    loads = queue(Partition(2, 2, 0), recomputable=4)
    loads.methods = SimpleNamespace(first_layers=lambda *_: 4, recomputable=4)
    for only_unstored, layers in ((False, 4), (True, 2)):
        add(loads, plan(loads, 0, 1))
        assert recomputed(loads, only_unstored=only_unstored).layers == layers


def test_layers_that_are_not_stored_need_the_prefix() -> None:
    loads = queue(Partition(2, 2, 0))
    assert plan(loads, 1, 2) is None  # nobody said what is before page 1
    assert plan(loads, 1, 2, known=SIZE - 1) is None  # that is not all of it
    assert plan(loads, 0, 2) is None  # they do not follow each other
    load = plan(loads, 1, 2, known=SIZE)
    assert loads.stored_from == 2
    loads.launch(add(loads, load))
    [recompute] = loads._pipeline.recomputed
    assert recompute.layers == 2
    assert not loads._queued  # it was for that restore only


@pytest.mark.parametrize("ready", [(True, False, True), (True, True, True)])
def test_first_layers_that_are_not_stored_are_recomputed_for_all_loads(
    ready: tuple[bool, ...],
) -> None:
    """Also for pages whose other layers were restored while L3 was read."""
    loads = queue(Partition(2, 2, 0), recomputer := Recomputer(), recomputable=4)
    loads.methods = SimpleNamespace(first_layers=lambda *_: 4, recomputable=4)
    slots = add(loads, plan(loads, 1, 2, 3, known=SIZE), *ready)
    slots = torch.cat((slots, 99 + add(loads, plan(loads, 4, 5, known=4 * SIZE), True, True)))
    loads.launch(slots)
    assert loads._pipeline.pages == [[2] if False in ready else []]
    [recompute] = loads._pipeline.recomputed
    assert recompute.layers == 2 and recompute.slots is slots
    recompute.fill()
    assert recomputer.slots == slots.tolist()
    assert recomputer.spans == [
        (3 * SIZE, [*range(SIZE)]),
        (2 * SIZE, [*range(4 * SIZE)]),
    ]
    assert recomputer.tokens == [page for page in range(1, 6) for _ in range(SIZE)]


def test_nothing_is_recomputed_of_loads_that_get_pages_with_all_layers() -> None:
    loads = queue(Partition(0, 4, 0), recomputable=4)
    loads.methods = SimpleNamespace(first_layers=lambda *_: 4, recomputable=4)
    loads.launch(add(loads, plan(loads, 0, 1), True, True))
    assert loads._pipeline.pages == []
    loads.launch(add(loads, plan(loads, 0, 1), True, False))
    assert (loads._pipeline.pages, loads._pipeline.recomputed) == ([[1]], [None])


def test_what_prefills_took_lately_decides_what_a_load_recomputes() -> None:
    """Whoever wants the GPU: the forward pass behind it holds the GPU whatever comes first."""
    loads, asked = queue(Partition(1, 3, 0)), []
    loads.methods = SimpleNamespace(first_layers=lambda *a: asked.append(a) or 3, recomputable=4)
    loads._slowdown = lambda tokens: tokens / 50
    add(loads, plan(loads, 0))
    recomputed(loads)
    assert asked == [(SIZE, 0, SIZE / 50)]


def test_what_recomputes_whole_pages_does_nothing_to_loads_of_kv() -> None:
    """Their headers say nothing: a backup of K and V writes none."""
    loads = queue(Partition(0, 0, 4), recomputer := Recomputer(), recomputable=0)
    assert loads.recomputes_pages
    load = plan(loads, 1, 2, known=SIZE)
    add(loads, load, True, False)
    assert load is not None and load.span is None
    assert recomputed(loads, only_unstored=True) is None
    pages = TokenSpan(np.array([7, 8]), torch.arange(3)), torch.tensor([9, 10])
    recompute = loads.recompute_pages(*pages)
    assert recompute.layers == 4
    recompute.fill()
    assert (recomputer.tokens, recomputer.spans) == ([7, 8], [(2, [0, 1, 2])])
    assert recomputer.slots == [9, 10]
    loads.recomputation_failed(RuntimeError("out of memory"))
    assert not loads.recomputes_pages
    assert loads.recompute_pages(*pages) is None
    assert queue(Partition(0, 1, 3), recomputer).recomputes_pages
    assert not queue(Partition(1, 0, 3), recomputer).recomputes_pages


def test_stored_layers_that_cannot_be_recomputed_are_loaded() -> None:
    loads = queue(Partition(0, 4, 0), recomputable=4)
    loads.methods = SimpleNamespace(first_layers=lambda *_: 2, ranks=1, recomputable=4)
    told = no_memory(loads)
    assert len(loads.launch(add(loads, plan(loads, 0)))) == 2
    [tried, loaded] = loads._pipeline.recomputed
    assert tried is not None and loaded is None
    add(loads, plan(loads, 0))
    assert recomputed(loads) is None  # it is not tried again
    assert told == []


def test_nobody_gets_layers_that_are_stored_nowhere_and_were_not_recomputed() -> None:
    loads = queue(Partition(2, 2, 0))
    slots, told = add(loads, plan(loads, 0)), no_memory(loads)
    with pytest.raises(RuntimeError, match="out of memory"):
        loads.launch(slots)
    assert plan(loads, 0) is None
    assert told == ["layers that are not stored cannot be recomputed any more"]


def test_one_of_several_ranks_does_not_go_on_when_its_recomputation_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for it in the model's collectives."""
    process = SimpleNamespace(prefetches=Prefetches())
    monkeypatch.setattr(radix_cache, "current", lambda: process)
    loads = queue(Partition(2, 2, 0), ranks=2)

    def apply_slices() -> None:  # these are recomputed there
        loads.recomputation_failed(RuntimeError("out of memory"))

    fronts = SimpleNamespace(propose_slices=lambda *_: None, apply_slices=apply_slices)
    controller = SimpleNamespace(
        eager=SimpleNamespace(fronts=fronts, restore_arrived=lambda cache: []),
        node_backups=SimpleNamespace(propose_layouts=lambda turn: None),
        checks=[],
    )
    cache = SimpleNamespace(cache_controller=controller, _all_reduce_attn_groups=alone)
    cache.ongoing_prefetch = {}
    with pytest.raises(RuntimeError, match="out of memory"):
        guarded(TURN)(lambda cache: None, cache)


def test_what_lacks_layers_that_cannot_be_recomputed_is_no_hit() -> None:
    loads = queue(Partition(2, 4, 0), Recomputer(3), recomputable=3)
    assert not loads.recomputes_pages
    assert plan(loads, 0, 1) is not None
    loads._recomputer = Recomputer(1)
    assert plan(loads, 0, 1) is None


def test_dropped_loads_are_forgotten() -> None:
    loads = queue(Partition(1, 3, 0))
    add(loads, plan(loads, 0))
    loads.drop_queued()
    loads.launch(add(loads, plan(loads, 2, known=2 * SIZE)))
    assert loads._pipeline.pages == [[2]]


def test_a_count_that_fails_costs_no_restore(caplog: pytest.LogCaptureFixture) -> None:
    """It is on the scheduler thread, behind a load."""
    loads = queue(Partition(0, 4, 0))
    report = SimpleNamespace(tokens=4, bytes={}, total_ms=0.0)
    loads._pipeline.finished = lambda: [report]
    loads._on_restored = lambda tokens, seconds: tokens / seconds
    loads.count_finished()
    assert "restores could not be counted" in caplog.text


class Tensors(TorchDispatchMode):
    """Counts those that operations of torch take and give."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **kwargs or {})
        self.count += len(tree_leaves((args, given)))
        return given


def test_slots_of_many_pages_take_as_many_tensors_as_those_of_few() -> None:
    """Cut page by page, those of 128k tokens took the scheduler's thread 4 ms."""
    loads, counts = queue(Partition(0, 4, 0)), list[int]()
    for pages in (2, 64):
        slots, wanted = torch.arange(pages * SIZE), np.arange(pages) % 2 == 1
        with Tensors() as tensors:
            found = loads._slots(slots, wanted)
        counts.append(tensors.count)
        assert found.tolist() == [slot for slot in slots.tolist() if wanted[slot // SIZE]]
    assert counts[0] == counts[1]
