"""The check in service: backed-up pages are compared with the model's K and V.

- Behind a transfer, on its stream, a sample of its pages is compared with the pool. Results are
  read when they have arrived, without a wait.
- A check looks at a few layers, the next one at the next few: it is short for any model. Of K and V
  one layer is compared per turn, or one unit of an encoded one: a lossy codec takes milliseconds.
- Scheduler thread only; all tensor-parallel ranks must get to each step of a check at one point.
- If a rank cannot run its part of a check (out of memory, say), it abstains and follows the others.
- Checks rest while they have had more than their share of the thread's time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice, zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hcache_backend import metrics
from hcache_backend.arena import NOT_SETTLED, Ids
from hcache_backend.checks.sampling import InTurn, Pace, Sample
from hcache_backend.format.page import PageLayout
from hcache_backend.host.segments import KVSegments
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.check import difference_problem, projected_differences
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from hcache_backend.streams import (
    Event,
    HostBuffer,
    HostBuffers,
    StreamFailed,
    current_stream,
    to_device,
)
from hcache_backend.turn import Said, Turn
from hcache_kernels.codecs import Codec

_WAITING = 16  # no further page is chosen while this many wait for their comparison

_AT_ONCE = 4  # projections whose results are handled in one turn

_harmless = partial(metrics.harmless, "page_not_checked", "a page was not checked")


class _CopiedPage(NamedTuple):
    """Layers of a page in the pool, on the CPU once ``event`` has passed. ``left``: parts of slots
    to compare: their layers, K and V (uint8; None: not copied), number
    (:attr:`KVSegments.parts`)."""

    host_page: int
    left: deque[tuple[tuple[int, ...], torch.Tensor | None, int]]
    event: Event
    buffer: HostBuffer | None


_Checked = TypeVar("_Checked", bound="_CopiedPage | _RunningCheck")


def _copy_to_host(values: torch.Tensor, buffers: HostBuffers) -> HostBuffer:
    """A flat copy on its way to the CPU, on the current stream."""
    buffer = buffers.take(values.numel(), values.dtype)
    buffer.values.copy_(values.view(-1), non_blocking=True)
    return buffer


def _without(freed: Ids, checks: deque[_Checked]) -> deque[_Checked]:
    """``checks`` without those of ``freed`` host pages. Their buffers are not used again: a copy
    may still be on its way there."""
    gone = set(freed.tolist())
    return deque(check for check in checks if check.host_page not in gone)


class KVChecks:
    """Compares K and V of a sample of transfers with the pool. Values of the pool are copied once
    more, and encoded pages decoded, in another way. A page of a lossy codec may also be the code of
    the pool's values."""

    def __init__(self, runtime: Any, pool: Any, kv: KVSegments, group: Any) -> None:
        assert runtime.config is not None
        self.failed = False  # a page differed; the same on every rank
        self._runtime = runtime
        self._pool = pool
        self._kv = kv
        self._group = group
        self._sample = Sample(runtime.config.check_every_pages)
        self._layers = InTurn(kv.layers)
        self._copied: deque[_CopiedPage] = deque()
        self._buffers = HostBuffers(pool.device_pool.device)
        self._pace = Pace()
        self._tired = False  # on all ranks, or on none, as the next two
        self._compared = False  # in the last turn
        self._said: Said | None = None
        self._wrong: str | None = None  # on this rank

    def transferred(self, host_pages: Ids, slots: torch.Tensor) -> None:
        """Pages (int64 ``[n]``) were copied to or from ``slots`` (int64 ``[n * page_size]``, on the
        device), on the current stream."""
        size, i = self._pool.page_size, self._sample.choose(len(host_pages))
        if i is None or self._tired or len(self._copied) >= _WAITING:
            return
        layout = self._layout_of(int(host_pages[i]))
        together = [*dict.fromkeys(map(layout.sharing, self._layers.next()))]
        buffer, by_slot = None, []
        with self._pace.work(), _harmless():
            layers = [layer for slot in together for layer in slot]
            held = self._kv.held(layers, slots[i * size : (i + 1) * size])
            buffer = _copy_to_host(held, self._buffers)
            sizes = [sum(map(self._kv.bytes_of, slot)) for slot in together]
            by_slot = [*buffer.values.split(sizes)]
        event = current_stream(slots.device).record()
        left = deque(
            (slot, values, part)
            for slot, values in zip_longest(together, by_slot)
            for part in range(self._kv.parts)
        )
        self._copied.append(_CopiedPage(int(host_pages[i]), left, event, buffer))

    def freed(self, host_pages: Ids) -> None:
        self._copied = _without(host_pages, self._copied)

    def forget(self) -> None:
        self._copied.clear()

    def ask(self, turn: Turn) -> None:
        """Say if the first page can be compared, and the result of the last comparison."""
        self._said = None
        if not self.failed and (self._copied or self._tired or self._compared):
            there = bool(self._copied) and self._arrived(self._copied[0])
            self._said = turn.say(there, self._pace.rested, self._wrong is None)

    def hear(self) -> None:
        """The ranks have agreed: compare a part of a layer of the first page, if all can."""
        if self._said is None:
            return
        arrived, rested, right = self._said.least
        self._tired, self._compared = not rested, bool(arrived and rested and right)
        if not right:
            self.failed = True
            metrics.PROBLEMS.count("self_check")
            problem = self._wrong or "a page of another rank differs"
            self._runtime.lose_trust(f"the self-check in service failed: {problem}")
        if not self._compared:
            return
        copied = self._copied[0]
        with self._pace.work():
            self._wrong = self._problem(copied)
        if self._wrong is not None or not copied.left:
            metrics.TOKENS.count("checked", self._pool.page_size)
            self._copied.popleft()
            if copied.buffer is not None:
                self._buffers.give_back(copied.buffer)

    def _arrived(self, copied: _CopiedPage) -> bool:
        depth = self._pool.depth(np.array([copied.host_page]))
        return copied.event.query() and bool(depth[0] != NOT_SETTLED)

    def _problem(self, copied: _CopiedPage) -> str | None:
        try:
            copied.event.synchronize()
        except StreamFailed as failed:
            return str(failed)
        layers, held, part = copied.left.popleft()
        if held is None or self._pool.arena.depth(np.array([copied.host_page])).any():
            return None  # it was not copied, or it is lost
        layout = self._layout_of(copied.host_page)
        [page] = self._pool.arena.pages(np.array([copied.host_page]))
        segments = torch.from_numpy(page[layout.segment(layers[0])])
        if self._kv.holds(segments, held, part, layout, layers[0]):
            return None
        return f"K and V of layer {' and '.join(map(str, layers))} in a page are not the pool's"

    def _layout_of(self, host_page: int) -> PageLayout:
        [page] = self._pool.arena.pages(np.array([host_page]), header=True)
        layout = self._pool.page_layout.of(page)
        assert layout is not None
        return layout


