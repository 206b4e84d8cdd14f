"""Two-stage capture (paper section 4.2.2): device staging, then one transfer a step to the shadows.

Stage one runs inside the forward pass, on its stream: one kernel a layer copies the projection's
input to a ring of places in device memory. It may be recorded in a CUDA graph. Stage two runs on a
stream of its own behind the forward pass: one launch moves all layers of the step to the shadow
pages of its tokens. A step that is too long for the ring (eager prefill) uses the same memory as a
ring of layers, and moves each layer by itself.

The forward pass never waits for the CPU. Where staging is full, its *stream* waits for the transfer
that still reads the places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from hcache_kernels.staging import StagedRows, save_rows, stage_rows

from hcache_backend.capture.arena import Arena, Ids, ShadowChanges
from hcache_backend.capture.ledger import Ledger, Proof, StepEntry
from hcache_backend.streams import (
    Event,
    Stream,
    current_stream,
    held_for_device,
    host_tensor,
    new_stream,
)


class RowCodec(Protocol):
    """What capture needs of a codec (``hcache_kernels.codecs``)."""

    hidden_size: int
    dtype: torch.dtype
    row_bytes: int
    is_view: bool

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded rows, uint8 ``[n, row_bytes]``, and which rows it could hold, bool ``[n]``."""


@dataclass
class Step:
    """One forward pass that is being captured.

    Attributes:
        tokens: How many.
        number: The step's number in the marks.
        where: Slots, positions and token ids, int64 ``[3, tokens]`` on the device.
        entry: What the ledger keeps of it.
        first: First place in the ring of places, or None for a ring of layers.
        marks: Who wrote each row, int64 ``[layers, tokens]`` on the device.
        layers_seen: How often Python saw each layer being staged.
        holders: Ring of layers: the transfer that last read each part.
    """

    tokens: int
    number: int
    where: torch.Tensor
    entry: StepEntry
    first: int | None
    marks: torch.Tensor
    layers_seen: list[int]
    holders: dict[int, Event] = field(default_factory=dict)


