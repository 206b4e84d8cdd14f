"""The check in service: backed-up pages are compared with the model's K and V.

- Behind a transfer, on its stream, a sample of its pages is compared with the pool. Results are
  read when they have arrived, without a wait.
- A check looks at a few layers, the next one at the next few: it is short for any model. Of K and V
  one layer is compared per turn, or one unit of an encoded one: a lossy codec takes milliseconds.
- Scheduler thread only; all tensor-parallel ranks must get to each step of a check at one point.
- If a rank cannot run its part of a check (out of memory, say), it abstains and follows the others.
- Checks rest while they have had more than their share of the thread's time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import torch

from hcache_backend import metrics, streams
from hcache_backend.arena import Ids
from hcache_backend.checks.comparison import compare_projection, first_problem, projection_problem
from hcache_backend.format.page import PageLayout
from hcache_backend.host.ports import HostPool, ModelWeights
from hcache_backend.host.segments import KVSegments
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.projector import Projector
from hcache_backend.ranks import Proposal, Turn
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from hcache_backend.streams import Event, HostBuffer, HostBuffers, StreamFailed, current_stream
from hcache_kernels.codecs import Codec

_LAYERS = 4  # of a page in one check
_WAITING = 16  # no further page is chosen while this many wait for their comparison
_AT_ONCE = 4  # projections whose results are handled in one turn
_SHARE = 1 / 10  # most of the scheduler thread's time that checks of one kind take...
_BURST_SECONDS = 0.1  # ...except in bursts of this length

_catching = partial(metrics.catching, "page_not_checked", "a page was not checked")

_Layer = TypeVar("_Layer")
_Remaining = TypeVar("_Remaining")


class _Pace:
    """Keeps checks to :data:`_SHARE` of the time, except in bursts of :data:`_BURST_SECONDS`."""

    def __init__(self) -> None:
        self._seconds_left = _BURST_SECONDS
        self._updated = time.perf_counter()

    @property
    def rested(self) -> bool:
        """True if a check may work now: checks have not used up their share of the time."""
        now = time.perf_counter()
        earned = (now - self._updated) * _SHARE
        self._seconds_left = min(_BURST_SECONDS, self._seconds_left + earned)
        self._updated = now
        return self._seconds_left > 0

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count the processor time of the block against the share of checks."""
        start = time.thread_time()  # others may have the processor meanwhile
        try:
            yield
        finally:
            self._seconds_left -= time.thread_time() - start


@dataclass
class _Check(Generic[_Remaining]):
    """A host page to compare. ``remaining``: the layers, or parts of them, to compare. ``buffer``:
    what they are compared by, on the CPU once ``event`` has passed; None: this rank abstains."""

    host_page: int
    remaining: deque[_Remaining]
    buffer: HostBuffer | None = None
    problem: str | None = None  # found before the results arrived
    event: Event = field(init=False)


