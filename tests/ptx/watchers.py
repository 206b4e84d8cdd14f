"""Watchers of a run: who reads and writes the same bytes, which lines ran, what accesses cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .numbers import Array
from .operands import WARP
from .program import Fault, Instruction

if TYPE_CHECKING:
    from .machine import Machine
    from .memory import Global, Shared, Span

SECTOR, BANKS, WORD = 32, 32, 4  # bytes of global memory, banks of shared memory and their bytes


class Watcher:
    """Sees every step and every access to memory; this one does nothing."""

    def step(self, one: Instruction, lanes: Array) -> None:
        """Before an instruction; ``lanes`` are those that come to it, whatever its guard."""

    def access(
        self, m: Machine, memory: Global | Shared, how: str, lanes: Array, at: Array, size: int
    ) -> None:
        """``size`` bytes of each lane; ``how``: "read", "write", "atomic", or "same": a
        write of what is there."""


class Lines(Watcher):
    """Which lines of Python ran, as file and number."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int]] = set()

    def step(self, one: Instruction, lanes: Array) -> None:
        self.seen.update(one.places)


_ATOMIC, _MANY, _MANY_BLOCKS = 0xFE, 0xFF, np.int64(1 << 62)
"""In the place of a warp: additions, which may meet each other, and several readers."""


class Races(Watcher):
    """Two warps of a block that touch a byte between the same two barriers, or two programs of a
    launch, are a race if one of them writes. Threads of a warp are not told apart."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[object, Array, Array]] = {}  # by memory: last writers, readers

    def access(
        self, m: Machine, memory: Global | Shared, how: str, lanes: Array, at: Array, size: int
    ) -> None:
        tags = (np.zeros(memory.size, dtype="i8") for _ in range(2))
        _, writers, readers = self._of.setdefault(id(memory), (memory, *tags))
        block = m.block_of[lanes]
        warp = np.full(len(lanes), _ATOMIC) if how == "atomic" else m.warp_of[lanes]
        mine = (m.first_block + block + 1) << 40 | m.epoch[block] << 8 | warp
        at = (memory.number(at)[:, None] + np.arange(size)).ravel()
        mine = np.repeat(mine, size)
        met = _meets(writers[at], mine)
        if how == "read":
            for _ in range(2):  # the second time others of this access are there
                there = readers[at]
                several = np.where(there >> 40 == mine >> 40, mine | _MANY, _MANY_BLOCKS)
                readers[at] = np.where(_meets(there, mine), several, mine)
        elif how == "same":
            writers[at] = np.where(met, writers[at], mine)
            met[:] = False
        else:
            met |= _meets(readers[at], mine)
            writers[at] = mine
            if memory is m.memory:
                met |= _meets(writers[at], mine)  # two at once
        if met.any():
            raise Fault(f"race: {memory.name(int(at[met][0]))}, {how} here, is another's too")


def _meets(there: Array, mine: Array) -> Array:
    other_block = there >> 40 != mine >> 40
    return (there != 0) & (there != mine) & (other_block | (there >> 8 == mine >> 8))


class Costs(Watcher):
    """Counts of a launch, of which the spans of ``host`` are in host memory."""

    def __init__(self, host: Sequence[Span] = ()) -> None:
        self._host = host
        self.instructions = 0  # of warps
        self.bytes, self.sectors = Counter[str](), Counter[str]()  # by "host read" and the like
        self.narrowest: dict[str, int] = {}  # bytes of a thread and instruction
        self.bank_conflicts = 0  # turns that a warp waits for beyond the least

    def step(self, one: Instruction, lanes: Array) -> None:
        self.instructions += len(np.unique(lanes // WARP))

    def access(
        self, m: Machine, memory: Global | Shared, how: str, lanes: Array, at: Array, size: int
    ) -> None:
        if memory is m.shared:
            self._count_turns(lanes, memory.number(at), size)
            return
        host = np.zeros(len(lanes), dtype=bool)
        for span in self._host:
            host |= (at >= span.start) & (at < span.end)
        for where, some in (("host", host), ("device", ~host)):
            if some.any():
                name = f"{where} {how}"
                sectors = np.stack([lanes[some] // WARP, at[some] // SECTOR])
                self.bytes[name] += int(some.sum()) * size
                self.sectors[name] += np.unique(sectors, axis=1).shape[1]
                self.narrowest[name] = min(size, self.narrowest.get(name, size))

    def _count_turns(self, lanes: Array, at: Array, size: int) -> None:
        """Of wide accesses a half or a quarter of a warp comes at a time."""
        words = max(1, size // WORD)
        turn = np.repeat(lanes // (WARP // words), words)
        word = (at[:, None] // WORD + np.arange(words)).ravel()
        turn, word = np.unique(np.stack([turn, word]), axis=1)
        of_bank, count = np.unique(turn * BANKS + word % BANKS, return_counts=True)
        turns, first = np.unique(of_bank // BANKS, return_index=True)
        self.bank_conflicts += int(np.maximum.reduceat(count, first).sum()) - len(turns)
