"""The slots that a restore's recomputation reads, if streams are late and memory is used again.

Slots of the tokens before a restore are made on one stream (SGLang's schedule stream), read by the
recomputation on another (that of forward passes), and dropped as soon as the restore is launched.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hcache_backend import streams
from hcache_backend.arena import Arena
from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.restore.layers import Recompute, RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.restore.recompute import TokenSpan

STANDS_IN = "tests.cuda_standin.plugin" in sys.modules
PAGE, WIDTH = 64, 64  # tokens of a page; bytes of a token
BEFORE, RESTORED = 64, 4  # pages before the restore, and of it
LATE_CYCLES = 100_000_000  # for which a stream is held up
JUNK, JUNK_TENSORS = -7, 64
LATE, FREED = "made late", "freed early"


def load_queue() -> Any:
    """The class of host/loads.py, also on a machine that lacks what metrics need."""
    if find_spec("prometheus_client") is None:
        stand_in: Any = ModuleType("hcache_backend.metrics")
        stand_in.timed = lambda stage: lambda work: work
        sys.modules.setdefault(stand_in.__name__, stand_in)
    from hcache_backend.host.loads import LoadQueue

    return LoadQueue


class Scene:
    """Pages whose first layer is recomputed and whose second is loaded. It stands for the model:
    ``recompute`` notes which slots recomputation would read and write."""

    def __init__(self) -> None:
        layout = PageLayout(PAGE, (RECOMPUTED, hidden_layer(PAGE, WIDTH, WIDTH)))
        memory = torch.zeros((RESTORED + 1, layout.stride), dtype=torch.uint8, pin_memory=True)
        first = BEFORE * PAGE
        tokens = np.arange(first, first + RESTORED * PAGE)
        layout.positions(memory.numpy())[:RESTORED] = tokens.reshape(RESTORED, PAGE)
        arena = Arena(memory.numpy(), layout, RESTORED, 1)
        self.physical = arena.physical(np.arange(RESTORED, dtype=np.int64))
        kv = torch.zeros((BEFORE + RESTORED) * PAGE, WIDTH, dtype=torch.uint8, device="cuda")

        def fill(
            _: range, segments: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
        ) -> None:
            kv[slots] = segments.view(-1, WIDTH)

        layers = [RestoredLayer("recompute"), RestoredLayer("hidden", fill)]
        self.pipeline = RestorePipeline(memory, layout, layers, RESTORED * PAGE, "cuda")
        self.forwards, self.loading = (
            streams.wrap_engine_stream(torch.cuda.Stream()),
            torch.cuda.Stream(),
        )
        self.stream = lambda: self.forwards
        methods = SimpleNamespace(layers=lambda method: range(1), methods=("recompute",))
        self.loads = load_queue()(arena, self.pipeline, methods, self, "cuda")
        self.seen_before = torch.zeros(first, dtype=torch.int64, device="cuda")
        self.slots = torch.from_numpy(tokens).to("cuda")
        self.seen_slots = torch.zeros_like(self.slots)
        self.rounds = 0

    def recompute(self, layers: int, slots: Any, spans: Any) -> None:
        self.seen_before.copy_(spans[0].prefix)
        self.seen_slots.copy_(slots)

    def by_product(self, span: TokenSpan, slots: torch.Tensor) -> Recompute:
        """Recomputation as slices and loads ask for it."""
        made: Recompute = self.loads.recompute_pages(span, slots)
        return made

    def by_hand(self, span: TokenSpan, slots: torch.Tensor) -> Recompute:
        """The same, that does not keep the prefix."""
        return Recompute(1, slots, partial(self.recompute, 1, slots, [span]), self.forwards)

    def is_right(
        self,
        case: str,
        recompute_of: Callable[[TokenSpan, torch.Tensor], Recompute],
        *,
        loads_wait: bool,
    ) -> bool:
        """Recomputation read the right slots. ``loads_wait``: as HiCache's stream of loads does for
        work that was launched before a load."""
        self.rounds += 1  # values of the round before are wrong in this one
        want = torch.arange(BEFORE * PAGE, device="cuda") + self.rounds
        slots, parts = self.slots.clone(), want.split(BEFORE * PAGE // 2)
        junk = self.junk(JUNK_TENSORS)
        torch.cuda.synchronize()
        del junk  # the next tensors take its memory
        if case == LATE:
            torch.cuda._sleep(LATE_CYCLES)
        prefix = torch.cat(parts)
        recompute = recompute_of(TokenSpan(np.empty(0, np.int64), prefix), slots)
        if loads_wait:
            self.loading.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.loading):
            if case == FREED:
                torch.cuda._sleep(LATE_CYCLES)
            restore = self.pipeline.start(self.physical, slots, recompute)
        del prefix, slots, recompute
        self.junk(2 * JUNK_TENSORS)  # takes their memory, unless they are kept
        restore.wait()
        torch.cuda.synchronize()
        right = torch.equal(self.seen_before, want)
        return right and torch.equal(self.seen_slots, self.slots)

    def junk(self, count: int) -> list[torch.Tensor]:
        sizes = (BEFORE * PAGE, RESTORED * PAGE)
        return [
            torch.full((n,), JUNK, dtype=torch.int64, device="cuda")
            for n in sizes
            for _ in range(count)
        ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", [LATE, FREED])
def test_recomputation_reads_the_slots_that_were_meant(case: str) -> None:
    """The first stream is held up, so a reader that does not wait reads the values before. Or the
    second one is, so a reader that does not keep the slots reads later values."""
    scene = Scene()
    assert scene.is_right(case, scene.by_product, loads_wait=True)
    if case == LATE or not STANDS_IN:  # the stand-in does not use memory again
        assert not scene.is_right(case, scene.by_hand, loads_wait=case != LATE)