class _Checks(ABC, Generic[_Layer, _Remaining]):
    """Checks one of ``interval`` pages of transfers (0: none), a few of ``layers`` of it, the same
    on every rank. ``failed``: a page was wrong, so that L3 is not used any more (quarantine)."""

    def __init__(
        self, weights: ModelWeights, pool: HostPool, interval: int, layers: Sequence[_Layer]
    ) -> None:
        self.failed = False
        self._weights, self._pool, self._layers = weights, pool, deque(layers)  # next one first
        self._interval = interval  # one of so many pages of transfers is checked; 0: none
        self._pages_before = 0  # pages until the next one that is chosen
        self._waiting: deque[_Check[_Remaining]] = deque()  # for results, in order
        self._buffers = HostBuffers(pool.device_pool.device)
        self._pace = _Pace()
        self._tired = False  # no check begins: on a rank they have had their share of time
        self._proposal: Proposal | None = None

    def watch(self, *, loads: bool = False) -> None:
        """Look at every backup of the pool from now on; ``loads``: and at every load."""
        self._pool.on_freed.append(self.on_freed)
        self._pool.on_backed_up.append(self.on_transfer)
        if loads:
            self._pool.on_loaded.append(self.on_transfer)

    def on_transfer(self, host_pages: Ids, slots: torch.Tensor) -> None:
        """Begin to check one of ``host_pages`` (int64 ``[n]``), if one is due. The pages are copied
        to or from ``slots`` (int64 ``[n * page_size]``, on the device) on the current stream."""
        size, chosen = self._pool.page_size, self._choose(len(host_pages))
        if chosen is None or self._tired or len(self._waiting) >= _WAITING:
            return
        layers = list(self._layers)[:_LAYERS]
        self._layers.rotate(-_LAYERS)
        host_page = int(host_pages[chosen])
        check = _Check(host_page, self._parts(host_page, layers))
        with self._pace.work(), _catching():
            self._launch(check, slots[chosen * size : (chosen + 1) * size])
        check.event = current_stream(slots.device).record()
        self._waiting.append(check)

    def on_freed(self, host_pages: Ids) -> None:
        """Drop checks of ``host_pages``, and their buffers: copies may still be on their way."""
        freed = set(host_pages.tolist())
        self._waiting = deque(check for check in self._waiting if check.host_page not in freed)

    def drop_waiting(self) -> None:
        """Forget the checks whose results have not arrived: their rows are of old weights."""
        self._waiting.clear()

    @abstractmethod
    def _parts(self, host_page: int, layers: Sequence[_Layer]) -> deque[_Remaining]:
        """The parts of a page that are compared one after the other, one in a turn."""

    @abstractmethod
    def _launch(self, check: _Check[_Remaining], slots: torch.Tensor) -> None:
        """Begin to fill the buffer of ``check``, by the pool's ``slots`` of its page; may raise."""

    def _choose(self, pages: int) -> int | None:
        """Index of the page to check, one of ``_interval``, in a transfer of ``pages``, or None."""
        if self._interval == 0:
            return None
        if self._pages_before >= pages:
            self._pages_before -= pages
            return None
        chosen = self._pages_before
        self._pages_before = self._interval - 1 - (pages - 1 - chosen) % self._interval
        return chosen

    def _to_host(self, values: torch.Tensor) -> HostBuffer:
        """A flat copy of ``values`` that is on its way to the CPU, on the current stream."""
        buffer = self._buffers.take(values.numel(), values.dtype)
        buffer.values.copy_(values.view(-1), non_blocking=True)
        return buffer

    def _finish(self, check: _Check[_Remaining]) -> None:
        """Count the page of ``check`` as compared, and give its buffer back for another check."""
        metrics.TOKENS.count("checked", self._pool.page_size)
        if check.buffer is not None:
            self._buffers.give_back(check.buffer)

    def _fail(self, problem: str) -> None:
        """A page is wrong: L3 is not used any more, because other pages may be wrong, too."""
        self.failed = True
        if self._weights.quarantine is None:
            metrics.PROBLEMS.count("self_check")
            self._weights.begin_quarantine(f"the self-check in service failed: {problem}")


_Part = tuple[tuple[int, ...], slice, int]  # layers of a segment, their place in the buffer, part


