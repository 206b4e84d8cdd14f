"""The steps of loads, stores and copies, and of what lanes of a warp tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .memory import POISON
from .numbers import TYPES, UNSIGNED, Array
from .operands import WARP, Lanes, Step, address, each, list_of, reads, warps, writes
from .program import Fault, Instruction, Program

if TYPE_CHECKING:
    from .machine import Machine


def _kind(suffixes: list[str]) -> tuple[str, int, str]:
    """State space, vector length and type of an access."""
    space, *rest = suffixes
    count = int(rest.pop(0)[1:]) if rest[0] in ("v2", "v4", "v8") else 1
    [name] = rest
    if space not in ("global", "shared", "shared::cta", "param") or name not in TYPES:
        raise Fault("kind of access")
    return space.removesuffix("::cta"), count, name


def load(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    space, count, name = _kind(suffixes)
    write = [writes(program, register) for register in list_of(one.operands[0])]
    dtype, find = TYPES[name], address(program, one.operands[1])
    size = dtype.itemsize

    def step(m: Machine, lanes: Lanes) -> None:
        at = find(m, lanes)
        if space == "param":
            found = [np.frombuffer(m.parameters, dtype=UNSIGNED[size])[at // size]]
        else:
            found = m.read(space, m.every[lanes], at, size, count)
        for to_register, values in zip(write, found, strict=True):
            to_register(m, lanes, values.view(dtype))

    return step


def store(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    space, count, name = _kind(suffixes)
    bits = f"b{8 * TYPES[name].itemsize}"
    read = [reads(program, register, bits) for register in list_of(one.operands[1])]
    find = address(program, one.operands[0])
    if space == "param" or len(read) != count:
        raise Fault("kind of store")

    def step(m: Machine, lanes: Lanes) -> None:
        values = [each(m, lanes, register(m, lanes)) for register in read]
        m.write(space, m.every[lanes], find(m, lanes), values)

    return step


def add(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """atom: what was there before depends on the order of threads, so no register has it."""
    if suffixes != ["relaxed", "sys", "shared", "add", "u32"]:
        raise Fault("kind of addition")
    find, read = address(program, one.operands[1]), reads(program, one.operands[2], "u32")

    def step(m: Machine, lanes: Lanes) -> None:
        at = m.check("shared", m.every[lanes], find(m, lanes), 4, "atomic")
        m.shared.add(at, each(m, lanes, read(m, lanes)))

    return step


def copy(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """cp.async: the bytes are poison until the thread waits for their group."""
    if suffixes == ["async", "commit_group"]:
        return lambda m, lanes: m.copies.commit(lanes)
    if suffixes == ["async", "wait_group"]:
        return lambda m, lanes: m.copies.wait(m.every[lanes], int(one.operands[0]))
    if suffixes not in (["async", how, "shared", "global"] for how in ("cg", "ca")):
        raise Fault("kind of copy")
    to, of = (address(program, operand) for operand in one.operands[:2])
    size = int(one.operands[2], 0)
    read = reads(program, one.operands[3] if len(one.operands) > 3 else str(size), "u32")

    def step(m: Machine, lanes: Lanes) -> None:
        some, there = m.every[lanes], to(m, lanes)
        given = each(m, lanes, read(m, lanes))
        wanted, data = given == size, np.zeros((len(some), size // 4), dtype="u4")
        if (given[~wanted] != 0).any():
            raise Fault("a copy of a part")
        words = m.read("global", some[wanted], of(m, lanes)[wanted], 4, size // 4)
        data[wanted] = np.stack(words, axis=1)
        poison = np.full(len(some), POISON * 0x01010101, dtype="u4")
        m.write("shared", some, there, [poison] * (size // 4))

        def land(mask: Array) -> None:
            m.write("shared", some[mask], there[mask], list(data[mask].T))

        m.copies.begin(some, land)

    return step


def shuffle(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    to, *operands, members = one.operands
    how = suffixes[1]
    if suffixes[::2] != ["sync", "b32"] or members != "-1" or "|" in to:
        raise Fault("kind of shuffle")
    if how not in ("up", "down", "bfly", "idx"):
        raise Fault("kind of shuffle")
    write, read = writes(program, to), [reads(program, operand, "b32") for operand in operands]

    def step(m: Machine, lanes: Lanes) -> None:
        whole = warps(m, lanes)
        a, b, c = (each(m, lanes, value(m, lanes)).reshape(-1, WARP) for value in read)
        lane, by = np.arange(WARP), (b & 31).astype("i8")
        clamp, segment = (c & 31).astype("i8"), (c >> 8 & 31).astype("i8")
        first, last = lane & segment, lane & segment | clamp & ~segment
        source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by}.get(how)
        source = first | by & ~segment if source is None else source
        inside = source >= last if how == "up" else source <= last
        found = np.take_along_axis(a, np.where(inside, source, lane), axis=1)
        assert found.shape == whole.shape
        write(m, lanes, found.ravel())

    return step


def reduce(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    how = {"add": np.add, "max": np.maximum, "min": np.minimum}[suffixes[1]]
    name = suffixes[2]
    write, read = writes(program, one.operands[0]), reads(program, one.operands[1], name)
    members = reads(program, one.operands[2], "s32")

    def step(m: Machine, lanes: Lanes) -> None:
        whole = warps(m, lanes)
        if name not in ("s32", "u32") or (members(m, lanes) != -1).any():
            raise Fault("kind of reduction")
        values = each(m, lanes, read(m, lanes)).reshape(whole.shape)
        found = how.reduce(values, axis=1, dtype=TYPES[name])
        write(m, lanes, np.repeat(found, WARP))

    return step


def move_parts(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """mov between a register and its parts, the lowest first."""
    to, of = (list_of(operand) for operand in one.operands)
    whole = TYPES[suffixes[0]]
    size = whole.itemsize // max(len(to), len(of))
    write = [writes(program, part) for part in to]
    read = [reads(program, part, f"b{8 * whole.itemsize // len(of)}") for part in of]

    def step(m: Machine, lanes: Lanes) -> None:
        values = np.stack([each(m, lanes, value(m, lanes)) for value in read], axis=1)
        parts = values.view(f"u{size}") if len(of) == 1 else values.view(whole)
        for to_register, part in zip(write, parts.T, strict=True):
            to_register(m, lanes, part.copy())

    return step


MAKERS = {"ld": load, "st": store, "atom": add, "cp": copy, "shfl": shuffle, "redux": reduce}
