"""One block of a program that a test writes, with registers that the test fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import numpy as np

from .machine import Machine, Run, decode
from .memory import Global, Span
from .numbers import Array
from .program import parse
from .watchers import Watcher

_HEADER = """.visible .entry kernel()
.reqntid {threads}
{{
.reg .pred %p<99>;
.reg .b16 %rs<99>;
.reg .b32 %r<999>;
.reg .b64 %rd<99>;
.reg .b32 a<2>;
"""


def run(
    text: str,
    registers: Mapping[str, Array] | None = None,
    threads: int = 32,
    blocks: int = 1,
    spans: Sequence[Span] = (),
    shared: Array | None = None,
    watchers: Sequence[Watcher] = (),
    order: Random | None = None,
) -> Machine:
    """The blocks after their run. Arrays of registers are repeated for all lanes; ``shared`` is the
    shared memory of the first block at its start."""
    program = parse(_HEADER.format(threads=threads) + text + "\nret;\n}\n")
    shared = np.zeros(0, dtype="u1") if shared is None else shared.view("u1").ravel()
    steps, memory = decode(program), Global(spans)
    whole = Run(program, steps, (blocks, 1, 1), b"", memory, shared.size, watchers, order)
    machine = Machine(whole, range(blocks))
    if shared.size:
        for word, value in enumerate(shared.view("u8")):
            machine.shared.write(np.array([machine.shared.start + 8 * word]), [value[None]])
    for name, values in (registers or {}).items():
        machine.registers[name] = np.resize(values, machine.lanes)
    with np.errstate(all="ignore"):
        machine.run()
    return machine
