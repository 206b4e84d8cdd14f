"""Each instruction gives what the manual says, at the edges too."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.ptx import one_block, opcodes
from tests.ptx.numbers import TYPES, UNSIGNED, fused, narrow, narrow_small, widen
from tests.ptx.program import Fault

ONES, SIGN, NAN, INF = 0xFFFFFFFF, 1 << 31, 0x7FFFFFFF, 0x7F800000
_PREFIXES = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd"}


def computed(opcode: str, sizes: list[int], *values: int) -> int:
    """What an instruction gives; ``sizes`` in bits are those of the result and of ``values``."""
    names = [f"{_PREFIXES[size]}{i}" for i, size in enumerate(sizes)]
    held: dict[str, Any] = {}
    for name, size, value in zip(names[1:], sizes[1:], values, strict=True):
        held[name] = np.array([value], dtype=bool if size == 1 else UNSIGNED[size // 8])
    machine = one_block.run(f"{opcode} {', '.join(names)};", held)
    [found] = np.unique(machine.registers[names[0]])
    return int(found)


B16, B32, B64 = [16] * 9, [32] * 9, [64] * 9
ONE_TWO, TWO_FOUR = 0x40000000_3F800000, 0x40800000_40000000  # pairs of float32
CASES = [
    ("add.rn.f32x2", B64[:3], (ONE_TWO, ONE_TWO), TWO_FOUR),
    ("add.rn.f32.bf16", [32, 16, 32], (0x3F80, 0x3F800001), 0x40000000),
    ("sub.rn.f32.bf16", [32, 16, 32], (0x3F80, 0x40000000), 0xBF800000),
    ("fma.rn.bf16x2", B32[:4], (0x3F813F80, 0x3F814000, 0x80008000), 0x3F824000),
    ("fma.rn.f16x2", B32[:4], (0x3C004000, 0x40004000, 0x3C003C00), 0x42004500),
    ("add.rn.bf16x2", B32[:3], (0x3F804000, 0x3F804000), 0x40004080),
    ("sub.rn.bf16x2", B32[:3], (0x40004080, 0x3F804000), 0x3F804000),
    ("mul.rn.bf16x2", B32[:3], (0x3F813F80, 0x3F814000), 0x3F824000),
    ("sub.rn.f32x2", B64[:3], (TWO_FOUR, ONE_TWO), ONE_TWO),
    ("mul.rn.f32x2", B64[:3], (ONE_TWO, 0x40000000_40000000), TWO_FOUR),
    ("fma.rn.f32x2", B64[:4], (ONE_TWO, 0x3F800000_3F800000, ONE_TWO), TWO_FOUR),
    ("add.s16x2", B32[:3], (0x0001FFFF, 0x00010001), 0x00020000),
    ("max.relu.s32", B32[:3], (ONES, ONES - 4), 0),
    ("and.pred", [1, 1, 1], (1, 0), 0),
    ("or.pred", [1, 1, 1], (1, 0), 1),
    ("not.pred", [1, 1], (1,), 0),
    ("bfe.u32", B32[:4], (0xABCD1234, 8, 8), 0x12),
    ("bfe.u32", B32[:4], (ONES, 4, 32), 0x0FFFFFFF),
    ("bfe.u32", B32[:4], (ONES, 4, 0), 0),
    ("bfe.s32", B32[:4], (0x0000F000, 12, 4), ONES),
    ("bfe.s32", B32[:4], (0x80000000, 28, 8), ONES - 7),
    ("bfe.s32", B32[:4], (0x80000000, 40, 8), ONES),
    ("bfe.u32", B32[:4], (ONES, 40, 8), 0),
    ("bfe.s64", [64, 64, 32, 32], (0x8001_0000_FFFF, 32, 16), 2**64 - 0x7FFF),
    ("bfe.u64", [64, 64, 32, 32], (0x8001_0000_FFFF, 16, 32), 0x80010000),
    ("bfi.b32", B32[:5], (0xAB, ONES, 8, 8), 0xFFFFABFF),
    ("bfi.b32", B32[:5], (0xAB, 5, 8, 0), 5),
    ("prmt.b32", B32[:4], (0x33221100, 0x77665544, 0x7410), 0x77441100),
    ("prmt.b32", B32[:4], (0x00008000, 0, 0x9991), 0xFFFFFF80),
    ("mov.pred", [1, 1], (1,), 1),
    ("selp.b16", [16, 16, 16, 1], (3, 5, 0), 5),
    ("selp.f32", [32, 32, 32, 1], (NAN, 5, 1), NAN),
    ("setp.gt.f32", [1, 32, 32], (NAN, 0), 0),
    ("setp.lt.f32", [1, 32, 32], (SIGN, 0), 0),  # -0 is not below 0
    ("cvt.s8.s32", [16, 32], (0x80,), 0xFF80),
    ("cvt.s32.s8", [32, 16], (0x80,), 0xFFFFFF80),
    ("cvt.s32.s16", [32, 16], (0x8000,), 0xFFFF8000),
    ("cvt.rn.f32.s16", [32, 16], (0xFFFF,), 0xBF800000),
    ("add.rn.f32", B32[:3], (INF, INF | SIGN), NAN),
    ("add.rn.f32", B32[:3], (1, 1), 2),  # below the normal numbers
    ("sub.rn.f32", B32[:3], (0x3F800000, 0x3F800000), 0),
    ("mul.rn.f32", B32[:3], (0x7F7FFFFF, 0x40000000), INF),
    ("mul.rn.f32", B32[:3], (SIGN, 0x3F800000), SIGN),
    ("fma.rn.f32", B32[:4], (0x3F800001, 0x3F800001, 0xBF800002), 0x28800000),
    ("fma.rn.bf16", B16[:4], (0x3F81, 0x3F81, 0xBF82), 0x3880),
    ("fma.rn.bf16", B16[:4], (0x3F81, 0x3F81, 0x8000), 0x3F82),  # minus zero: a product alone
    ("mul.rn.bf16", B16[:3], (0x3F81, 0x3F81), 0x3F82),
    ("add.rn.bf16", B16[:3], (0x3F80, 0x3B80), 0x3F80),  # a tie, to even
    ("sub.rn.bf16", B16[:3], (0x7F80, 0x7F80), 0x7FFF),
    ("mul.rn.f16", B16[:3], (0x7BFF, 0x4000), 0x7C00),
    ("add.rn.f16", B16[:3], (0x3C00, 0x1000), 0x3C00),
    ("sub.rn.f16", B16[:3], (0x3C00, 0x3BFF), 0x1000),
    ("mul.rn.f16x2", B32[:3], (0x3C004000, 0x40004000), 0x40004400),
    ("div.rn.f32", B32[:3], (0x3F800000, 0x40400000), 0x3EAAAAAB),
    ("div.full.f32", B32[:3], (0x3F800000, 0), INF),
    ("min.f32", B32[:3], (NAN, 0x3F800000), 0x3F800000),
    ("min.f32", B32[:3], (0, SIGN), SIGN),
    ("max.f32", B32[:3], (SIGN, 0), 0),
    ("max.f32", B32[:3], (NAN, 0xFFC00000), NAN),
    ("rsqrt.approx.ftz.f32", B32[:2], (0x40800000,), 0x3F000000),
    ("rsqrt.approx.ftz.f32", B32[:2], (1,), INF),
    ("abs.f32", B32[:2], (0xBF800000,), 0x3F800000),
    ("abs.bf16", B16[:2], (0xBF80,), 0x3F80),
    ("cvt.f32.bf16", [32, 16], (0x3F80,), 0x3F800000),
    ("cvt.f32.f16", [32, 16], (1,), 0x33800000),
    ("cvt.rn.bf16.f32", [16, 32], (0x3F808000,), 0x3F80),
    ("cvt.rn.bf16.f32", [16, 32], (0x7F7FFFFF,), 0x7F80),
    ("cvt.rn.bf16.f32", [16, 32], (0xFFC00000,), 0x7FFF),
    ("cvt.rz.f16.f32", [16, 32], (0x477FFFFF,), 0x7BFF),
    ("cvt.rn.f16.f32", [16, 32], (0x477FFFFF,), 0x7C00),
    ("cvt.rn.bf16x2.f32", B32[:3], (0x3F800000, 0x40000000), 0x3F804000),
    ("cvt.rn.f16x2.f32", B32[:3], (0x3F800000, 0x40000000), 0x3C004000),
    ("cvt.rn.satfinite.e4m3x2.f32", [16, 32, 32], (0x7F800000, 0xFFC00000), 0x7E7F),
    ("cvt.rn.satfinite.e5m2x2.f32", [16, 32, 32], (0xFF800000, 0x3F800000), 0xFB3C),
]


@pytest.mark.parametrize(("opcode", "sizes", "values", "want"), CASES)
def test_an_instruction(opcode: str, sizes: list[int], values: tuple[int, ...], want: int) -> None:
    assert hex(computed(opcode, sizes, *values)) == hex(want)


INTEGER = re.compile(r"([a-z.]+?)((?:\.[bus]\d+)+)$")
WHOLE: dict[str, Callable[..., int]] = {
    **{"add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "mul.wide": operator.mul},
    **{"mad.lo": lambda a, b, c: a * b + c, "mad.wide": lambda a, b, c: a * b + c},
    **{"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.invert},
    **{"min": min, "max": max, "abs": abs, "neg": operator.neg},
    **{"setp.eq": operator.eq, "setp.ne": operator.ne, "setp.lt": operator.lt},
    **{"setp.le": operator.le, "setp.gt": operator.gt, "setp.ge": operator.ge},
    **{"mov": lambda a: a, "cvt": lambda a: a, "selp": lambda a, b, p: a if p else b},
    **{"shl": lambda a, by: a << min(by, 64), "shr": operator.rshift},
    **{"div": lambda a, b: b and (abs(a) // abs(b)) * (1 if a * b > 0 else -1)},
    **{"rem": lambda a, b: b and (abs(a) % abs(b)) * (1 if a >= 0 else -1)},
}
"""The same of Python's whole numbers."""


