"""The check in service: is a backed-up page what the model's K and V say?

Behind a transfer, on its stream, a sample of its pages is compared with the pool; what comes of it
is read when it has arrived, and nobody waits. Of each such page a few layers are looked at, the
next time the next few: a check is short, however large the model is. Of K and V one layer is
compared per turn, or one unit of it where it is encoded: by a lossy codec that takes milliseconds.
Scheduler thread only; all tensor-parallel ranks must get to each step of a check at one point. A
rank that cannot make its part of a check, for want of memory say, has no opinion of the page, and
goes on with the others. Checks rest while they have had more than their share of the thread's time.
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

_WAITING = 16
"""While so many pages wait for their comparison, no further one is chosen."""

_AT_ONCE = 4
"""Projections whose results are seen to in one turn."""

_harmless = partial(metrics.harmless, "page_not_checked", "a page was not checked")


class _CopiedPage(NamedTuple):
    """What the pool held of K and V of some layers of a page: uint8 each, on the CPU once ``event``
    has passed; None: it could not be copied. Parts of slots (:attr:`KVSegments.parts`), each with
    all of its layers, are left until they are compared."""

    host_page: int
    left: deque[tuple[tuple[int, ...], torch.Tensor | None, int]]
    event: Event
    buffer: HostBuffer | None


_Checked = TypeVar("_Checked", bound="_CopiedPage | _RunningCheck")


def _copy_to_host(values: torch.Tensor, buffers: HostBuffers) -> HostBuffer:
    """A copy on its way to the CPU, on the current stream; flat."""
    buffer = buffers.take(values.numel(), values.dtype)
    buffer.values.copy_(values.view(-1), non_blocking=True)
    return buffer


def _without(freed: Ids, checks: deque[_Checked]) -> deque[_Checked]:
    """``checks`` but for those of host pages that were ``freed`` (int64 ``[n]``).

    Their buffers are not used again: a copy may still be on its way there.
    """
    gone = set(freed.tolist())
    return deque(check for check in checks if check.host_page not in gone)


class KVChecks:
    """Are K and V in a page what the pool holds? A sample of transfers is compared.

    What the pool holds is copied once more, in another way; encoded pages are decoded in another.
    A page that a lossy codec wrote may also be the code of what the pool holds.

    Args:
        group: The tensor-parallel ranks.

    Attributes:
        failed: A page differed. The same on every rank.
    """

    def __init__(self, runtime: Any, pool: Any, kv: KVSegments, group: Any) -> None:
        assert runtime.config is not None
        self.failed = False
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
        """Pages (int64 ``[n]``) were copied to or from ``slots``, on the current stream.

        ``slots`` are int64 ``[n * page_size]``, on the device.
        """
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
        """HiCache has freed ``host_pages`` (int64 ``[n]``): others may write them."""
        self._copied = _without(host_pages, self._copied)

    def forget(self) -> None:
        """All transfers were dropped."""
        self._copied.clear()

    def ask(self, turn: Turn) -> None:
        """Say whether the first page can be compared, and what came of the last comparison."""
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
        """A page that was transferred is of this form."""
        [page] = self._pool.arena.pages(np.array([host_page]), header=True)
        layout = self._pool.page_layout.of(page)
        assert layout is not None
        return layout


class _RunningCheck(NamedTuple):
    """A comparison of some layers of a page with the pool, on the device until ``event``.

    Attributes:
        layers: Layers whose hidden states were projected.
        differences: How far their K and V are off, float64 ``[layers * 2]``; None: that could not
            be computed on this rank.
        problem: Why a layer could not be projected, or None.
    """

    host_page: int
    layers: Sequence[AttentionLayer]
    differences: HostBuffer | None
    problem: str | None
    event: Event


class ServiceChecks:
    """Is a page with hidden states what the pool holds? A sample of backups is projected.

    By a spec each rank projects its own share of a page's tokens, with its own heads. An attention
    module may talk to those of the other ranks about each token: all of them get the whole page.
    The runtime loses its trust when a page is wrong.

    Args:
        hidden_layers: Layers that are stored as hidden states.
        exchange: Between the ranks that share the tokens of every page; None: pages are whole.
        order: Keeps collectives apart from those of forward passes; None: there are none.
        group: The tensor-parallel ranks.
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
        # One that is under way projects with the new weights, perhaps, what the old ones left.
        runtime.on_weights_changed.append(self.forget)

    def backed_up(self, host_pages: Ids, slots: torch.Tensor) -> None:
        """Rows of ``host_pages`` (int64 ``[n]``) are there when the current stream gets here.

        ``slots`` are those of their tokens, int64 ``[n * page_size]``, on the device.
        """
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
        """HiCache has freed ``host_pages`` (int64 ``[n]``): others may write them."""
        self._running = _without(host_pages, self._running)

    def forget(self) -> None:
        """All backups were dropped, or other weights come."""
        self._running.clear()

    def ask(self, turn: Turn) -> None:
        """Say which results have arrived."""
        self._said = None
        if self._running or self._tired:
            flags = []
            for check in islice(self._running, _AT_ONCE):
                # None: its rows have arrived, but nobody has looked whether all did.
                whole = self._whole(check.host_page) if check.event.query() else None
                flags += [whole is not None, whole is not False]
            self._said = turn.say(self._pace.rested, *flags)

    def hear(self) -> None:
        """The ranks have agreed: see to the checks whose results have arrived on all."""
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
        """How far ``layers`` of a page (int64 ``[1]``) are from the pool, float64 ``[layers * 2]``,
        on its way to the CPU, or None: not all were compared; and why a layer cannot be projected,
        or None.

        All ranks get to the exchange of each layer, whatever else is raised on one. The collectives
        of an attention module itself are not covered.

        Raises:
            ExchangeFailed: On all ranks: one had no rows to show.
        """
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
        """Positions of a page's tokens, int64 ``[page_size]``.

        A lost page has none. Other ranks, whose pages may be whole, wait for this one's rows.
        """
        layout, arena = self._pool.page_layout, self._pool.arena
        if arena.whole(host_page) is False:
            return np.arange(layout.page_size)
        [header] = arena.pages(host_page, header=True)
        return layout.positions(header).astype(np.int64)

    def _all_shares(self, exchange: Exchange, own: torch.Tensor) -> torch.Tensor:
        """A segment of the whole page, uint8 ``[shares, bytes]``, of which this rank has ``own``.

        It is there until the next one is asked for, on the current stream.

        Raises:
            ExchangeFailed: On all ranks: one had no rows to show.
        """
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
