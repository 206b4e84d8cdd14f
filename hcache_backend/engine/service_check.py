"""The check in service: is a backed-up page what the model's K and V say?

A sample of every backup is compared once it has arrived. A check talks to the other tensor-parallel
ranks, so every rank has to get to it at the same point; what one of them lacks is not checked.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hcache_backend.arena import Ids
from hcache_backend.capture.staging import StagedCapture
from hcache_backend.engine import metrics
from hcache_backend.engine.host_pool import HiddenStatePool, OwnPagesPool
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.page import PageLayout
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.check import first_problem, projection_problem
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import Exchange, ExchangeFailed
from hcache_backend.streams import Event, StreamFailed, current_stream, host_tensor
from hcache_kernels.codecs import Codec

logger = logging.getLogger("hcache")


@dataclass(frozen=True)
class PageCheck:
    """Compares a page with the pool.

    Attributes:
        hidden_layers: Layers that are stored as hidden states.
        kv: Layers that are stored as K and V.
        exchange: Between the ranks that share the tokens of every page; None: pages are whole.
    """

    layout: PageLayout
    codec: Codec
    hidden_layers: Sequence[AttentionLayer]
    kv: KVSegments
    projector: Projector
    exchange: Exchange | None

    def __call__(self, page: torch.Tensor, slots: torch.Tensor) -> str | None:
        """Why ``page`` is not what the pool says, or None. All ranks must call it.

        Args:
            page: uint8 ``[page_bytes]``, on the CPU; no row of it was lost.
            slots: Slots of its tokens, int64 ``[page_size]``, on the device.

        Raises:
            ExchangeFailed: Another rank has no page to show.
        """
        header, device = page.numpy(), slots.device
        size = self.layout.page_size
        positions = torch.from_numpy(self.layout.positions(header)).to(device, torch.int64)
        metrics.TOKENS.count("checked", size)

        def problem_of(layer: AttentionLayer) -> str | None:
            segment = page[self.layout.segment(layer.index)]
            if self.exchange is not None:
                segment = self.exchange.whole(segment)
            hidden = self.codec.decode(segment.view(size, -1).to(device))
            return projection_problem(
                layer, hidden, positions, slots, self.projector, self.codec.name
            )

        problem = first_problem(map(problem_of, self.hidden_layers))
        if problem is None and self.kv.layers:
            problem = _kv_problem(self.kv, self.layout, page, self.kv.held(slots).cpu())
        return problem


def _kv_problem(
    kv: KVSegments, layout: PageLayout, page: torch.Tensor, held: torch.Tensor
) -> str | None:
    layer = kv.differs(layout, page, held)
    return None if layer is None else f"K and V of layer {layer} in a page are not the pool's"


class _Sample:
    """One of every so many pages; 0: none. The same on every rank."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._pages_before = 0

    def choose(self, pages: int) -> int | None:
        """Which of the next ``pages`` pages, if one."""
        if self._every == 0:
            return None
        if self._pages_before >= pages:
            self._pages_before -= pages
            return None
        chosen = self._pages_before
        self._pages_before = self._every - 1 - (pages - 1 - chosen) % self._every
        return chosen


class _CopiedPage(NamedTuple):
    """What the pool held of a page: uint8, on the CPU once ``event`` has passed."""

    host_page: int
    held: torch.Tensor
    event: Event


class KVChecks:
    """Is a page of K and V what the pool holds? A sample of backups and of loads is compared.

    Behind a transfer, on its stream, what the pool holds is copied once more, in another way; it is
    compared when it has arrived, and nobody waits. Scheduler thread only.

    Args:
        group: The tensor-parallel ranks.

    Attributes:
        failed: A page differed. The same on every rank.
    """

    def __init__(self, runtime: Runtime, pool: OwnPagesPool, kv: KVSegments, group: Any) -> None:
        assert runtime.config is not None
        self.failed = False
        self._runtime = runtime
        self._pool = pool
        self._kv = kv
        self._group = group
        self._sample = _Sample(runtime.config.check_every_pages)
        self._copied: deque[_CopiedPage] = deque()

    def transferred(self, host_pages: Ids, slots: torch.Tensor) -> None:
        """Pages (int64 ``[n]``) were copied to or from ``slots``, on the current stream.

        ``slots`` are int64 ``[n * page_size]``, on the device.
        """
        size, i = self._pool.page_size, self._sample.choose(len(host_pages))
        if i is None:
            return
        held = self._kv.held(slots[i * size : (i + 1) * size])
        target = host_tensor(held.shape, torch.uint8, held.device)
        target.copy_(held, non_blocking=True)
        event = current_stream(held.device).record()
        self._copied.append(_CopiedPage(int(host_pages[i]), target, event))

    def freed(self, host_pages: Ids) -> None:
        """HiCache has freed ``host_pages`` (int64 ``[n]``): others may write them."""
        gone = set(host_pages.tolist())
        self._copied = deque(copied for copied in self._copied if copied.host_page not in gone)

    def forget(self) -> None:
        """All transfers were dropped."""
        self._copied.clear()

    def run(self) -> None:
        """Compare what has arrived on every rank. All must call it at one point."""
        while self._copied:
            (arrived,) = on_all_ranks(self._group, self._copied[0].event.query())
            if not arrived:
                return
            problem = self._problem(self._copied.popleft())
            (right,) = on_all_ranks(self._group, problem is None)
            if not right:
                self.failed = True
                metrics.PROBLEMS.count("self_check")
                problem = problem or "a page of another rank differs"
                self._runtime.lose_trust(f"the self-check in service failed: {problem}")

    def _problem(self, copied: _CopiedPage) -> str | None:
        metrics.TOKENS.count("checked", self._pool.page_size)
        try:
            copied.event.synchronize()
        except StreamFailed as failed:
            return str(failed)
        [page] = self._pool.arena.pages(np.array([copied.host_page]))
        layout = self._pool.page_layout
        return _kv_problem(self._kv, layout, torch.from_numpy(page), copied.held)


