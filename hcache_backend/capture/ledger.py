"""Tells the arena what happened to slots, in the scheduler's order, without waiting for the device.

- Slots, tokens and verdicts are in device memory. The next forward pass copies them to the CPU.
- The engine waits for the results of a pass before it launches two more (with pipeline stages
  more). So a copy is known to have arrived once the next pass has begun: no rank waits, and all
  know it at the same point."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from hcache_backend.arena import Arena, Ids
from hcache_backend.streams import Event, HostBuffer, HostBuffers, StreamFailed, current_stream


@dataclass(eq=False)
class Read:
    """Device values that are wanted on the CPU, int64 ``[n]``; None until they arrive."""

    values: Ids | None = None


@dataclass(eq=False)
class StepEntry:
    """One forward pass, as the arena sees it."""

    promised: bool = False  # everything that captures its rows was launched
    # its slots and the ticket of Arena.begin_step, once the arena knows the step
    begun: tuple[Ids, int] | None = None


class StepResult(NamedTuple):
    """A :class:`.RowState` of each row of a step, on the CPU once ``done`` has passed."""

    step: StepEntry | None  # None: the step was forgotten
    verdicts: HostBuffer  # uint8 [n]
    start: Event
    done: Event


class _Entry(NamedTuple):
    """A call to the arena, to be made once ``read`` has arrived."""

    read: Read
    apply: Callable[[Ids], None]
    step: StepEntry | None = None


class _Copy(NamedTuple):
    """A copy under way: the values of ``reads``, one after the other."""

    passes: int
    reads: Sequence[Read]
    lengths: Sequence[int]
    buffer: HostBuffer
    event: Event


class Ledger:
    """Events that the arena does not know. Scheduler thread; slots are int64 ``[n]`` tensors."""

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.broken: str | None = None  # why nothing more can be learned: all rows are void
        self.passes = 0  # that have begun
        # Most passes whose results the engine may lack when the next one has begun.
        self.without_results = 1
        self.missing_tokens = 0  # with a promised row that was not written
        self.unfit_tokens = 0  # with a row that the codec cannot hold
        self.transfer_ms = 0.0  # of stage two
        self.buffers = HostBuffers(device)
        self._arena, self._device = arena, device
        self._wanted: list[tuple[Read, torch.Tensor]] = []  # the next pass copies these to the CPU
        self._copies: deque[_Copy] = deque()  # under way
        self._entries: deque[_Entry] = deque()  # calls to the arena, which wait for copies
        self._results: deque[StepResult] = deque()  # of steps, on their way

    def pass_begins(self) -> None:
        """Call before the engine launches a forward pass: tells the arena of earlier passes."""
        try:
            self.settle(wait=False)
        finally:
            self.passes += 1  # all ranks count the same

    def note_allocated(self, slots: torch.Tensor) -> None:
        self._entries.append(_Entry(self.read(slots), self._arena.note_allocated))

    def note_not_captured(self, slots: torch.Tensor) -> None:
        """A forward pass fills ``slots`` and leaves no rows."""
        self._entries.append(_Entry(self.read(slots), self._arena.note_not_captured))

    def note_loaded(self, slots: torch.Tensor, host_pages: Ids) -> None:
        """A load begins: ``slots`` will hold the tokens of ``host_pages`` (int64 ``[p]``)."""
        tickets = self._arena.tickets(host_pages)
        apply = partial(self._arena.note_loaded, host_pages=host_pages, tickets=tickets)
        self._entries.append(_Entry(self.read(slots), apply))

    def begin_step(
        self, slots: torch.Tensor, launch: Callable[[torch.Tensor, torch.Tensor], object]
    ) -> tuple[StepEntry, torch.Tensor]:
        """A forward pass over ``slots`` begins, which copies all that is wanted to the CPU.
        ``launch`` writes slots, positions and token ids on the current stream, to int64 ``[3, n]``
        on the device and ``[3 * n]`` on the CPU. Returns the step's entry and the device tensor."""
        self._forget_allocation_of(slots)
        self.copy_wanted()
        table = torch.empty((3, slots.numel()), dtype=torch.int64, device=self._device)
        buffer, stream = self.buffers.take(table.numel(), torch.int64), current_stream(self._device)
        stream.run(lambda: launch(table, buffer.values))
        read, entry = Read(), StepEntry()
        self._copies.append(_Copy(self.passes, [read], [table.numel()], buffer, stream.record()))
        self._entries.append(_Entry(read, partial(self._begin, entry), entry))
        return entry, table

    def take_counts(self) -> tuple[float, int, int]:
        """Milliseconds of transfers, missing tokens and unfit tokens, each since the last call."""
        taken = self.transfer_ms, self.missing_tokens, self.unfit_tokens
        self.transfer_ms, self.missing_tokens, self.unfit_tokens = 0.0, 0, 0
        return taken

    def add_result(self, result: StepResult) -> None:
        """Queue the verdicts of a step; call in the order of the steps."""
        self._results.append(result)

    @property
    def none_lost(self) -> bool:
        """True if no forward pass is known to have lost rows of slots that are still its own."""
        steps = (entry.step for entry in self._entries if entry.step is not None)
        return self.broken is None and self._arena.none_lost and all(s.promised for s in steps)

    def settle(self, *, wait: bool = True) -> None:
        """Make, in order, the calls to the arena whose values are on the CPU. ``wait``: first wait
        for all values, though not for the end of a forward pass, nor for verdicts of steps."""
        try:
            if wait:
                self.copy_wanted()
            known = self.passes - self.without_results
            while self._copies and (wait or self._copies[0].passes <= known):
                self._arrive(self._copies.popleft())
            # Verdicts first: the next entry may give their slots to other tokens.
            self._apply_results()
            while self._entries and self._entries[0].read.values is not None:
                read, apply, *_ = self._entries.popleft()
                assert read.values is not None
                apply(read.values)
                self._apply_results()
        except (StreamFailed, torch.OutOfMemoryError) as error:
            self.give_up(str(error))

    def give_up(self, problem: str) -> None:
        """End capture for good: no captured row can be trusted."""
        self.broken = f"capture broke: {problem}"
        self.forget()

    def forget(self) -> None:
        """Drop what is known of captured rows: all slots were freed, or the weights changed."""
        self._entries.clear()
        # The device still writes to the buffers of these results.
        self._results = deque(result._replace(step=None) for result in self._results)
        self._arena.forget()

    def read(self, values: torch.Tensor) -> Read:
        """Ask the next pass to bring ``values`` (int64 ``[n]``, on the device) to the CPU."""
        read = Read()
        self._wanted.append((read, values))
        return read

    def _forget_allocation_of(self, slots: torch.Tensor) -> None:
        """Drop the last note if it is the allocation of a step's ``slots``: a step is one, too."""
        if self._wanted and self._entries:
            [read, values], last = self._wanted[-1], self._entries[-1]
            is_same = values.data_ptr() == slots.data_ptr() and values.shape == slots.shape
            if is_same and last.read is read and last.apply == self._arena.note_allocated:
                self._wanted.pop()
                self._entries.pop()

    def copy_wanted(self) -> None:
        """Copy what is wanted to the CPU on the current stream; every forward pass must call it."""
        wanted = self._wanted
        if not wanted:
            return
        lengths = [values.numel() for _, values in wanted]
        joined = torch.empty(sum(lengths), dtype=torch.int64, device=self._device)
        buffer, stream = self.buffers.take(sum(lengths), torch.int64), current_stream(self._device)
        for _, values in wanted:
            stream.keep(values)  # made on the scheduler's stream, and ours to drop

        def copy() -> None:
            torch.cat([values.to(torch.int64) for _, values in wanted], out=joined)
            buffer.values.copy_(joined, non_blocking=True)

        stream.run(copy)
        reads = [read for read, _ in wanted]
        self._copies.append(_Copy(self.passes, reads, lengths, buffer, stream.record()))
        self._wanted = []

    def _arrive(self, copy: _Copy) -> None:
        """Wait for ``copy``, give each of its reads its values, and give the buffer back."""
        copy.event.synchronize()
        values, end = copy.buffer.array.copy(), 0
        self.buffers.give_back(copy.buffer)
        for read, length in zip(copy.reads, copy.lengths, strict=True):
            read.values, end = values[end : end + length], end + length

    def _begin(self, entry: StepEntry, token_table: Ids) -> None:
        slots, positions, token_ids = token_table.reshape(3, -1)
        ticket = self._arena.begin_step(slots, positions, token_ids, promised=entry.promised)
        entry.begun = slots, ticket

    def _apply_results(self) -> None:
        """Give the arena the verdicts that have arrived, of steps that it knows, in order."""
        while self._results and self._results[0].done.query():
            step, verdicts, start, done = self._results[0]
            if step is not None and step.begun is None:
                break
            self._results.popleft()
            done.synchronize()
            self.transfer_ms += start.elapsed_time(done)
            if step is not None and step.begun is not None:
                missing, unfit = self._arena.end_step(*step.begun, verdicts.array)
                self.missing_tokens += missing
                self.unfit_tokens += unfit
            self.buffers.give_back(verdicts)
