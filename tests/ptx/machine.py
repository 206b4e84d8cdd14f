"""Runs a program: every thread of every block is a lane, and the lowest program counter goes first,
so that threads of a branch meet again behind it.

With an ``order`` of warps, each runs alone as far as it can, to its next barrier or to its end, in
an order by chance. A barrier that is missing then gives other bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from . import accesses, opcodes, tensor_cores
from .memory import Global, Shared
from .numbers import Array
from .operands import WARP, Lanes, Step, elementwise
from .program import Fault, Instruction, Program
from .watchers import Watcher

MAKERS = {**accesses.MAKERS, **tensor_cores.MAKERS}
CONTROL = ("bra", "bra.uni", "ret", "bar.sync")
NOTHING = {
    "bar.warp.sync": "lanes of a warp go together",
    "fence.proxy.async.shared::cta": "a product reads what is there when it is waited for",
    "wgmma.fence.sync.aligned": "the same",
}
_MOST_LANES = 1 << 14  # that run at once


def decode(program: Program) -> list[Step]:
    """A step for each instruction; of control flow the machine takes care itself."""
    return [_step(program, one) for one in program.instructions]


def _step(program: Program, one: Instruction) -> Step:
    base, *suffixes = one.opcode.split(".")
    try:
        if one.opcode in CONTROL or one.opcode in NOTHING:
            known = one.operands in ((), ("0",), ("-1",)) and not one.guard
            if not known and base != "bra":
                raise Fault("control flow of some")
            return lambda m, lanes: None
        if base in MAKERS:
            return MAKERS[base](program, one, suffixes)
        if base == "mov" and "{" in "".join(one.operands):
            return accesses.move_parts(program, one, suffixes)
        return elementwise(program, one, *opcodes.TABLE[one.opcode])
    except (Fault, KeyError, ValueError, IndexError) as error:
        raise Fault(f"instruction is not known ({error!r}): {one}") from None


class Pending:
    """What lanes began and do not wait for yet, in groups that they commit."""

    def __init__(self, lanes: int) -> None:
        self._committed = np.zeros(lanes, dtype="i8")
        self._waiting: list[tuple[Array, Array, Callable[[Array], None]]] = []

    def begin(self, lanes: Array, land: Callable[[Array], None]) -> None:
        """``land`` is called with a mask of the ``lanes`` that wait for it."""
        self._waiting.append((lanes, self._committed[lanes], land))

    def commit(self, lanes: Lanes) -> None:
        self._committed[lanes] += 1

    def wait(self, lanes: Array, left: int) -> None:
        """Until at most the last ``left`` groups are on their way."""
        done = np.full(len(self._committed), -1)
        done[lanes] = self._committed[lanes] - left
        for some, group, land in self._waiting:
            mask = group < done[some]
            if mask.any():
                land(mask)
                group[mask] = np.iinfo("i8").max
        self._waiting = [one for one in self._waiting if one[1].min() < np.iinfo("i8").max]


@dataclass(frozen=True)
class Run:
    """What all blocks of a launch have in common."""

    program: Program
    steps: Sequence[Step]
    grid: tuple[int, int, int]
    parameters: bytes
    memory: Global
    shared_bytes: int
    watchers: Sequence[Watcher] = ()
    order: Random | None = None

    def all(self) -> None:
        """As many blocks at once as have lanes for."""
        count, at_once = int(np.prod(self.grid)), max(1, _MOST_LANES // self.program.threads)
        with np.errstate(all="ignore"):
            for first in range(0, count, at_once):
                Machine(self, range(first, min(first + at_once, count))).run()


class Machine:
    """Some blocks of a launch, in the middle of a run."""

    def __init__(self, run: Run, blocks: range) -> None:
        self._run, self.threads = run, run.program.threads
        self.lanes = len(blocks) * self.threads
        self.every = np.arange(self.lanes)
        self.block_of = self.every // self.threads
        self.warp_of = self.every % self.threads // WARP
        self.parameters, self.memory = run.parameters, run.memory
        self.shared = Shared(len(blocks), run.shared_bytes, self.threads)
        self.first_block, self.epoch = blocks.start, np.zeros(len(blocks), dtype="i8")
        self.registers: dict[str, Array] = {}
        self.copies, self.products = Pending(self.lanes), Pending(self.lanes)
        self._alive = np.full(len(blocks), self.threads)
        self._parked = np.full(self.lanes, -1)  # program counters at barriers
        # Without shared memory warps have nothing to tell each other, in any order.
        self._team_of = self.warp_of * (run.order is not None and run.shared_bytes > 0)
        teams = range(self._team_of.max() + 1)
        self._waiting = [{0: self.every[self._team_of == team]} for team in teams]

    def special(self, name: str) -> Array:
        """A special register of every lane."""
        which, letter = name[1:].split(".")
        axis, grid = "xyz".index(letter), self._run.grid
        block = self.first_block + self.block_of
        found = {
            "tid": self.every % self.threads if axis == 0 else self.every * 0,
            "ctaid": block // int(np.prod(grid[:axis])) % grid[axis],
            "nctaid": np.full(self.lanes, grid[axis]),
        }
        return found[which].astype("u4")

    def check(self, space: str, lanes: Array, at: Array, size: int, how: str) -> Array:
        """Addresses that may be accessed; watchers are told."""
        memory = self.memory if space == "global" else self.shared
        at = memory.check(lanes, at, size)
        for watcher in self._run.watchers if len(lanes) else ():
            watcher.access(self, memory, how, lanes, at, size)
        return at

    def read(self, space: str, lanes: Array, at: Array, size: int, count: int) -> list[Array]:
        """``count`` words of ``size`` bytes at the address of each lane."""
        at = self.check(space, lanes, at, size * count, "read")
        return (self.memory if space == "global" else self.shared).read(at, size, count)

    def write(self, space: str, lanes: Array, at: Array, values: list[Array]) -> None:
        size, memory = values[0].itemsize, self.memory if space == "global" else self.shared
        at = memory.check(lanes, at, size * len(values))
        same = np.zeros(len(lanes), dtype=bool)
        if self._run.watchers and space == "shared":  # copies of a value, in several threads
            there = memory.read(at, size, len(values))
            same = np.all([old == new for old, new in zip(there, values, strict=True)], axis=0)
        for watcher in self._run.watchers:
            for how, some in (("write", ~same), ("same", same)):
                if some.any():
                    watcher.access(self, memory, how, lanes[some], at[some], size * len(values))
        memory.write(at, values)

    def run(self) -> None:
        while ready := [team for team, waiting in enumerate(self._waiting) if waiting]:
            if self._run.order is not None:
                self._run.order.shuffle(ready)
            for team in ready:
                while self._waiting[team]:
                    self._run_first(self._waiting[team])

    def _run_first(self, waiting: dict[int, Array]) -> None:
        """The lanes with the lowest program counter, until they are with others or divide."""
        program = self._run.program
        pc = min(waiting)
        lanes = waiting.pop(pc)
        every = slice(None) if len(lanes) == self.lanes else lanes
        others = min(waiting, default=len(program.instructions))
        while pc < others:
            one = program.instructions[pc]
            for watcher in self._run.watchers:
                watcher.step(one, lanes)
            wanted, active = None, every
            if one.guard is not None:
                wanted = self.registers[one.guard][every] != one.negated
                active = every if wanted.all() else lanes[wanted]
            if one.opcode in ("bra", "bra.uni"):
                target = program.labels[one.operands[0]]
                if active is not every:
                    _wait(waiting, pc + 1, lanes[~wanted])
                    pc, lanes = target, active
                    break
                pc = target
                continue
            if one.opcode in ("ret", "bar.sync"):
                self._stop(pc, lanes, for_ever=one.opcode == "ret")
                return
            if active is every or len(active):
                try:
                    self._run.steps[pc](self, active)
                except Fault as fault:
                    raise Fault(f"{fault}\n  {one}") from None
            pc += 1
        _wait(waiting, pc, lanes)

    def _stop(self, pc: int, lanes: Array, *, for_ever: bool) -> None:
        """At a barrier or at the end; blocks that are whole at a barrier go on."""
        if for_ever:
            self._alive -= np.bincount(self.block_of[lanes], minlength=len(self._alive))
        else:
            self._parked[lanes] = pc
        there = self.every[self._parked >= 0]
        arrived = np.bincount(self.block_of[there], minlength=len(self._alive))
        whole = (arrived == self._alive) & (arrived > 0)
        there = there[whole[self.block_of[there]]]
        self.epoch += whole
        for at in np.unique(self._parked[there]):
            some = there[self._parked[there] == at]
            for team in np.unique(self._team_of[some]):
                _wait(self._waiting[team], int(at) + 1, some[self._team_of[some] == team])
        self._parked[there] = -1


def _wait(waiting: dict[int, Array], pc: int, lanes: Array) -> None:
    if len(lanes):
        there = waiting.get(pc, lanes[:0])
        waiting[pc] = np.sort(np.concatenate([there, lanes]))
