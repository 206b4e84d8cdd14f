"""Brings what happens to slots on the device to the arena, in order and without waiting for it.

Which slots a step fills, with which tokens, and which of its rows were really written stands in
device memory. Small copies of it travel on a stream of their own; the arena is told when they have
arrived, in the order in which the scheduler did things.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hcache_backend.arena import Ids
from hcache_backend.capture.shadows import ShadowArena
from hcache_backend.streams import (
    Event,
    StreamFailed,
    current_stream,
    host_tensor,
    new_stream,
)


@dataclass
class Read:
    """Values that are on their way to the CPU: int64, on the CPU once ``event`` has passed."""

    values: torch.Tensor
    event: Event


@dataclass
class StepEntry:
    """One forward pass, as the arena sees it.

    Attributes:
        read: Slots, positions and token ids, int64 ``[3, n]``.
        promised: Whether everything that captures its rows was launched.
        ticket: The arena's, once it knows the step.
    """

    read: Read
    promised: bool = False
    ticket: int | None = None


@dataclass
class Proof:
    """A ``Verdict`` on each row of a step: uint8 ``[n]``, on the CPU once ``done`` has passed."""

    step: StepEntry
    verdicts: torch.Tensor
    start: Event
    done: Event


class Ledger:
    """What the arena does not know yet. Only the scheduler thread may use it.

    Attributes:
        broken: Why nothing more can be learned, or None. All rows are void then.
        tokens_missing: Tokens with a row that was promised and not written. Whoever counts these
            somewhere else sets them to 0; the next two likewise.
        tokens_unfit: Tokens with a row that the codec could not hold.
        transfer_ms: Time that stage two took.
    """

    def __init__(self, arena: ShadowArena, device: torch.device) -> None:
        self.broken: str | None = None
        self.tokens_missing = 0
        self.tokens_unfit = 0
        self.transfer_ms = 0.0
        self._arena = arena
        self._device = device
        self._stream = new_stream(device, "reader")
        self._entries: deque[tuple[Read, Callable[[Ids], None]]] = deque()
        self._proofs: deque[Proof] = deque()

    def allocated(self, slots: torch.Tensor) -> None:
        """Slots (int64 ``[n]``, on the device) were allocated."""
        self._entries.append((self.read(slots), self._arena.allocated))

    def loaded(self, slots: torch.Tensor, host_pages: Ids) -> None:
        """``slots`` (int64 ``[n]``, on the device) will hold the tokens of ``host_pages``."""
        self._entries.append((self.read(slots), partial(self._arena.loaded, host_pages=host_pages)))

    def step(self, where: torch.Tensor) -> StepEntry:
        """A forward pass over ``where`` (slots, positions, token ids: int64 ``[3, n]``) begins."""
        entry = StepEntry(self.read(where))
        self._entries.append((entry.read, partial(self._begin, entry)))
        return entry

    def prove(self, proof: Proof) -> None:
        """``proof`` will say which rows of its step were written. In the order of the steps."""
        self._proofs.append(proof)

    def settle(self, *, wait: bool = True) -> None:
        """Tell the arena what has arrived.

        Args:
            wait: Also for slots that are still on their way; they stand behind the beginning of
                the last forward pass, not behind its end. Proofs are never waited for.
        """
        try:
            # Proofs first: the next entry may give their slots to other tokens.
            self._apply_proofs()
            while self._entries and (wait or self._entries[0][0].event.query()):
                read, tell = self._entries.popleft()
                read.event.synchronize()
                tell(read.values.numpy())
                self._apply_proofs()
        except StreamFailed as error:
            self.give_up(str(error))

    def give_up(self, problem: str) -> None:
        """Nothing that was captured can be believed, and nothing will be."""
        self.broken = f"capture broke: {problem}"
        self.forget()

    def forget(self) -> None:
        """All slots were freed, or all rows lost their meaning."""
        self._entries.clear()
        self._proofs.clear()
        self._arena.clear()

    def slots_on_cpu(self, slots: torch.Tensor) -> Ids:
        """``slots`` (int64 ``[n]``, on the device) as an array; waits for the current stream.

        Raises:
            StreamFailed: They could not be read.
        """
        read = self.read(slots)
        read.event.synchronize()
        return read.values.numpy()

    def read(self, values: torch.Tensor) -> Read:
        """Bring ``values`` to the CPU, as they are when the current stream gets here."""
        target = host_tensor(values.shape, torch.int64, self._device)
        self._stream.wait(current_stream(self._device).record())
        self._stream.keep(values)
        self._stream.run(lambda: target.copy_(values, non_blocking=True))
        return Read(target, self._stream.record())

    def _begin(self, entry: StepEntry, where: Ids) -> None:
        slots, positions, token_ids = where
        entry.ticket = self._arena.begin(slots, positions, token_ids)
        if entry.promised:
            self._arena.promise(slots, entry.ticket)

    def _apply_proofs(self) -> None:
        while self._proofs and self._proofs[0].done.query():
            ticket = self._proofs[0].step.ticket
            if ticket is None:
                break
            proof = self._proofs.popleft()
            proof.done.synchronize()
            self.transfer_ms += proof.start.elapsed_time(proof.done)
            slots, verdicts = proof.step.read.values[0].numpy(), proof.verdicts.numpy()
            lost = self._arena.prove(slots, ticket, verdicts)
            self.tokens_missing += lost.missing
            self.tokens_unfit += lost.unfit