class _ChosenPage(NamedTuple):
    """A page of a backup that is to be compared with the pool."""

    slots: torch.Tensor
    host_page: int
    device_page: int


class ServiceChecks:
    """Chosen pages of backups, and what is due. Scheduler thread only.

    The runtime loses its trust when a page is wrong; ``group`` are the tensor-parallel ranks.
    """

    def __init__(
        self,
        runtime: Runtime,
        pool: HiddenStatePool,
        capture: StagedCapture,
        check_page: PageCheck,
        group: Any,
    ) -> None:
        self._runtime = runtime
        self._pool = pool
        self._capture = capture
        self._check_page = check_page
        self._group = group
        assert runtime.config is not None
        self._sample = _Sample(runtime.config.check_every_pages)
        self._chosen: list[_ChosenPage] = []
        self._due: deque[_ChosenPage] = deque()

    def choose(self, device_indices: torch.Tensor, slots: Ids, host_pages: Ids) -> None:
        """One page in ``check_every_pages`` of a backup will be compared.

        Args:
            device_indices: Slots of its tokens, int64 ``[n]``, on the device.
            slots: The same on the CPU.
            host_pages: Where they are backed up to, int64 ``[n / page_size]``.
        """
        size, i = self._pool.page_size, self._sample.choose(len(host_pages))
        if i is None:
            return
        rows = slice(i * size, (i + 1) * size)
        page = _ChosenPage(device_indices[rows], int(host_pages[i]), int(slots[i * size]) // size)
        self._chosen.append(page)

    def backups_launched(self) -> None:
        """The backups that pages were chosen of are on their way."""
        self._due.extend(self._chosen)
        self._chosen.clear()

    def forget_chosen(self) -> None:
        """Backups that were not launched yet were dropped."""
        self._chosen.clear()

    def run_due(self) -> None:
        """Compare all that is due."""
        self._run(len(self._due))

    def run_until(self, host_pages: Ids) -> None:
        """Compare what is due of ``host_pages`` (int64 ``[n]``), and of backups before them."""
        wanted = set(host_pages.tolist())
        due = [i for i, chosen in enumerate(self._due) if chosen.host_page in wanted]
        self._run(due[-1] + 1 if due else 0)

    def _run(self, number: int) -> None:
        """Compare the oldest ``number`` chosen pages; every rank does so at the same point."""
        for _ in range(number):
            chosen = self._due.popleft()
            page = self._page_to_check(chosen)
            (everywhere,) = on_all_ranks(self._group, page is not None)
            if page is None or not everywhere:
                continue
            try:
                problem = self._check_page(page, chosen.slots)
            except ExchangeFailed as error:  # on all ranks
                logger.warning("hcache: a page was not checked: %s", error)
                continue
            if problem is not None:
                metrics.PROBLEMS.count("self_check")
                self._runtime.lose_trust(f"the self-check in service failed: {problem}")

    def _page_to_check(self, chosen: _ChosenPage) -> torch.Tensor | None:
        """The page (uint8 ``[page_bytes]``), if it is one and its tokens are still on the device.

        None also where it cannot be read any more.
        """
        try:
            # Its host page may have been freed since, and filled by a later backup.
            self._pool.backed_up().synchronize()
        except StreamFailed:
            return None
        self._capture.ledger.settle()
        arena = self._capture.arena
        if self._runtime.distrust is not None or not arena.is_home(
            chosen.host_page, chosen.device_page
        ):
            return None
        physical = arena.physical(np.array([chosen.host_page]))[0]
        arena.host_access(np.array([physical]), write=False)
        whole = arena.layout.is_stamped(arena.memory[physical])
        return self._pool.kv_buffer[physical] if whole else None
