"""Scenarios of loads: those that the scheduler queues, and those that eager restores prepared."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend import streams
from hcache_backend.arena import Arena
from hcache_backend.capture.hooks import RecomputedRows
from hcache_backend.host.loads import LoadQueue, QueuedLoad
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch.reservations import EagerRestores
from hcache_backend.restore.recompute import TokenSpan
from hcache_backend.restore.report import RunningRestore
from hcache_backend.sglang.disaggregation import before_sending_prefix
from tests.order.checker import Checker
from tests.order.scenario_capture import EncodingCodec
from tests.order.scenario_restore import GPU, PAGES, SIZE, WIDTH, Engine, Pool

_SOME_OF_EACH = Partition(recompute=2, hidden=2, kv=1)


class FreePages:
    """The device's pages as SGLang's allocator has them, in device memory; newest first."""

    def __init__(self) -> None:
        self._ids = torch.arange(PAGES, device=GPU)

    def count(self) -> int:
        return len(self._ids)

    def make_room(self, pages: int) -> None:
        pass

    def take(self, pages: int) -> torch.Tensor:
        taken, self._ids = self._ids[:pages], self._ids[pages:]
        return (taken[:, None] * SIZE + torch.arange(SIZE, device=GPU)).flatten()

    def give(self, slots: torch.Tensor) -> None:
        self._ids = torch.cat((slots[::SIZE] // SIZE, self._ids))


class Loading:
    """Loads and eager restores of one sequence, whose host page ``i`` is its page ``i``."""

    def __init__(
        self, checker: Checker, partition: Partition = _SOME_OF_EACH, codec: str = "none"
    ) -> None:
        methods = Restore(None, None, partition, chunk_tokens=4 * SIZE)
        self.checker, self.pool = checker, Pool(checker, methods.methods, codec=codec)
        self.engine = Engine(checker, self.pool)
        self.arena = Arena(self.pool.memory.numpy(), self.pool.layout, PAGES, PAGES)
        self.pipeline = self.pool.pipeline(4 * SIZE)
        self.queue = LoadQueue(self.arena, self.pipeline, methods, self.pool, GPU)  # type: ignore[arg-type]
        self.free = FreePages()
        self.eager = EagerRestores(SIZE, self.free, self._launch, limit=PAGES)
        self.before_prefetch = torch.empty(0, dtype=torch.int64, device=GPU)  # slots of its tokens
        self.saving = streams.new_stream(GPU, "saves")
        hidden, offsets = methods.layers("hidden"), self.pool.layout.segment_offsets
        self.staging: Any = SimpleNamespace(layers=len(hidden), width=WIDTH, dtype=torch.float32)
        self.capture: Any = SimpleNamespace(
            codec=EncodingCodec.of_rows(WIDTH, torch.float32),
            arena=self.arena,
            memory=self.pool.memory,
            segments=torch.tensor([offsets[layer] for layer in hidden], device=GPU),
            device=GPU,
        )

    def _launch(self, host_pages: npt.NDArray[np.int64], slots: torch.Tensor) -> RunningRestore:
        """As ``hcache_backend/prefetch/eager_loads.py``, which needs SGLang."""
        with self.checker.on(self.engine.loading):
            physical, first = self.arena.physical(host_pages), self.queue.stored_from
            return self.pipeline.start(physical, slots, None, first, ahead=True)

    def _recompute(self, prefetch: Hashable, page: int) -> None:
        """Likewise: a slice of one page."""
        pages = range(page, page + 1)
        slots = self.eager.slots(prefetch, pages).clone()  # nobody else keeps them
        before = self.eager.slots(prefetch, range(page))
        prefix = torch.cat((self.before_prefetch, before))
        span = TokenSpan(np.arange(len(prefix), len(prefix) + len(slots)), prefix)
        recompute = self.queue.recompute_pages(span, slots)
        assert recompute is not None
        rows = RecomputedRows(self.capture, self.staging, self.pool)  # type: ignore[arg-type]
        restore = self.pipeline.start_recomputation(rows.with_rows_taken(recompute))
        save = partial(self._save, self.eager.host_pages(prefetch, pages), slots, rows)
        restore.save_recomputed(self.saving, slots, save)
        self.eager.mark_recomputed(prefetch, pages, restore)

    def _save(
        self, host_pages: npt.NDArray[np.int64], slots: torch.Tensor, rows: RecomputedRows
    ) -> None:
        pages = self.arena.physical(host_pages)
        rows.save_rows(pages)
        self.pool.save(pages, slots)

    def load_behind_a_pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A load behind a prefix that a forward pass has just written; the slots of both."""
        prefix, slots = self.free.take(4), self.free.take(3)
        load = self.plan(range(4, 7), prefix)
        self.engine.forward(prefix)
        self.launch(load, slots)
        return slots, prefix

    def plan(self, pages: range, prefix: torch.Tensor) -> QueuedLoad:
        """A load of these pages, behind tokens in the slots ``prefix``."""
        load = self.queue.plan(np.array(pages), prefix.clone)  # SGLang makes it of a node's path
        assert load is not None
        return load

    def launch(self, load: QueuedLoad, slots: torch.Tensor) -> None:
        """HiCache queues and starts a load, and a forward pass uses it."""
        done = self.start(load, slots)
        self.engine.forward(slots.clone(), done)  # SGLang's has slots of its own

    def start(self, load: QueuedLoad, slots: torch.Tensor) -> list[Any]:
        """HiCache queues and starts a load; an event behind each layer."""
        engine = self.engine
        self.queue.add_load(load)
        engine.loads_wait()
        with self.checker.on(engine.loading):
            slots.record_stream(engine.loading)  # as HiCache does with its indices
            return engine.layers_done(self.queue.launch(slots))

    def begin(self, prefetch: Hashable, pages: range) -> None:
        self.eager.reserve(prefetch, list(pages), np.array(pages))
        self.engine.loads_wait()

    def arrived(self, prefetch: Hashable, pages: int, start: int = 0, front: int = 0) -> None:
        """Some pages of a prefetch are there, beside a forward pass over other tokens. Two behind
        its ``front`` are recomputed if it is read from the back."""
        self.eager.restore_arrived(prefetch, range(start, pages))
        for page in range(front, min(front + 2, start)):
            self._recompute(prefetch, page)
        self.forward(1)

    def hand_out(self, pages: range, prefix: torch.Tensor) -> torch.Tensor:
        """A load gets what was prepared for it; its slots."""
        load = self.plan(pages, prefix)
        load.prepared = self.eager.hand_out(load.host_pages)
        assert load.prepared is not None
        self.launch(load, load.prepared.slots)
        return load.prepared.slots

    def host_pages_are_read_to(self, pages: int) -> None:
        """The first host pages are freed, and L3 is read to there."""
        freed, stride = np.arange(pages), self.pool.layout.stride
        self.eager.host_freed(freed)
        self.checker.touch_pages(self.arena.physical(freed), stride, stride, "write")

    def forward(self, pages: int) -> None:
        """A forward pass over so many fresh pages, which are free again behind it."""
        self.eager.make_free(pages)
        slots = self.free.take(pages)
        self.engine.forward(slots)
        self.free.give(slots)