class KVChecks(_Checks[int, _Part]):
    """Compares K and V of a sample of transfers with the pool. Values of the pool are copied once
    more, and encoded pages decoded, in another way. A page of a lossy codec may also be the code of
    the pool's values. ``failed`` is the same on every rank."""

    def __init__(
        self, weights: ModelWeights, pool: HostPool, interval: int, kv: KVSegments
    ) -> None:
        super().__init__(weights, pool, interval, kv.layers)
        self._kv = kv
        self._compares = False  # a part was compared in the last turn; the same on every rank
        self._wrong: str | None = None  # why that part is wrong, on this rank

    def _parts(self, host_page: int, layers: Sequence[int]) -> deque[_Part]:
        """For each part of each segment of the page: the layers that share the segment, the place
        of their K and V in the check's buffer, and the number of the part."""
        parts, start = deque[_Part](), 0
        for sharing in dict.fromkeys(map(self._layout_of(host_page).sharing, layers)):
            end = start + sum(map(self._kv.bytes_of, sharing))
            parts.extend((sharing, slice(start, end), part) for part in range(self._kv.parts))
            start = end
        return parts

    def _launch(self, check: _Check[_Part], slots: torch.Tensor) -> None:
        layers = [layer for sharing, _, part in check.remaining if part == 0 for layer in sharing]
        check.buffer = self._to_host(self._kv.read_plain(layers, slots))

    def propose_checks(self, turn: Turn) -> None:
        """Propose to ranks: the first page arrived, checks may work, the last part was right."""
        self._proposal = None
        if not self.failed and (self._waiting or self._tired or self._compares):
            arrived = bool(self._waiting) and self._has_arrived(self._waiting[0])
            self._proposal = turn.propose(arrived, self._pace.rested, self._wrong is None)

    def apply_checks(self) -> None:
        """The ranks have agreed: compare the next part of the first page, if all can; or fail."""
        if self._proposal is None:
            return
        arrived, rested, right = self._proposal.least
        self._tired, self._compares = not rested, bool(arrived and rested and right)
        if not right:
            self._fail(self._wrong or "a page of another rank differs")
        if not self._compares:
            return
        check = self._waiting[0]
        with self._pace.work():
            self._wrong = self._problem(check)
        if self._wrong is not None or not check.remaining:
            self._finish(self._waiting.popleft())

    def _has_arrived(self, check: _Check[_Part]) -> bool:
        """True if the page and what it is compared by are on the CPU."""
        settled = self._pool.usable(np.array([check.host_page])) is not None
        return settled and check.event.query()

    def _problem(self, check: _Check[_Part]) -> str | None:
        """Compare the next part of the page of ``check``; a message if it is wrong, or None."""
        try:
            check.event.synchronize()
        except StreamFailed as failed:
            return str(failed)
        layers, place, part = check.remaining.popleft()
        host_page = np.array([check.host_page])
        if check.buffer is None or not self._pool.arena.usable(host_page):
            return None  # it was not copied, or is not encodable
        layout = self._layout_of(check.host_page)
        [page] = self._pool.arena.pages(host_page)
        segments = torch.from_numpy(page[layout.segment(layers[0])])
        if self._kv.holds(segments, check.buffer.values[place], part, layout, layers[0]):
            return None
        return f"K and V of layer {' and '.join(map(str, layers))} in a page are not the pool's"

    def _layout_of(self, host_page: int) -> PageLayout:
        """The layout of a page, by its header: a plug-in may divide each page in another way."""
        [page] = self._pool.arena.pages(np.array([host_page]), header=True)
        layout = self._pool.page_layout.of_page(page)
        assert layout is not None
        return layout