class StagedCapture:
    """Takes the hidden states of every token of every step to the arena's shadow pages.

    Only the scheduler thread may use it. Methods that are given tensors expect to be called while
    the stream that made them is current.

    Args:
        arena: Owns the shadow pages; its memory is ``memory``.
        memory: The arena's memory as a tensor, uint8 ``[pages, page_bytes]``.
        codec: Encodes rows.
        segments: Which segment of a page each captured layer has.
        places: Rows (of all layers) that staging holds. CUDA graphs of larger batches are not
            captured; eager steps may be up to ``len(segments)`` times as long.
        device: Where the model is.

    Attributes:
        tokens: Tokens captured so far.
        waits_for_staging: How often a forward pass's stream had to wait for a transfer.
    """

    def __init__(
        self,
        arena: Arena,
        memory: torch.Tensor,
        codec: RowCodec,
        segments: Sequence[int],
        places: int,
        device: torch.device | str,
    ) -> None:
        self.arena = arena
        self.places = places
        self.tokens = 0
        self.waits_for_staging = 0
        self._memory = memory
        self._codec = codec
        self._device = torch.device(device)
        self.ledger = Ledger(arena, self._device)
        self._layers = len(segments)
        offsets = [arena.layout.segment_offsets[segment] for segment in segments]
        self._segments = torch.tensor(offsets, dtype=torch.int64, device=device)
        self._shadows = torch.from_numpy(arena.shadows).to(device)
        # One place more than the ring has: for rows that only fill up a recorded batch.
        shape = (self._layers, places + 1)
        self._staged = StagedRows(
            torch.zeros((*shape, codec.row_bytes), dtype=torch.uint8, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
        )
        self._every_place = torch.arange(places, device=device)
        self._row_places = torch.full((places,), places, dtype=torch.int64, device=device)
        self._named_places = 0
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = 0
        self._next_place = 0
        self._in_flight: deque[tuple[int, int, Event]] = deque()  # places [first, end) being read
        self._step: Step | None = None
        self._transfer = new_stream(device, "transfer")
        self._warm_up()

    @property
    def device_bytes(self) -> int:
        """Device memory that staging takes."""
        return self._staged.rows.nbytes + self._staged.marks.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, all captured layers."""
        return self._layers * self._codec.row_bytes

    def _warm_up(self) -> None:
        """Kernels must not be compiled while a graph is recorded. Slot 0 is the padding page's."""
        row = torch.zeros((1, self._codec.hidden_size), dtype=self._codec.dtype)
        self._stage(0, row.to(self._device), 1)
        slot = torch.zeros(1, dtype=torch.int64, device=self._device)
        size = self.arena.layout.page_size
        save_rows(self._staged.rows[:, :1], slot, self._shadows, self._memory, self._segments, size)

    # ---- the forward pass ----

    def begin(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> Step | None:
        """A forward pass over these tokens (``[n]`` each, on the device) begins.

        Returns:
            The step, or None when it is longer than staging can hold: its tokens are void.
        """
        self._step = None
        self.ledger.settle(wait=False)
        now, tokens = current_stream(self._device), len(slots)
        where = torch.empty((3, tokens), dtype=torch.int64, device=self._device)
        parts = (slots, positions, token_ids)
        now.run(lambda: torch.stack([part.to(torch.int64) for part in parts], out=where))
        entry = self.ledger.step(where)
        self._steps += 1
        if self.ledger.broken is None and tokens <= self.places:
            self._step = self._use_places(tokens, where, entry, now)
            return self._step
        self.skip()
        if self.ledger.broken is None and tokens * self._codec.row_bytes <= self._flat.numel():
            self._wait_for_places(0, self.places, now)
            marks = torch.zeros((self._layers, tokens), dtype=torch.int64, device=self._device)
            seen = [0] * self._layers
            self._step = Step(tokens, self._steps, where, entry, None, marks, seen)
        return self._step

    def skip(self) -> None:
        """A forward pass begins that is not captured: recorded copies go to the spare place."""
        self._step = None
        now, named = current_stream(self._device), self._row_places[: self._named_places]
        self._named_places = 0
        if len(named):
            now.run(lambda: named.fill_(self.places))
        self._wait_for_places(self.places, self.places + 1, now)

    def _use_places(self, tokens: int, where: torch.Tensor, entry: StepEntry, now: Stream) -> Step:
        first = self._next_place if self._next_place + tokens <= self.places else 0
        self._next_place = first + tokens
        self._wait_for_places(first, first + tokens, now)
        number, named = self._steps, self._every_place[first : first + tokens]
        no_more = self._row_places[tokens : max(tokens, self._named_places)]

        def name_places() -> None:
            self._row_places[:tokens] = named
            if len(no_more):
                no_more.fill_(self.places)
            self._number.fill_(number)

        now.run(name_places)
        self._named_places = tokens
        marks = self._staged.marks[:, first : first + tokens]
        return Step(tokens, number, where, entry, first, marks, [0] * self._layers)

    def _wait_for_places(self, first: int, end: int, now: Stream) -> None:
        """Let the stream wait for the transfers out of places ``[first, end)``."""
        overlaps = [i for i, (a, b, _) in enumerate(self._in_flight) if a < end and first < b]
        for _ in range(overlaps[-1] + 1 if overlaps else 0):
            *_, last = self._in_flight.popleft()
        if overlaps and not last.query():
            self.waits_for_staging += 1
            now.wait(last)

    def take(self, layer: int, hidden: object) -> None:
        """Stage one: ``hidden`` is what the projection of ``layer`` receives, ``[n, hidden]``.

        Outside of a step it does nothing, unless a CUDA graph is being recorded: then the copy is
        recorded, for all rows of the batch; what fills the batch up goes to the spare place.
        """
        if not isinstance(hidden, torch.Tensor) or not self._fits(hidden):
            return
        step = self._step
        if step is None:
            if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
                self._stage(layer, hidden, len(hidden))
        elif len(hidden) >= step.tokens:
            step.layers_seen[layer] += 1
            if step.first is not None:
                self._stage(layer, hidden, step.tokens)
            else:
                self._move_layer(step, layer, hidden[: step.tokens])

    def _fits(self, hidden: torch.Tensor) -> bool:
        codec = self._codec
        return (
            hidden.dim() == 2
            and hidden.dtype == codec.dtype
            and hidden.shape[1] == codec.hidden_size
            and hidden.stride(1) == 1
        )

    def _stage(self, layer: int, hidden: torch.Tensor, rows: int) -> None:
        if rows > self.places:
            return  # a recorded batch that staging cannot hold: its rows will lack their marks
        places = self._row_places[:rows]

        def stage() -> None:
            encoded, ok = self._encode(hidden[:rows])
            stage_rows(encoded, ok, places, self._number, self._staged, layer)

        current_stream(self._device).run(stage)

    def _move_layer(self, step: Step, layer: int, hidden: torch.Tensor) -> None:
        """Both stages for one layer of a step that uses staging as a ring of layers."""
        now, size = current_stream(self._device), step.tokens * self._codec.row_bytes
        part = sum(step.layers_seen) % (self._flat.numel() // size)
        if part in step.holders and not step.holders[part].query():
            self.waits_for_staging += 1
            now.wait(step.holders[part])
        rows = self._flat[part * size : (part + 1) * size].view(1, step.tokens, -1)

        def stage() -> None:
            encoded, ok = self._encode(hidden)
            rows[0].copy_(encoded)
            step.marks[layer] = step.number
            if ok is not None:
                step.marks[layer].masked_fill_(~ok, 0)

        now.run(stage)
        self._transfer.wait(now.record())
        self._save(rows, step, self._segments[layer : layer + 1])
        step.holders[part] = self._transfer.record()

    def end(self, step: Step, *, replayed: bool) -> bool:
        """The forward pass was launched; stage two follows it.

        Args:
            step: What :meth:`begin` returned.
            replayed: Whether a recorded graph ran, so that Python saw no layer.

        Returns:
            Whether its rows are promised. If not, they stay void.
        """
        self._step = None
        if replayed and step.first is None:
            return False  # recorded copies know only the ring of places
        if not replayed and any(seen != 1 for seen in step.layers_seen):
            return False
        transfer = self._transfer
        transfer.wait(current_stream(self._device).record())
        start = transfer.record(timed=True)
        first = step.first or 0
        # A ring of layers also uses the memory of the spare place.
        end = self.places + 1 if step.first is None else first + step.tokens
        if step.first is not None:
            self._save(self._staged.rows[:, first:end], step, self._segments)
        written = host_tensor((step.tokens,), torch.bool, self._device)

        def prove() -> None:
            written.copy_((step.marks == step.number).all(0), non_blocking=True)

        transfer.keep(step.marks)
        transfer.run(prove)
        done = transfer.record(timed=True)
        self._in_flight.append((first, end, done))
        step.entry.promised = True
        self.ledger.prove(Proof(step.entry, written, start, done))
        self.tokens += step.tokens
        return True

    def _save(self, rows: torch.Tensor, step: Step, segments: torch.Tensor) -> None:
        size, slots = self.arena.layout.page_size, step.where[0]
        self._transfer.keep(step.where)
        self._transfer.run(
            lambda: save_rows(rows, slots, self._shadows, self._memory, segments, size)
        )

    def _encode(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._codec.is_view:
            return hidden.view(torch.uint8), None
        return self._codec.encode(hidden)

    # ---- backup ----

    def back_up(self, slots: Ids, host_pages: Ids) -> None:
        """The pages of ``slots`` become ``host_pages``, without a copy: :meth:`Arena.swap`."""
        self._use_shadows(self.arena.swap(slots, host_pages))

    def host_freed(self, host_pages: Ids) -> None:
        """See :meth:`Arena.host_freed`."""
        self.ledger.settle()
        self._use_shadows(self.arena.host_freed(host_pages))

    def transfers(self) -> Event:
        """An event behind every transfer that was launched so far."""
        return self._transfer.record()

    def _use_shadows(self, changes: ShadowChanges) -> None:
        if not len(changes.device_pages):
            return
        ids = np.stack((changes.device_pages, changes.physical))
        both = held_for_device(ids, self._device)

        def change() -> None:
            pages, physical = both.to(self._device, non_blocking=True)
            self._shadows[pages] = physical

        self._transfer.run(change)

    @property
    def _flat(self) -> torch.Tensor:
        return self._staged.rows.view(-1)