@contextmanager
def checked(checker: Checker, *args: Any, **kind: Any) -> Iterator[Loading]:
    """A scheduler's thread, from its first load on."""
    loading = Loading(checker, *args, **kind)
    checker.begin()
    with checker.on(loading.engine.schedule):
        yield loading


def loads(checker: Checker, **kind: Any) -> None:
    """``kind`` of pages: see :class:`Loading`."""
    with checked(checker, **kind) as loading:
        for _ in range(3):
            loading.free.give(torch.cat(loading.load_behind_a_pass()))


def loads_whose_recomputation_fails(checker: Checker) -> None:
    """Layers were to be recomputed that are stored, too: after a failure they are copied."""
    with checked(checker, Partition(recompute=0, hidden=0, kv=3)) as loading:
        loading.queue.methods = SimpleNamespace(  # type: ignore[assignment]
            first_layers=lambda *_: 2, ranks=1, recomputable=4
        )
        loading.pool.fails = True
        loading.load_behind_a_pass()


def eager(checker: Checker, **kind: Any) -> None:
    """Prefetches that are restored while they are read, handed out or given back."""
    with checked(checker, **kind) as loading:
        loading.begin("handed out", range(9))
        for pages in (2, 5, 9):
            loading.arrived("handed out", pages)
        loading.eager.end("handed out")
        loading.hand_out(range(9), loading.before_prefetch)

        loading.begin("given back", range(6))
        for pages in (3, 6):
            loading.arrived("given back", pages)
        loading.forward(loading.free.count() + 1)
        loading.host_pages_are_read_to(3)
        loading.forward(3)
        loading.eager.end("given back")


