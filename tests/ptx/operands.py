"""Operands of instructions: how each is read and written for some lanes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .numbers import TYPES, UNSIGNED, Array
from .program import Fault, Instruction, Program

if TYPE_CHECKING:
    from .machine import Machine

Lanes = Any  # slice(None), or the numbers of some lanes
Read = Callable[["Machine", Lanes], Array]
Step = Callable[["Machine", Lanes], None]
PARAMETER_BYTES = 8  # of each, whatever its type: a multiple of its alignment
WARP = 32

_REGISTER = re.compile(r"%?[a-z]+\d+$")
_ADDRESS = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


def list_of(operand: str) -> list[str]:
    """Registers in braces, or one."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def reads(program: Program, operand: str, name: str) -> Read:
    """The value of a register, a constant or an address, as numbers of type ``name``."""
    dtype = TYPES[name]
    if "." in operand:
        return lambda m, lanes: m.special(operand)[lanes].view(dtype)
    if not _REGISTER.match(operand):
        constant = _constant(program, operand, dtype)
        return lambda m, lanes: constant
    size = program.size_of(operand)
    # LLVM leaves halves undefined that it does not use: registers begin as poison, too.
    poison = np.full(1, -1).astype(bool if name == "pred" else UNSIGNED[size])

    def register(m: Machine, lanes: Lanes) -> Array:
        values = m.registers.get(operand)
        values = poison if values is None else values[lanes]
        return (values if size == dtype.itemsize else values.astype(f"u{dtype.itemsize}")).view(
            dtype
        )

    return register


def _constant(program: Program, operand: str, dtype: np.dtype) -> Array:
    if operand in program.parameters:
        return np.array([PARAMETER_BYTES * list(program.parameters).index(operand)], dtype)
    if operand == "global_smem":
        return np.zeros(1, dtype)
    if match := re.match(r"0[fF]([0-9A-Fa-f]{8})$", operand):
        return np.array([int(match[1], 16)], dtype="u4").view(dtype)
    if not re.match(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?$", operand):
        raise Fault(f"operand {operand}")
    value = int(operand.rstrip("U"), 0)
    if dtype.kind == "b":
        return np.array([value != 0])
    bits = value % (1 << 8 * dtype.itemsize)
    return np.array([bits], dtype=UNSIGNED[dtype.itemsize]).view(dtype)


def writes(program: Program, operand: str) -> Callable[[Machine, Lanes, Array], None]:
    """Numbers to a register, which extends integers that are shorter."""
    if operand == "_":
        return lambda m, lanes, values: None
    size = program.size_of(operand)

    def register(m: Machine, lanes: Lanes, values: Array) -> None:
        if operand not in m.registers:
            kind = bool if values.dtype.kind == "b" else UNSIGNED[size]
            m.registers[operand] = np.full(m.lanes, -1).astype(kind)
        if values.dtype.kind != "b":
            kind = "i" if values.dtype.kind == "i" else "u"
            values = values.view(f"{kind if values.itemsize < size else 'u'}{values.itemsize}")
            values = values.astype(f"{kind}{size}", copy=False).view(UNSIGNED[size])
        m.registers[operand][lanes] = values

    return register


def address(program: Program, operand: str) -> Read:
    """The address in [...] of each lane, int64."""
    match = _ADDRESS.match(operand)
    if match is None:
        raise Fault(f"address {operand}")
    base, offset = match[1], int(match[2] or 0)
    is_short = base == "global_smem" or (base.startswith("%") and program.size_of(base) == 4)
    read = reads(program, base, "b32" if is_short else "b64")
    return lambda m, lanes: each(m, lanes, read(m, lanes).astype("i8") + offset)


def each(m: Machine, lanes: Lanes, values: Array) -> Array:
    """A value for each lane."""
    return np.broadcast_to(values, m.every[lanes].shape)


def elementwise(
    program: Program, one: Instruction, types: list[str], function: Callable[..., Array]
) -> Step:
    """The step of an instruction that computes its first operand from the others."""
    write = writes(program, one.operands[0])
    pairs = zip(one.operands[1:], types, strict=True)
    read = [reads(program, operand, name) for operand, name in pairs]
    return lambda m, lanes: write(m, lanes, function(*(value(m, lanes) for value in read)))


def warps(m: Machine, lanes: Lanes) -> Array:
    """Lanes of whole warps, ``[warps, 32]``."""
    some = m.every[lanes]
    if len(some) % WARP or (some.reshape(-1, WARP) != some[::WARP, None] + np.arange(WARP)).any():
        raise Fault("not all threads of a warp are here")
    return some.reshape(-1, WARP)