class ServiceChecks(_Checks[AttentionLayer, AttentionLayer]):
    """Projects a sample of backups with hidden states and compares them with the pool. With a spec
    each rank projects its own shard of a page's tokens, with its own heads. An attention module may
    exchange every token with other ranks, so all ranks get the whole page."""

    def __init__(
        self,
        weights: ModelWeights,
        pool: HostPool,
        interval: int,
        hidden_layers: Sequence[AttentionLayer],
        codec: Codec,
        projector: Projector,
        exchange: Exchange | None,
        order: CollectiveOrder | None,
    ) -> None:
        """``interval``: of pages of backups, 0: no check. ``exchange``: between ranks that share
        tokens; None: pages are whole. ``order``: of collectives; None: there is one rank."""
        super().__init__(weights, pool, interval, hidden_layers)
        self._codec, self._projector = codec, projector
        self._exchange, self._order = exchange, order
        self._shards: torch.Tensor | None = None  # memory for a segment of the whole page
        if exchange is not None and hidden_layers:
            # Taken now: a rank without memory for it would leave the others in a collective.
            shard = pool.page_layout.segment(hidden_layers[0].index)
            shape = (exchange.shards, shard.stop - shard.start)
            self._shards = torch.empty(shape, dtype=torch.uint8, device=pool.device_pool.device)
        # A running check may project rows of the old weights with the new ones.
        weights.on_weights_changed.append(self.drop_waiting)

    def propose_checks(self, turn: Turn) -> None:
        """Propose to ranks: checks may work; each of the first ones arrived, its page is whole."""
        self._proposal = None
        if self._waiting or self._tired:
            flags = []
            for check in islice(self._waiting, _AT_ONCE):
                page = np.array([check.host_page])  # usable is None: not known yet
                usable = self._pool.arena.usable(page) if check.event.query() else None
                flags += [usable is not None, usable is not False]
            self._proposal = turn.propose(self._pace.rested, *flags)

    def apply_checks(self) -> None:
        """Judge the first pages, whose results have arrived on all ranks; drop incomplete pages."""
        if self._proposal is None:
            return
        rested, *flags = self._proposal.least
        self._tired = not rested
        for arrived, right in zip(flags[::2], flags[1::2], strict=True):
            if not arrived:
                return
            check = self._waiting.popleft()
            problem = self._problem(check) if right else None
            if problem is not None:
                self._fail(problem)

    def _parts(self, host_page: int, layers: Sequence[AttentionLayer]) -> deque[AttentionLayer]:
        return deque(layers)

    def _launch(self, check: _Check[AttentionLayer], slots: torch.Tensor) -> None:
        """Differences of projected K and V from the pool's, float64 ``[layers * 2]``, go to the
        buffer, if all can be computed. All ranks get to the exchange of each layer, even if one
        raises, but not to collectives of attention modules. Raises ExchangeFailed on all ranks."""
        layers, layout, device = check.remaining, self._pool.page_layout, slots.device
        host_page = np.array([check.host_page])
        page = self._pool.kv_buffer[int(self._pool.arena.physical(host_page)[0])]
        by_module = [layer for layer in layers if self._projector.specs[layer.index] is None]
        kept, all_tokens = slice(layout.kept.start, layout.kept.stop), slice(layout.page_size)
        differences: list[torch.Tensor] = []
        problem: str | None = None
        positions: torch.Tensor | None = None
        stream = current_stream(device)
        if by_module and self._order is not None:
            self._order.restore_begins(stream)
        try:
            for layer in layers:
                rows, tokens = page[layout.segment(layer.index)], kept
                if layer in by_module and self._exchange is not None:
                    rows, tokens = self._all_shares(self._exchange, rows), all_tokens
                with _catching():
                    if positions is None:
                        positions = streams.to_device(self._positions(host_page), device)
                    rows = rows.to(device, non_blocking=True).view(-1, self._codec.row_bytes)
                    hidden = self._codec.decode(rows)
                    result = compare_projection(
                        layer, hidden, positions[tokens], slots[tokens], self._projector
                    )
                    if isinstance(result, str):
                        problem = problem or result
                    else:
                        differences.append(result)
        finally:
            if by_module and self._order is not None:
                self._order.restore_launched(stream)
        if 0 < len(differences) == len(layers):
            check.buffer = self._to_host(torch.stack(differences))
        check.problem = problem

    def _positions(self, host_page: Ids) -> Ids:
        """Positions of a page's tokens, int64 ``[page_size]``. For a page whose rows are missing,
        which has none, 0, 1, ...: other ranks, whose pages may be whole, wait for this one."""
        layout, arena = self._pool.page_layout, self._pool.arena
        if arena.usable(host_page) is False:
            return np.arange(layout.page_size)
        [header] = arena.pages(host_page, header=True)
        return layout.positions(header).astype(np.int64)

    def _all_shares(self, exchange: Exchange, own_share: torch.Tensor) -> torch.Tensor:
        """A layer's segment of the whole page, uint8 ``[shards, bytes]``, gathered from all ranks;
        this one has ``own_share``. Valid until the next call. Raises ExchangeFailed on all."""
        assert self._shards is not None
        gather = exchange.gather_now if exchange.on_scheduler_thread else exchange.gather
        gather(self._shards, lambda shard: shard.copy_(own_share, non_blocking=True))
        return self._shards

    def _problem(self, check: _Check[AttentionLayer]) -> str | None:
        """A message if a layer in the result of ``check`` is wrong or not projected; or None."""
        try:
            check.event.synchronize()
        except StreamFailed:  # capture broke, and nothing is backed up any more
            return None
        if check.buffer is None:
            return check.problem
        differences = check.buffer.values.view(-1, 2).tolist()
        self._finish(check)
        dtype, codec = self._projector.pool.dtype, self._codec.name
        return first_problem(
            projection_problem(layer, values, dtype, codec)
            for layer, values in zip(check.remaining, differences, strict=True)
        )
