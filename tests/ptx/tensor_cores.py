"""The steps of products of tiles, and of loads and stores of their fragments.

In the manual's pictures lane ``l`` of a warp has row ``l // 4`` and columns ``2 * (l % 4)`` and the
next of every 8 x 8 part. Products are summed in float64 and rounded once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .numbers import TYPES, Array, widen
from .operands import WARP, Lanes, Read, Step, address, each, list_of, reads, warps, writes
from .program import Fault, Instruction, Program

if TYPE_CHECKING:
    from .machine import Machine

_ROW = np.arange(WARP) // 4
_COLUMN = 2 * (np.arange(WARP) % 4)
_HALVES = ("bf16", "f16")


def matrix(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """ldmatrix and stmatrix: lane 8 i + j of a warp has the address of row j of part i."""
    stores = one.opcode.startswith("st")
    where, registers = one.operands if stores else one.operands[::-1]
    count, transposed = len(list_of(registers)), "trans" in suffixes
    expected = ["sync", "aligned", "m8n8", f"x{count}", *["trans"] * transposed, "shared", "b16"]
    if suffixes != expected:
        raise Fault("kind of matrix")
    find = address(program, where)
    values = [reads(program, register, "b32") for register in list_of(registers)]
    write = [writes(program, register) for register in list_of(registers)]

    def step(m: Machine, lanes: Lanes) -> None:
        whole = warps(m, lanes)[:, : 8 * count]
        at = find(m, lanes).reshape(-1, WARP)[:, : 8 * count].ravel()
        words = np.empty((len(whole), count, 8, 8), dtype="u2")
        side = words.swapaxes(2, 3) if transposed else words
        if stores:
            for i, value in enumerate(values):
                pair = np.ascontiguousarray(each(m, lanes, value(m, lanes))).view("u2")
                side[:, i, _ROW, _COLUMN] = pair[0::2].reshape(-1, WARP)
                side[:, i, _ROW, _COLUMN + 1] = pair[1::2].reshape(-1, WARP)
            m.write("shared", whole.ravel(), at, list(words.reshape(-1, 8).T))
            return
        found = m.read("shared", whole.ravel(), at, 2, 8)
        words[:] = np.stack(found, axis=-1).reshape(words.shape)
        for i, to_register in enumerate(write):
            low, high = (side[:, i, _ROW, _COLUMN + j].astype("u4") for j in range(2))
            to_register(m, lanes, (low | high << 16).ravel())

    return step


def _fragment(m: Machine, lanes: Lanes, read: Sequence[Read], name: str, down: int) -> Array:
    """A matrix of each warp. Every register has two values of an 8 x 8 part; ``down`` parts are a
    column of the matrix, and come first."""
    found = np.empty((len(m.every[lanes]) // WARP, 8 * down, 8 * len(read) // down))
    for i, register in enumerate(read):
        pair = np.ascontiguousarray(each(m, lanes, register(m, lanes))).view(TYPES[name])
        row, column = _ROW + 8 * (i % down), _COLUMN + 8 * (i // down)
        for j in range(2):
            found[:, row, column + j] = widen(pair[j::2], name).reshape(-1, WARP)
    return found


def product(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """mma.m16n8k16: d = a b + c; b comes column by column."""
    name = suffixes[6]
    known = ["sync", "aligned", "m16n8k16", "row", "col", "f32", name, name, "f32"]
    if suffixes != known or name not in _HALVES:
        raise Fault("kind of product")
    d, a, b, c = (list_of(operand) for operand in one.operands)
    write = [writes(program, register) for register in d]
    read_a, read_b = ([reads(program, register, "b32") for register in part] for part in (a, b))
    read_c = [reads(program, register, "f32") for register in c]

    def step(m: Machine, lanes: Lanes) -> None:
        warps(m, lanes)
        right = _fragment(m, lanes, read_b, name, 1)
        found = _fragment(m, lanes, read_a, name, 2) @ right.swapaxes(1, 2)
        for i, (to_register, added) in enumerate(zip(write, read_c, strict=True)):
            at = found[:, _ROW + 8 * (i // 2), _COLUMN + i % 2].ravel()
            to_register(m, lanes, (at + added(m, lanes)).astype("f4"))

    return step


# ---- products of warpgroups (sm_90) ----


def _described(m: Machine, lanes: Array, described: Array, rows: Array) -> Array:
    """Rows of 16 values of a matrix in shared memory, ``[warps, rows, 16]`` bits; the values of a
    row follow each other (K-major). Descriptors are those of the first lanes of warps."""
    start, leading, stride = (
        16 * (described >> np.uint64(by) & np.uint64(0x3FFF)).astype("i8")[:, None, None]
        for by in (0, 16, 32)
    )
    [mode] = np.unique(described >> np.uint64(49))  # with the base's offset, which is none
    pitch, mixed = {0: (16, 0), 1: (128, 0x70), 2: (64, 0x30), 3: (32, 0x10)}[int(mode) / 8192]
    at = start + (rows // 8)[:, None] * stride + (rows % 8)[:, None] * pitch
    at = at + np.arange(2) * (16 if mixed else leading)  # two times 8 values
    # A swizzle mixes the row into the number of the 16 bytes, by bits of the address.
    at = at ^ (at >> 3 & mixed)
    words = m.read("shared", np.repeat(lanes, at[0].size), at.ravel(), 2, 8)
    return np.stack(words, axis=-1).reshape(len(lanes), len(rows), 16)


def warpgroup(program: Program, one: Instruction, suffixes: list[str]) -> Step:
    """wgmma: the product is made when it is waited for; its registers have the old sums before."""
    if suffixes == ["commit_group", "sync", "aligned"]:
        return lambda m, lanes: m.products.commit(lanes)
    if suffixes == ["wait_group", "sync", "aligned"]:
        return lambda m, lanes: m.products.wait(m.every[lanes], int(one.operands[0]))
    registers, name = list_of(one.operands[0]), suffixes[5]
    columns = 2 * len(registers)
    known = ["mma_async", "sync", "aligned", f"m64n{columns}k16", "f32", name, name]
    plain = one.operands[4:] == ("1", "1", "0", "0") and re.match("%rd", one.operands[1])
    if suffixes != known or name not in _HALVES or not plain:
        raise Fault("kind of product")
    write = [writes(program, register) for register in registers]
    read = [reads(program, register, "f32") for register in registers]
    describe = [reads(program, operand, "b64") for operand in one.operands[1:3]]
    adds = reads(program, one.operands[3], "pred")

    def step(m: Machine, lanes: Lanes) -> None:
        whole = warps(m, lanes)
        first = whole[:, 0]  # copies: registers may change before the product is made
        left, right = (np.array(one(m, first)) for one in describe)
        keep = np.array(each(m, first, adds(m, first)))

        def land(mask: Array) -> None:
            some = mask.reshape(whole.shape)[:, 0]
            for quarter in range(4):  # of the 64 rows; a warp has one
                mine = some & (m.warp_of[first] % 4 == quarter)
                if mine.any():
                    rows = 16 * quarter + np.arange(16)
                    a = _described(m, first[mine], left[mine], rows)
                    b = _described(m, first[mine], right[mine], np.arange(columns))
                    a, b = (widen(part.view(TYPES[name]), name) for part in (a, b))
                    _put(m, whole[mine], a @ b.swapaxes(1, 2), np.repeat(keep[mine], WARP))

        m.products.begin(whole.ravel(), land)

    def _put(m: Machine, these: Array, found: Array, add: Array) -> None:
        lanes = these.ravel()
        for i, to_register in enumerate(write):
            row, column = _ROW + 8 * (i // 2 % 2), _COLUMN + 8 * (i // 4) + i % 2
            old = np.where(add, read[i](m, lanes), 0) if add.any() else 0
            to_register(m, lanes, (found[:, row, column].ravel() + old).astype("f4"))

    return step


MAKERS = {"ldmatrix": matrix, "stmatrix": matrix, "mma": product, "wgmma": warpgroup}