def of_whole_numbers(opcode: str) -> bool:
    match = INTEGER.match(opcode)
    return match is not None and (match[1] in WHOLE or match[1] == "mul.hi")


@pytest.mark.parametrize("opcode", filter(of_whole_numbers, opcodes.TABLE))
def test_whole_numbers_of_every_size_at_their_edges(opcode: str) -> None:
    types, function = opcodes.TABLE[opcode]
    base, suffixes = INTEGER.match(opcode).groups()
    edges = []
    for name in types:
        top = 1 << int(name[1:]) - 1 if name != "pred" else 1
        low, high = (-top, top) if name[0] == "s" else (0, 2 * top)
        some = {low, low + 1, 0, 1, 2, 7, 31, top // 3, top - 1, high - 1}
        edges.append(sorted(one for one in some if low <= one < high))
    rows = list(product(*edges))
    if base in ("div", "rem"):
        rows = [row for row in rows if row[1] and row[1] != -1]
    columns = zip(zip(*rows, strict=True), types, strict=True)
    found = function(*(np.array(column, dtype=TYPES[name]) for column, name in columns))
    size = 8 * TYPES[suffixes.split(".")[1]].itemsize * (2 if "wide" in base else 1)
    for row, value in zip(rows, found.tolist(), strict=True):
        want = row[0] * row[1] >> size if base == "mul.hi" else WHOLE[base](*row)
        assert int(value) % 2**size == int(want) % 2**size, row


def tested() -> set[str]:
    """Opcodes that have a case here."""
    return {case[0] for case in CASES} | set(filter(of_whole_numbers, opcodes.TABLE))


def test_small_floats_are_rounded_as_torch_rounds_them() -> None:
    codes = np.arange(0x10000, dtype="u4") << 16
    values = np.concatenate([codes, codes + 0x8000, codes + 0x8001, codes + 0x7FFF]).view("f4")
    values = values[~np.isnan(values)]
    there = torch.from_numpy(values)
    for name, dtype, bits in (("f16", torch.float16, 16), ("bf16", torch.bfloat16, 16)):
        want = there.to(dtype).view(getattr(torch, f"int{bits}")).numpy().view("u2")
        assert (narrow(values, name) == want).all()
        assert (narrow(values.astype("f8"), name) == want).all()
    for name, small in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        largest = torch.finfo(small).max
        want = there.clamp(-largest, largest).to(small).view(torch.uint8).numpy()
        assert (narrow_small(values, name) == want).all()


def test_fused_sums_are_rounded_once() -> None:
    """Beside sums of whole numbers, which Python has exactly."""
    chance = np.random.default_rng(0)
    a, b, c = (chance.integers(-(2**24), 2**24, 20_000).astype("f8") for _ in range(3))
    scale = 2.0 ** chance.integers(-40, 40, 20_000)
    found = fused(a, b, c * scale).astype("f4")
    for i, value in enumerate(found):
        exact = int(a[i]) * int(b[i]) * 2**40 + int(c[i]) * int(scale[i] * 2**40)
        near = [int(float(np.nextafter(value, to)) * 2**40) for to in (-np.inf, value, np.inf)]
        assert abs(near[1] - exact) <= min(abs(near[0] - exact), abs(near[2] - exact))
    halves = widen(np.array([0x3F81], dtype="u2"), "bf16")
    assert narrow(fused(halves, halves, np.array([2.0**-40])), "bf16") == 0x3F82


@pytest.mark.parametrize(
    "text",
    [
        *("tanh.approx.f32 %r1, %r2;", "add.f32 %r1, %r2, %r3;", "ld.local.b32 %r1, [%r2];"),
        *("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1}, {%r2}, {%r3}, {%r4};",),
        *("bar.sync 1;", "cvt.rzi.s32.f32 %r1, %r2;", "vote.sync.any.pred %p1, %p2, -1;"),
    ],
)
def test_an_instruction_that_is_not_known_is_named(text: str) -> None:
    with pytest.raises(Fault, match=f"not known.*{text.split(maxsplit=1)[0]}"):
        one_block.run(text)
