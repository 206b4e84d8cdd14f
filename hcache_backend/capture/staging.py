"""Two-stage capture (paper section 4.2.2): staging on the device, then one transfer per step.

- Stage one runs on the forward pass's stream, also in a CUDA graph: one kernel per layer copies the
  projection's input to a ring of rows.
- Stage two runs on its own stream: one launch moves all layers of a step to the shadow pages of its
  tokens. With a codec another launch encodes them first.
- A step that is too long for these rows uses the same memory as a ring of layers.
- The forward pass never waits for the CPU. If staging is full, its *stream* waits for the transfer
  that still reads the rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import numpy as np
import torch

from hcache_backend.arena import Arena, Ids, ShadowChanges
from hcache_backend.capture.ledger import Ledger, StepEntry, StepResult
from hcache_backend.streams import (
    Event,
    Stream,
    StreamFailed,
    Work,
    current_stream,
    held_for_device,
    new_stream,
    recording_graph,
    run_here,
)
from hcache_kernels.codecs import Codec
from hcache_kernels.staging import (
    NOWHERE,
    WRONG_STEP,
    StagedRows,
    StepTargets,
    TokenRows,
    begin_rows,
    judge_rows,
    save_rows,
    stage_rows,
)

_AT_ONCE_BYTES = 64 << 20  # of rows encoded in one call


@dataclass
class Step:
    """One forward pass that is being captured."""

    tokens: int
    number: int  # in the marks
    token_table: torch.Tensor  # slots, positions and token ids, int64 [3, tokens] on the device
    entry: StepEntry
    first: int | None  # in the ring of rows; None: its layers go round in the ring
    marks: torch.Tensor  # the step that wrote each row, int64 [layers, tokens] on the device
    layers_seen: list[int]  # how often Python saw each layer being staged


def encoding_memory(codec: Codec, device: torch.device) -> torch.Tensor | None:
    """Memory for the rows that :func:`stored_rows` encodes at once on a GPU; None: not needed."""
    if codec.is_view or device.type != "cuda":
        return None
    rows = max(1, _AT_ONCE_BYTES // (codec.hidden_size * codec.dtype.itemsize))
    return torch.empty((rows, codec.row_bytes), dtype=torch.uint8, device=device)


def stored_rows(
    codec: Codec, rows: torch.Tensor, marks: torch.Tensor, out: torch.Tensor | None = None
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Encode staged ``rows`` (uint8 ``[layers, n, row_bytes]``, contiguous by layer) part by part,
    on the current stream. Yields a part of the layers, a part of the tokens, and their rows as
    pages hold them, uint8 ``[layers, tokens, codec.row_bytes]``. ``marks`` (int64 ``[layers, n]``)
    become :data:`WRONG_STEP` for rows that the codec cannot hold. ``out``: encoding_memory()."""
    tokens, everything = rows.shape[1], slice(None)
    if codec.is_view:
        yield everything, everything, rows
        return
    at_once = max(1, _AT_ONCE_BYTES // rows.shape[2])
    for first in range(0, len(rows), layers := max(1, at_once // tokens)):
        for start in range(0, tokens, at_once):
            layer_part, token_part = slice(first, first + layers), slice(start, start + at_once)
            values, marks_of_part = rows[layer_part, token_part], marks[layer_part, token_part]
            encoded, ok = codec.encode(values.reshape(-1, rows.shape[2]).view(codec.dtype), out)
            marks_of_part.masked_fill_(ok.logical_not_().view_as(marks_of_part), WRONG_STEP)
            yield layer_part, token_part, encoded.view(*marks_of_part.shape, -1)


class Staging:
    """Device memory that rows pass through, made before CUDA graphs, which keep its addresses."""

    def __init__(
        self, layers: int, width: int, dtype: torch.dtype, capacity: int, device: torch.device | str
    ) -> None:
        """``layers``: number of captured ones, or 0. ``width``: values of a row."""
        self.layers, self.width, self.dtype = layers, width, dtype
        self.row_bytes = width * dtype.itemsize
        self.capacity = capacity  # tokens; CUDA graphs of larger batches are not captured
        self.device = torch.device(device)
        self._take_memory()
        targets = torch.full((capacity,), NOWHERE, dtype=torch.int64, device=device)
        self._now = StepTargets(targets, torch.zeros(1, dtype=torch.int64, device=device))
        self._step_targets = capacity, self._now.targets  # staging rows of so many tokens

    def _take_memory(self) -> None:
        shape = (self.layers, self.capacity)
        rows = torch.zeros((*shape, self.row_bytes), dtype=torch.uint8, device=self.device)
        self.staged = StagedRows(rows, torch.zeros(shape, dtype=torch.int64, device=self.device))

    def free(self) -> None:
        """Give the memory back; nothing may be under way. Recorded copies then do nothing."""
        self.name_none()
        current_stream(self.device).record().synchronize()  # a replay uses another stream
        self.capacity = 0
        self._take_memory()

    @staticmethod
    def bytes_for(layers: int, row_bytes: int, capacity: int) -> int:
        return layers * capacity * (row_bytes + torch.int64.itemsize)

    def begin(
        self, tokens: TokenRows, step: int, ring_rows: range
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """``launch`` for :meth:`Ledger.begin_step`. Rows go to ``ring_rows``; empty: nowhere."""
        return lambda table, copied: begin_rows(tokens, table, copied, self._now, step, ring_rows)

    def name_none(self) -> None:
        """Stage no rows from now on: every row has the target NOWHERE, on the current stream."""
        current_stream(self.device).run(lambda: self._now.targets.fill_(NOWHERE))

    def forget_marks(self) -> None:
        """Step numbers begin anew: no row is of any step. Nothing may be under way."""
        self.staged.marks.zero_()

    def fits(self, hidden: object, rows: int) -> TypeGuard[torch.Tensor]:
        """True if ``hidden`` has at least ``rows`` rows of this width and type."""
        if not isinstance(hidden, torch.Tensor) or hidden.dtype != self.dtype:
            return False
        matrix = len(shape := hidden.shape) == 2 and hidden.stride(1) == 1
        return matrix and shape[0] >= rows and shape[1] == self.width

    def stage(self, layer: int, hidden: torch.Tensor, rows: int) -> None:
        """Copy the first ``rows`` of ``hidden`` to the staging rows of the present step."""
        if rows > self.capacity:
            return  # a recorded batch that is too large: its rows will lack their marks
        if self._step_targets[0] != rows:
            self._step_targets = rows, self._now.targets[:rows]
        if hidden.shape[0] != rows:
            hidden = hidden[:rows]
        targets, step = self._step_targets[1], self._now.number
        run_here(self.device, stage_rows, hidden, targets, step, self.staged, layer)

    def record(self, layer: int, hidden: object) -> None:
        """Copy ``hidden`` while a CUDA graph is recorded; a replay uses its own step's targets.
        Also for the warm-up: a kernel must not be compiled while a graph is recorded."""
        if self.fits(hidden, 0):
            self.stage(layer, hidden, len(hidden))


@dataclass(eq=False)
class Capture:
    """What a server captures of its forward passes: here nothing, for pages of K and V. Scheduler
    thread only. Methods with tensor arguments run while the stream that made them is current."""

    arena: Arena

    def note_allocated(self, slots: torch.Tensor) -> None:
        """Slots of the KV pool were allocated: whatever was captured for them is void."""

    def load_begins(self, slots: torch.Tensor, host_pages: Ids) -> None:
        """``slots`` will hold the tokens of ``host_pages``."""

    def settle(self) -> None:
        """Tell the arena what is known of captured rows, without a wait."""

    def go_before(self, stream: Stream) -> None:
        """Let ``stream`` wait for the rows that are on their way to the arena."""

    def take_back(self, host_pages: Ids) -> None:
        """HiCache freed ``host_pages``, whose tokens may still be on the device."""
        self.arena.free(host_pages)

    def free_all(self) -> None:
        """All host pages and slots were freed. Waits for what is on its way to pages."""
        self.arena.clear()


@dataclass(eq=False)
class StagedCapture(Capture):
    """Takes the hidden states of every token of every step to the arena's shadow pages. An eager
    step may be up to ``staging.layers`` times as long as its capacity."""

    memory: torch.Tensor  # the arena's, uint8 [pages, stride]
    _staging: Staging
    _segments: Sequence[int]  # of a page, for each captured layer
    codec: Codec

    def __post_init__(self) -> None:
        arena, self.device = self.arena, self._staging.device
        self.most_at_once = self._staging.capacity  # tokens; longer steps go layer by layer
        self.waits_for_staging = 0  # times that a forward pass's stream waited for a transfer
        self.ledger = Ledger(arena, self.device)
        offsets = [arena.layout.segment_offsets[segment] for segment in self._segments]
        self.segments = torch.tensor(offsets, dtype=torch.int64, device=self.device)
        self._shadows = torch.from_numpy(arena.shadows).to(self.device)
        self._steps = 0
        self._next_row = 0
        self._in_flight: deque[tuple[int, int, Event]] = deque()  # rows [first, end) being read
        # Staging as parts that the layers of a long step use in turn, the last used one at the end,
        # and the events after which they may be written again.
        self._ring: deque[tuple[torch.Tensor, Event | None]] | None = None
        self._step: Step | None = None
        self._transfer = new_stream(self.device, "transfer")
        self._encoded = encoding_memory(self.codec, self.device)  # used on that stream alone

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, all captured layers."""
        return self.segments.numel() * self.codec.row_bytes

    def begin(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> Step | None:
        """Begin a step: until :meth:`end`, :meth:`take` stages rows of these tokens (int64 ``[n]``
        each, on the device). Returns None if that is not possible: then the tokens are void."""
        self._step = None
        tokens = slots.numel()
        while self._in_flight and self._in_flight[0][2].query():
            self._in_flight.popleft()
        self._steps += 1
        ring_rows = self._free_rows(tokens)
        begin = self._staging.begin((slots, positions, token_ids), self._steps, ring_rows)
        entry, token_table = self.ledger.begin_step(slots, begin)
        if self.ledger.broken is not None:
            self.skip()
        elif ring_rows:
            self._step = self._use_rows(ring_rows, token_table, entry)
        elif tokens * self._staging.row_bytes <= self._staging.staged.rows.numel():
            self._step = self._use_layers(tokens, token_table, entry)
        else:
            self.skip()
        return self._step

    def skip(self) -> None:
        """A forward pass begins that is not captured: recorded copies copy nothing."""
        self._step = None
        self._staging.name_none()
        self.ledger.copy_wanted()

    def give_up_step(self) -> None:
        """Call if :meth:`begin` raised: recorded graphs, which run all the same, copy nothing."""
        self._step = None
        try:
            self._staging.name_none()
        except Exception as error:
            self.ledger.give_up(f"{type(error).__name__}: {error}")

    def _free_rows(self, tokens: int) -> range:
        """The next rows of the ring for so many tokens; empty if these are too many at once."""
        if tokens > self.most_at_once:
            return range(0)
        first = self._next_row if self._next_row + tokens <= self._staging.capacity else 0
        return range(first, first + tokens)

    def _use_rows(self, ring_rows: range, token_table: torch.Tensor, entry: StepEntry) -> Step:
        """A step whose tokens have ``ring_rows`` in all layers, free once earlier transfers end."""
        first, tokens, layers = ring_rows.start, len(ring_rows), self._staging.layers
        self._ring, self._next_row = None, ring_rows.stop
        self._wait_for_rows(first, ring_rows.stop)
        marks = self._staging.staged.marks.narrow(1, first, tokens)
        return Step(tokens, self._steps, token_table, entry, first, marks, [0] * layers)

    def _use_layers(self, tokens: int, token_table: torch.Tensor, entry: StepEntry) -> Step:
        """A step that is too long for the rows: staging becomes a ring of whole layers."""
        # No graph that copies to these rows is replayed: none is recorded for so long a step.
        size = tokens * self._staging.row_bytes
        if self._ring is None or len(self._ring[0][0]) != size:
            self._wait_for_rows(0, self._staging.capacity)
            memory = self._staging.staged.rows.view(-1)
            parts = memory[: len(memory) // size * size].split(size)
            self._ring = deque((part, None) for part in parts)
        shape = (self._staging.layers, tokens)
        marks = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return Step(tokens, self._steps, token_table, entry, None, marks, [0] * shape[0])

    def _wait_for_rows(self, first: int, end: int) -> None:
        """Let the current stream wait for the transfers out of rows ``[first, end)``."""
        overlaps = [i for i, (a, b, _) in enumerate(self._in_flight) if a < end and first < b]
        for _ in range(overlaps[-1] + 1 if overlaps else 0):
            *_, last = self._in_flight.popleft()
        if overlaps and not last.query():
            self.waits_for_staging += 1
            current_stream(self.device).wait(last)

    def take(self, layer: int, hidden: object) -> None:
        """Stage the projection's input of a layer; outside of a step only to record CUDA graphs."""
        step = self._step
        if step is None:
            if recording_graph():
                self._staging.record(layer, hidden)
        elif self._staging.fits(hidden, step.tokens):
            step.layers_seen[layer] += 1
            if step.first is not None:
                self._staging.stage(layer, hidden, step.tokens)
            else:
                self._move_layer(step, layer, hidden[: step.tokens])

    def _move_layer(self, step: Step, layer: int, hidden: torch.Tensor) -> None:
        """Copy one layer to staging and from there to the arena: a long step's ring of layers."""
        assert self._ring is not None
        now = current_stream(self.device)
        self._ring.rotate(-1)
        part, moved = self._ring[-1]
        if moved is not None and not moved.query():
            self.waits_for_staging += 1
            now.wait(moved)
        rows = part.view(1, step.tokens, -1)

        def stage() -> None:
            rows[0].copy_(hidden.view(torch.uint8))
            step.marks[layer] = step.number

        now.run(stage)
        self._transfer.wait(now.record())
        self._save(rows, step, slice(layer, layer + 1))
        self._ring[-1] = part, self._transfer.record()

    def end(self, step: Step, *, replayed: bool) -> bool:
        """Launch the transfer of a step's rows behind the forward pass. ``replayed``: a CUDA graph
        ran the pass, so Python saw no layer. False if a layer lacks rows: all rows stay void."""
        self._step = None
        if replayed and step.first is None:
            return False  # recorded copies know only the ring of rows
        if not replayed and step.layers_seen.count(1) != self._staging.layers:
            return False  # transfers may still read memory that the next step writes
        transfer = self._transfer
        transfer.wait(current_stream(self.device).record())
        start = transfer.record(timed=True)
        verdicts = self.ledger.buffers.take(step.tokens, torch.uint8)
        judge = partial(judge_rows, step.marks, step.number, verdicts.values)
        if step.first is None:
            rows_in_use = 0, self._staging.capacity
            transfer.run(judge)
        else:
            rows_in_use = step.first, step.first + step.tokens
            rows = self._staging.staged.rows.narrow(1, step.first, step.tokens)
            self._save(rows, step, slice(None), judge)
        done = transfer.record(timed=True)
        self._in_flight.append((*rows_in_use, done))
        step.entry.promised = True
        self.ledger.add_result(StepResult(step.entry, verdicts, start, done))
        return True

    def _save(self, rows: torch.Tensor, step: Step, layers: slice, *then: Work) -> None:
        """Stage two, on the stream of transfers: encode and save staged rows of some layers (uint8
        ``[layers, tokens, row_bytes]``), mark those that the codec cannot hold, do ``then``."""
        layout, slots = self.arena.layout, step.token_table[0]
        segments, marks = self.segments[layers], step.marks[layers]

        def save() -> None:
            encoded = stored_rows(self.codec, rows, marks, self._encoded)
            # There are no rows if no layer is captured: only ``then`` is done.
            for layer_part, token_part, stored in encoded if rows.numel() else ():
                part, offsets, size = slots[token_part], segments[layer_part], layout.page_size
                save_rows(stored, part, self._shadows, self.memory, offsets, size, layout.kept)
            for work in then:
                work()

        self._transfer.keep(step.token_table)
        self._transfer.keep(step.marks)
        self._transfer.run(save)

    def back_up(self, slots: Ids, host_pages: Ids) -> None:
        self._use_shadows(self.arena.swap(slots, host_pages))

    def note_allocated(self, slots: torch.Tensor) -> None:
        if slots.numel():
            self.ledger.note_allocated(slots)

    def load_begins(self, slots: torch.Tensor, host_pages: Ids) -> None:
        self.ledger.note_loaded(slots, host_pages)

    def settle(self) -> None:
        self.ledger.settle(wait=False)

    def go_before(self, stream: Stream) -> None:
        stream.wait(self.transfers())

    def take_back(self, host_pages: Ids) -> None:
        self.ledger.settle()
        self._use_shadows(self.arena.take_back(host_pages))

    def free_all(self) -> None:
        with suppress(StreamFailed):
            self.transfers().synchronize()  # they write to host pages
        self.ledger.forget()
        super().free_all()

    def transfers(self) -> Event:
        """An event behind every transfer that was launched so far."""
        return self._transfer.record()

    def _use_shadows(self, changes: ShadowChanges) -> None:
        """Enter new physical pages of device pages into the table of shadows on the device."""
        if not len(changes.device_pages):
            return
        entries = held_for_device(np.stack(changes), self.device)

        def change() -> None:
            pages, physical = entries.to(self.device, non_blocking=True)
            self._shadows[pages] = physical

        self._transfer.run(change)