class _RunningCheck(NamedTuple):
    """A comparison of some layers of a page with the pool, on the device until ``event``."""

    host_page: int
    layers: Sequence[AttentionLayer]  # whose hidden states were projected
    differences: HostBuffer | None  # of K and V, float64 [layers * 2]; None: not computed here
    problem: str | None  # reason why a layer could not be projected
    event: Event


class ServiceChecks:
    """Projects a sample of backups with hidden states and compares them with the pool. A wrong page
    costs the runtime its trust.

    With a spec each rank projects its own share of a page's tokens, with its own heads. An
    attention module may exchange every token with other ranks, so all ranks get the whole page.
    ``exchange``: between ranks that share tokens; None: pages are whole. ``order``: keeps
    collectives apart from those of forward passes; None: there are none.
    """

    def __init__(
        self,
        runtime: Any,
        pool: Any,
        hidden_layers: Sequence[AttentionLayer],
        codec: Codec,
        projector: Projector,
        exchange: Exchange | None,
        order: CollectiveOrder | None,
        group: Any,
    ) -> None:
        assert runtime.config is not None
        self.failed = False
        self._runtime = runtime
        self._pool = pool
        self._layers = InTurn(hidden_layers)
        self._codec = codec
        self._projector = projector
        self._exchange = exchange
        self._order = order
        self._group = group
        self._shares: torch.Tensor | None = None
        if exchange is not None and hidden_layers:
            # Taken now: a rank without memory for it would leave the others in a collective.
            share = pool.page_layout.segment(hidden_layers[0].index)
            shape = (exchange.shares, share.stop - share.start)
            self._shares = torch.empty(shape, dtype=torch.uint8, device=pool.device_pool.device)
        self._sample = Sample(runtime.config.check_every_pages)
        self._running: deque[_RunningCheck] = deque()
        self._buffers = HostBuffers(pool.device_pool.device)
        self._pace = Pace()
        self._tired = False  # on all ranks, or on none
        self._said: Said | None = None
        # A running check may project rows of the old weights with the new ones.
        runtime.on_weights_changed.append(self.forget)

    def backed_up(self, host_pages: Ids, slots: torch.Tensor) -> None:
        """Rows of ``host_pages`` (int64 ``[n]``) are there when the current stream gets here.
        ``slots``: of their tokens, int64 ``[n * page_size]``, on the device."""
        size, i = self._pool.page_size, self._sample.choose(len(host_pages))
        if i is None or self._tired or len(self._running) >= _WAITING:
            return
        slots, chosen = slots[i * size : (i + 1) * size], host_pages[i : i + 1]
        layers = self._layers.next()
        differences, problem = None, None
        with self._pace.work(), _harmless():
            differences, problem = self._project(layers, chosen, slots)
        event = current_stream(slots.device).record()
        self._running.append(_RunningCheck(int(chosen[0]), layers, differences, problem, event))

    def freed(self, host_pages: Ids) -> None:
        self._running = _without(host_pages, self._running)

    def forget(self) -> None:
        self._running.clear()

    def ask(self, turn: Turn) -> None:
        """Say which results have arrived."""
        self._said = None
        if self._running or self._tired:
            flags = []
            for check in islice(self._running, _AT_ONCE):
                # None: its rows have arrived, but it is not yet known if all did.
                whole = self._whole(check.host_page) if check.event.query() else None
                flags += [whole is not None, whole is not False]
            self._said = turn.say(self._pace.rested, *flags)

    def hear(self) -> None:
        """The ranks have agreed: handle the checks whose results have arrived on all."""
        if self._said is None:
            return
        rested, *flags = self._said.least
        self._tired = not rested
        for known, right in zip(flags[::2], flags[1::2], strict=True):
            if not known:
                return
            check = self._running.popleft()
            problem = self._problem(check) if right else None
            self.failed |= problem is not None
            if problem is not None and self._runtime.distrust is None:
                metrics.PROBLEMS.count("self_check")
                self._runtime.lose_trust(f"the self-check in service failed: {problem}")

    def _whole(self, host_page: int) -> bool | None:
        return self._pool.arena.whole(np.array([host_page]))

    def _project(
        self, layers: Sequence[AttentionLayer], host_page: Ids, slots: torch.Tensor
    ) -> tuple[HostBuffer | None, str | None]:
        """Differences of ``layers`` of a page from the pool, float64 ``[layers * 2]``, on their way
        to the CPU, or None if not all were compared; and the reason why a layer cannot be
        projected, or None. All ranks get to the exchange of each layer, even if one raises; the
        collectives of an attention module are not covered. Raises ExchangeFailed on all ranks."""
        layout, device = self._pool.page_layout, slots.device
        page = self._pool.kv_buffer[int(self._pool.arena.physical(host_page)[0])]
        by_module = [layer for layer in layers if self._projector.specs[layer.index] is None]
        kept, every = slice(layout.kept.start, layout.kept.stop), slice(layout.page_size)
        differences, problem = [], None
        positions: torch.Tensor | None = None
        now = current_stream(device)
        if by_module and self._order is not None:
            self._order.restore_begins(now)
        try:
            for layer in layers:
                rows, tokens = page[layout.segment(layer.index)], kept
                if layer in by_module and self._exchange is not None:
                    rows, tokens = self._all_shares(self._exchange, rows), every
                with _harmless():
                    if positions is None:
                        positions = to_device(self._positions(host_page), device)
                    rows = rows.to(device, non_blocking=True).view(-1, self._codec.row_bytes)
                    hidden, where = self._codec.decode(rows), (positions[tokens], slots[tokens])
                    found = projected_differences(layer, hidden, *where, self._projector)
                    if isinstance(found, str):
                        problem = problem or found
                    else:
                        differences.append(found)
        finally:
            if by_module and self._order is not None:
                self._order.restore_launched(now)
        if not differences or len(differences) < len(layers):
            return None, problem
        return _copy_to_host(torch.stack(differences), self._buffers), None

    def _positions(self, host_page: Ids) -> Ids:
        """Positions of a page's tokens, int64 ``[page_size]``. A lost page has none, but other
        ranks, whose pages may be whole, wait for this one's rows."""
        layout, arena = self._pool.page_layout, self._pool.arena
        if arena.whole(host_page) is False:
            return np.arange(layout.page_size)
        [header] = arena.pages(host_page, header=True)
        return layout.positions(header).astype(np.int64)

    def _all_shares(self, exchange: Exchange, own: torch.Tensor) -> torch.Tensor:
        """A segment of the whole page, uint8 ``[shares, bytes]``, of which this rank has ``own``;
        valid until the next call, on the current stream. Raises ExchangeFailed on all ranks."""
        shares = self._shares
        assert shares is not None

        def fetch(there: torch.Tensor) -> None:
            there.copy_(own, non_blocking=True)

        if exchange.on_scheduler_thread:
            exchange.gather_now([(shares, fetch)])
        else:
            exchange.gather(shares, fetch)
        return shares

    def _problem(self, check: _RunningCheck) -> str | None:
        try:
            check.event.synchronize()
        except StreamFailed:  # capture broke, and nothing is backed up any more
            return None
        if check.differences is None:
            return check.problem
        metrics.TOKENS.count("checked", self._pool.page_size)
        differences = check.differences.values.view(-1, 2).tolist()
        self._buffers.give_back(check.differences)
        for layer, found in zip(check.layers, differences, strict=True):
            problem = difference_problem(layer, found, self._projector, self._codec.name)
            if problem is not None:
                return problem
        return None
