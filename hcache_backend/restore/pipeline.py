"""Restore: pages of the arena -> K and V in the device's pool, layer by layer, without bubbles.

- Two streams work at once (paper section 4.1; docs/how-it-works.md). The copy stream brings hidden
  states to a ring of device buffers, and the compute stream projects them.
- K and V that are stored as such are copied on the copy stream straight to their slots.
- First layers may be recomputed on the engine's stream of forward passes: what both share
  (collectives, workspaces of kernels) is then used in one order. Meanwhile later layers arrive in
  the ring, as far as it has room.
- A layer is one copy and one projection, unless it has more tokens than a projection may take. Only
  the first layer comes in pieces: until one has arrived there is nothing to project.
- If ranks share the tokens of pages, rows arrive in the order of the shares, not of the pages.
  Several layers of latents are one exchange, and one launch decodes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.format.page import PageLayout
from hcache_backend.plan.restore import FIRST_PIECES, RUN_AHEAD
from hcache_backend.restore import layers
from hcache_backend.restore.exchange import CollectiveOrder, Exchange
from hcache_backend.restore.layers import Indices, Part, Recompute, RestoredLayer, TokenRows
from hcache_backend.restore.report import RestoreReport, RunningRestore
from hcache_backend.restore.ring import Ring, part_bytes, ring_bytes
from hcache_backend.streams import Event, current_stream, held_for_device, host_tensor, new_stream
from hcache_kernels.pages import gather_pages


@dataclass(eq=False)
class RestorePipeline:
    """Launches restores. Scheduler thread only."""

    _memory: torch.Tensor  # the arena, uint8 [pages, stride]; pinned for a GPU
    _layout: PageLayout
    _layers: Sequence[RestoredLayer]
    _chunk_tokens: int  # of one projection, at most
    _device: torch.device | str
    exchange: Exchange | None = None  # of shards of hidden states; None: pages have all of them
    # Keeps collectives apart from those of forward passes; None: there are none.
    order: CollectiveOrder | None = None

    def __post_init__(self) -> None:
        layout, device = self._layout, torch.device(self._device)
        self._device, self._chunk_pages = device, max(1, self._chunk_tokens // layout.page_size)
        groups = layers.groups_of(dict(enumerate(self._layers)), 1)
        arriving = [group for group in groups if self._layers[group.start].arrives]
        size = ring_bytes(layout, self._chunk_tokens, arriving)
        self._ring = Ring(torch.empty(size, dtype=torch.uint8, device=device))
        self._largest_part = size // RUN_AHEAD // self._chunk_pages  # bytes of a page in a part
        self._copy = new_stream(device, "copy")
        # Projections may talk to other ranks.
        self._compute = new_stream(device, "compute", in_turn=self.order is not None)
        self._unread: deque[RunningRestore] = deque()
        # By layer: behind all copies and projections, and behind those that loads were given.
        self._written: dict[int, Event] = {}
        self._handed_out: dict[int, Event] = {}

    @torch.no_grad()
    def start(
        self,
        pages: npt.NDArray[np.int64],
        slots: torch.Tensor,
        recompute: Recompute | None = None,
        first_layer: int = 0,
        *,
        ahead: bool = False,
    ) -> RunningRestore:
        """Launch the restore of whole pages behind the current stream's work of this moment.
        ``pages`` (physical; none if all is recomputed) must not change until all layers are done.
        ``slots`` of their tokens are on the device. Without ``recompute``, layers before
        ``first_layer`` are restored elsewhere. ``ahead``: the slots are not read before
        :meth:`mark_handed_out`. If a recomputation raises, the result has it in ``failed``. Raises
        ValueError if a layer is neither stored nor recomputed."""
        first = recompute.layers if recompute else first_layer
        loaded = range(first, len(self._layers))
        device, exchange, moved = self._device, self.exchange, self._bytes_of(loaded, len(pages))
        indices = self._indices_of(pages, slots)
        pieces = FIRST_PIECES if recompute is None and exchange is None else 1
        launches = 1 if ahead else layers.MOST_LAUNCHES  # no forward pass waits for these
        chosen = {layer: self._layers[layer] for layer in loaded}
        parts = deque(layers.parts_of(chosen, indices, self._chunk_pages, pieces, launches))
        bring: _Bring = self._bring_own
        if exchange is not None:
            bring = self._exchange_parts(exchange, parts, indices.cpu_pages)
        behind = current_stream(device).record()
        self._copy.wait(behind)
        for stream in (self._copy, self._compute):
            for tensor in (indices.page_ids, *indices.rows, *indices.shared):
                stream.keep(tensor)
        if self.order is not None:
            self.order.restore_begins(self._copy)
        begin = self._copy.record(timed=True)
        self._copy.run(partial(self._bring_indices, indices))
        ready = self._copy.record()
        restore = RunningRestore(len(slots), moved, begin, device, ready)
        room_for = self._ring.begin(max(1, min(len(pages), self._chunk_pages)) * self._largest_part)
        copy = partial(self._copy_part, restore, bring)
        if not any(self._layers[layer].arrives for layer in loaded):
            room_for = len(parts)  # K and V go to the pool, so all copies are launched at once
        arrived = deque(copy(parts.popleft()) for _ in range(min(room_for, len(parts))))
        if recompute is not None:
            done = self._recompute(restore, recompute, behind, self._written)
            # Recomputation has the device first. Later copies (which may be exchanges) go to parts
            # of the ring that these projections free, so they are behind it, too.
            self._compute.wait(done)
        else:
            restore.layers += [ready] * first
        if not len(pages):
            restore.layers += [ready] * len(loaded)
        while arrived:
            self._fill(restore, arrived.popleft())
            if parts:
                arrived.append(copy(parts.popleft()))
        if self.order is not None:
            self.order.restore_launched(self._copy)
        if not ahead:
            self.mark_handed_out()
        self._unread.append(restore)
        return restore

    def _bytes_of(self, loaded: range, pages: int) -> Counter[str]:
        """Bytes that ``loaded`` layers have in so many pages, by method; ValueError if one has
        none."""
        moved = Counter[str]()
        for index in loaded:
            if self._layers[index].method == "recompute":
                raise ValueError(f"layers after the first {loaded.start} are not stored")
            moved[self._layers[index].method] += pages * self._layout.segment_bytes[index]
        return moved

    def _indices_of(self, pages: npt.NDArray[np.int64], slots: torch.Tensor) -> Indices:
        """Indices of a restore; :meth:`_bring_indices` writes those on the device but ``slots``."""
        device, headers = self._device, self._layout.positions(self._memory.numpy())
        positions = headers[pages].reshape(-1).astype(np.int64)  # of the tokens of all pages
        on_cpu = held_for_device(pages, device), held_for_device(positions, device)
        page_ids = torch.empty(len(pages), dtype=torch.int64, device=device)
        rows = TokenRows(torch.empty(len(slots), dtype=torch.int64, device=device), slots)
        shared = rows if self.exchange is None else TokenRows(*map(torch.empty_like, rows))
        return Indices(*on_cpu, page_ids, rows, shared)

    def _bring_indices(self, indices: Indices) -> None:
        """Copy a restore's indices to the device, on the current stream."""
        indices.page_ids.copy_(indices.cpu_pages, non_blocking=True)
        indices.rows.positions.copy_(indices.cpu_positions, non_blocking=True)
        if self.exchange is not None:
            for source, target in zip(indices.rows, indices.shared, strict=True):
                self._order_by_shard(self.exchange.shards, source, target)

    def failed_restore(self, tokens: int) -> RunningRestore:
        """The result in the place of that of a :meth:`start` that raised: it has ``failed``, and
        ends behind all that was launched."""
        copied, done = self._copy.record(), [self._copy.record(), self._compute.record()]
        failed = RuntimeError("a restore was not launched")
        return RunningRestore(tokens, {}, copied, self._device, copied, done, failed=failed)

    def mark_handed_out(self) -> None:
        """The slots of all restores so far may be read now: recomputations wait for them."""
        self._handed_out = dict(self._written)

    @torch.no_grad()
    def start_recomputation(self, recompute: Recompute) -> RunningRestore:
        """Launch the recomputation of all layers of some tokens, behind the current stream's work
        and all that was :meth:`mark_handed_out`."""
        behind = current_stream(self._device).record()
        begin = recompute.stream.record(timed=True)
        tokens = len(recompute.slots)
        restore = RunningRestore(tokens, {}, begin, self._device, begin)  # no page is read
        self._recompute(restore, recompute, behind, self._handed_out)
        return restore

    def _recompute(
        self,
        restore: RunningRestore,
        recompute: Recompute,
        behind: Event,
        written: Mapping[int, Event],
    ) -> Event:
        """Recompute first layers on the stream of forward passes; returns the event behind that.
        Recomputation waits for ``behind``, and for the events of its layers in ``written``: it may
        read K and V that were written before these."""
        forward, layers = recompute.stream, range(recompute.layers)
        start = forward.record(timed=True)
        try:
            forward.wait(behind)
            # Tokens before these may come back by restores that no forward pass has waited for.
            for event in dict.fromkeys(written[layer] for layer in layers if layer in written):
                forward.wait(event)
            if self.order is not None:
                forward.wait(self._copy.record())  # two kinds of collectives never run at once
            forward.keep(recompute.slots)
            start = forward.record(timed=True)
            forward.run(recompute.fill)
        except Exception as error:  # of a model's own code, or out of memory
            restore.failed = error
        done = forward.record(timed=True)
        restore.timed.append(("compute", 0, start, done))
        restore.layers += [done] * len(layers)
        return done

    def _exchange_parts(
        self, exchange: Exchange, parts: Sequence[Part], pages: torch.Tensor
    ) -> _Bring:
        """A function that brings the shards of all ranks of a part to the ring. On a CPU all parts
        are exchanged here, at once, and it copies the result. ``pages``: physical, on the CPU."""
        if not exchange.on_scheduler_thread:

            def gather(part: Part, out: torch.Tensor) -> None:
                shards = out.view(exchange.shards, -1)
                exchange.gather(shards, lambda own_shard: self._bring_own(part, own_shard))

            return gather
        # One exchange for all parts: each costs a turn of every rank on the CPU.
        places: dict[tuple[int, int], slice] = {}
        own_parts, size = list[Part](), 0
        for part in parts:
            layer = part.layers.start
            if self._layers[layer].arrives:
                own_parts.append(part._replace(page_ids=pages[part.pages]))
                whole = len(own_parts[-1].page_ids) * part_bytes(self._layout, part.layers)
                length = whole // exchange.shards  # bytes of one rank's shard of this part
                places[layer, part.pages.start] = slice(size, size + length)
                size += length
        shards = host_tensor((exchange.shards, size), torch.uint8, self._device)

        def fetch(own_shard: torch.Tensor) -> None:
            for part, place in zip(own_parts, places.values(), strict=True):
                self._bring_own(part, own_shard[place])

        failed: Exception | None = None
        try:
            exchange.gather_now(shards, fetch)
        except Exception as error:
            failed = error

        def copy(part: Part, out: torch.Tensor) -> None:
            if failed is not None:
                raise failed
            place = places[part.layers.start, part.pages.start]
            out.view(exchange.shards, -1).copy_(shards[:, place], non_blocking=True)

        return copy

    def _order_by_shard(self, shards: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a number of each token (int64 ``[n]``) from the order of ``source``, by pages, to
        that in which tokens arrive: by chunks of pages, and in a chunk by shards."""
        size = self._layout.page_size
        for start in range(0, len(source), self._chunk_pages * size):
            chunk = source[start : start + self._chunk_pages * size]
            by_shard = chunk.view(-1, shards, size // shards).transpose(0, 1)
            target[start : start + len(chunk)] = by_shard.reshape(-1)

    def _bring_own(self, part: Part, target: torch.Tensor) -> None:
        """Copy this rank's segments of a part by the layers' :data:`.Copy`, to ``target`` as it
        takes it. Hidden states have none: they go to ``target`` as memory of the ring (uint8)."""
        offsets = self._layout.segment_offsets[part.layers.start : part.layers.stop]
        copy = self._layers[part.layers.start].copy
        if copy is not None:
            copy(part.layers, self._memory, part.page_ids, offsets, target)
            return
        rows = target.view(len(part.page_ids), -1)
        gather_pages(self._memory, part.page_ids, offsets[0], rows.shape[1], out=rows)

    def _copy_part(self, restore: RunningRestore, bring: _Bring, part: Part) -> _Arrived:
        """Launch the copy of a part on the copy stream: to the pool, or by ``bring`` to the next
        part of the ring if its layers arrive there."""
        first, buffer = part.layers.start, None
        copy = partial(self._bring_own, part, part.slots)
        if self._layers[first].arrives:
            length = part_bytes(self._layout, part.layers)
            memory = self._ring.next(self._copy)
            buffer = memory[: len(part.page_ids) * length].view(-1, length)
            copy = partial(bring, part, buffer)
        start = self._copy.record(timed=True)
        self._copy.run(copy)
        restore.copied = copied = self._copy.record(timed=True)
        restore.timed.append(("copy", first, start, copied))
        return _Arrived(part, buffer, copied)

    def _fill(self, restore: RunningRestore, arrived: _Arrived) -> None:
        """Launch the projection of a part that is in the ring. The last part of its layers adds
        the event behind them to ``restore``."""
        part, buffer, copied = arrived
        layer, filled = part.layers.start, copied
        fill = self._layers[layer].fill
        if fill is not None and buffer is not None:
            self._compute.wait(copied)
            start = self._compute.record(timed=True)
            self._compute.run(partial(fill, part.layers, buffer, part.positions, part.slots))
            filled = self._compute.record(timed=True)
            restore.timed.append(("compute", layer, start, filled))
            self._ring.mark_used(filled)
        if part.is_last:
            restore.layers += [filled] * len(part.layers)
            self._written |= dict.fromkeys(part.layers, filled)

    def take_finished(self) -> list[RestoreReport]:
        """Reports of the restores that are done and not reported yet, oldest first."""
        reports = []
        while self._unread and self._unread[0].done():
            reports.append(self._unread.popleft().report())
        return reports


_Bring = Callable[[Part, torch.Tensor], None]  # copies a part to the given device memory (uint8)


class _Arrived(NamedTuple):
    """A part whose copy was launched, and the event behind it; no buffer: it is in the pool."""

    part: Part
    buffer: torch.Tensor | None
    copied: Event