def eager_from_the_back(checker: Checker, partition: Partition) -> None:
    """Front pages are recomputed whole, and saved, while the others are read."""
    with checked(checker, partition) as loading:
        for handed_out in (True, False):
            loading.begin("met", range(9))
            loading.arrived("met", 9, start=7)
            loading.arrived("met", 9, start=4, front=2)
            loading.eager.end("met")
            if not handed_out:  # somebody takes what was reserved: the load copies from the host
                loading.forward(loading.free.count() + 9)
            loading.free.give(loading.hand_out(range(9), loading.before_prefetch))

        loading.begin("given back", range(6))
        loading.arrived("given back", 6, start=5)
        loading.host_pages_are_read_to(3)
        loading.forward(3)
        loading.eager.end("given back")


def eager_behind_what_was_restored_ahead(checker: Checker) -> None:
    """Pages are recomputed whole behind others that were copied by a prefetch whose pages were
    handed out: for a load that no forward pass has waited for."""
    with checked(checker, Partition(0, 0, 3)) as loading:
        loading.begin("handed out", range(4, 8))
        loading.eager.restore_arrived("handed out", range(4))
        load = loading.plan(range(4, 8), loading.before_prefetch)
        load.prepared = loading.eager.hand_out(load.host_pages)
        assert load.prepared is not None
        loading.before_prefetch = load.prepared.slots
        done = loading.start(load, load.prepared.slots)
        loading.begin("behind it", range(8, 11))
        loading.arrived("behind it", 3, start=2)
        loading.engine.forward(load.prepared.slots.clone(), done)


def eager_behind_a_pass(checker: Checker) -> None:
    """First layers of pages that were restored are recomputed at the load, behind a prefix that a
    forward pass has just written, and before pages that were not restored."""
    with checked(checker) as loading:
        loading.begin("late", range(4, 10))
        loading.arrived("late", 4)
        loading.eager.end("late")
        prefix = loading.free.take(4)
        loading.engine.forward(prefix)
        loading.hand_out(range(4, 10), prefix)


def sends(checker: Checker, *, at_once: bool = False) -> None:
    """A prefill server, whose transfer reads K and V from the moment on at which it is asked to.

    It is asked before a forward pass for what is on the device, which may be on its way there: for
    another request of the batch that loads it, and of the next ones. After the forward pass it is
    asked for all of it. With ``at_once`` nobody holds the first kind.
    """
    loading, transfer = Loading(checker), checker.stream("transfer")
    engine, running, sent = loading.engine, list[Any](), list[str]()
    cache = SimpleNamespace(cache_controller=SimpleNamespace(ack_load_queue=running))
    scheduler = SimpleNamespace(tree_cache=cache, enable_overlap=False)
    checker.begin()
    with checker.on(engine.schedule):
        for _ in range(3):
            prefix, slots = loading.free.take(4), loading.free.take(3)
            numbers = slots.tolist()  # SGLang hands the transfer numbers of pages

            def send(when: str, numbers: list[int] = numbers) -> None:
                sent.append(when)
                with checker.on(transfer):
                    for rows in (loading.pool.k, loading.pool.v):
                        rows[:, numbers].sum()

            def send_early(send: Callable[[str], None] = send) -> None:
                if at_once:
                    send("early")
                else:
                    req = SimpleNamespace(early_send_prefix_end=None)
                    before_sending_prefix(lambda *_: send("early"), scheduler, req)

            load = loading.plan(range(4, 7), prefix)
            engine.forward(prefix)
            done = loading.start(load, slots)
            running.append(engine.loading.record_event())
            send_early()
            engine.forward(slots.clone(), done)
            engine.forward_stream.record_event().synchronize()  # its results are there
            send("all")
            while running:  # HiCache's turns, until it sees that the load has ended
                send_early()
                running[:] = [event for event in running if not event.query()]
            send_early()
            transfer.record_event().synchronize()  # SGLang frees slots when all has been sent
            loading.free.give(torch.cat((slots, prefix)))
    assert sent.count("all") == 3
    assert at_once or sent == ["all", "early"] * 3, sent
