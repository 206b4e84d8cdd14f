"""What instructions compute in registers: rows of an opcode, the types of its operands, and the
function. In an opcode ``*`` is any type of the row, which ``T`` then stands for, ``W`` for the type
of twice its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from .numbers import TYPES, Array, fused, narrow, narrow_small, result, widen

INTEGERS = [f"{kind}{size}" for kind in "us" for size in (16, 32, 64)]
BITS = ["b16", "b32", "b64"]
HALVES = {"s16x2": "s16", "f16x2": "f16", "bf16x2": "bf16"}
FLOATS = ["f32", "f16", "bf16"]

Function = Callable[..., Array]


def _float(function: Function, name: str) -> Function:
    """In a type that holds the result before it is rounded; float32 rounds by itself."""
    if name == "f32":
        return lambda *x: result(function(*x), name)
    return lambda *x: result(function(*(widen(one, name) for one in x)), name)


def _single(bits: Array) -> Array:
    return widen(bits, "bf16").astype("f4")


def _pairs(function: Function, name: str) -> Function:
    """Of both halves of a register."""

    def compute(*values: Array) -> Array:
        halves = (np.ascontiguousarray(v).view(TYPES[name]).reshape(-1, 2) for v in values)
        whole = f"u{2 * TYPES[name].itemsize}"
        return np.ascontiguousarray(function(*halves)).view(whole).ravel()

    return compute


def _product(a: Array, b: Array, c: Array | None = None, *, part: str) -> Array:
    """Of integers: the whole product, its upper or its lower half."""
    bits = 8 * a.dtype.itemsize
    twice = np.dtype(f"{a.dtype.kind}{bits // 4}") if bits < 64 else np.dtype(object)
    found = a * b if part == "lo" else a.astype(twice) * b.astype(twice)
    found = (found >> bits).astype(a.dtype) if part == "hi" else found
    return found if c is None else found + c


def _quotient(a: Array, b: Array, *, rest: bool) -> Array:
    left = np.fmod(a, b)
    return left if rest else ((a - left) // b).astype(a.dtype)


def _extreme(a: Array, b: Array, *, least: bool) -> Array:
    """Of a number and NaN the number; of zeros -0 is less."""
    found = (np.fmin if least else np.fmax)(a, b)
    if a.dtype != "f4":
        return found
    bits = a.view("u4") | b.view("u4") if least else a.view("u4") & b.view("u4")
    return np.where(a == b, bits, result(found, "f32"))


def _shift(a: Array, by: Array, *, left: bool) -> Array:
    """By all bits or more, nothing but the sign is left."""
    bits = 8 * a.dtype.itemsize
    some = np.minimum(by, bits - 1).astype(a.dtype)
    moved = a << some if left else a >> some
    return moved if a.dtype.kind == "i" else np.where(by < bits, moved, moved * 0)


def _extract(a: Array, start: Array, length: Array) -> Array:
    """bfe: ``length`` bits from ``start`` on, and the sign before them."""
    start, length = ((x & 0xFF).astype("i8") for x in (start, length))
    bits = 8 * a.dtype.itemsize
    above = bits - np.minimum(start + length, bits)
    found = _shift(_shift(a, above, left=True), above + start, left=False)
    return np.where(length > 0, found, found * 0)


def _insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    """bfi: the lowest ``length`` bits of ``a`` in the place of those of ``b`` from ``start`` on."""
    start, length = (np.minimum(x & 0xFF, 32).astype("i8") for x in (start, length))
    mask = ((1 << length) - 1) << start
    return (b & ~mask | a.astype("i8") << start & mask).astype("u4")


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """prmt: a nibble of the selector names each byte; its upper bit wants its sign instead."""
    pool = np.stack(np.broadcast_arrays(a, b), axis=-1).view("u1")
    nibbles = (selector[:, None] >> np.arange(0, 16, 4) & 15).astype("i8")
    pool, nibbles = np.broadcast_arrays(pool[:, :, None], nibbles[:, None, :])
    found = np.take_along_axis(pool[:, :, 0], nibbles[:, 0] & 7, axis=1)
    found = np.where(nibbles[:, 0] > 7, (found >> 7) * np.uint8(0xFF), found)
    return np.ascontiguousarray(found).view("u4").ravel()


def _square_root(a: Array) -> Array:
    """1 / sqrt, of numbers below the normal ones as of zero."""
    tiny = np.abs(a) < np.finfo("f4").tiny
    return result((1 / np.sqrt(np.where(tiny, a * 0, a).astype("f8"))).astype("f4"), "f32")


def _two(upper: Array, lower: Array, name: str) -> Array:
    """Two float32 as the halves of a register."""
    small = name in ("e4m3", "e5m2")
    to, bits = (narrow_small, "u2") if small else (narrow, "u4")
    high, low = (to(x, name).astype(bits) for x in (upper, lower))
    return high << (8 if small else 16) | low


def _differ(a: Array, b: Array) -> Array:
    """As the manual orders floats: NaN differs from nothing."""
    return (a < b) | (a > b)


def _rows() -> Iterator[tuple[str, list[str], str, Function]]:
    number = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    for name, function in number.items():
        low = ".lo" if name == "mul" else ""
        yield f"{name}{low}.*", INTEGERS, "T T", function
        yield f"{name}.rn.f32x2", [], "b64 b64", _pairs(_float(function, "f32"), "f32")
        for kind in FLOATS:
            yield f"{name}.rn.{kind}", [], f"{kind} {kind}", _float(function, kind)
        for both, kind in HALVES.items():
            rounded = function if kind == "s16" else _float(function, kind)
            yield (
                f"{name}{'' if kind == 's16' else '.rn'}.{both}",
                [],
                "b32 b32",
                _pairs(rounded, kind),
            )
    # The first of both is converted before they are added.
    yield "add.rn.f32.bf16", [], "bf16 f32", lambda a, c: result(_single(a) + c, "f32")
    yield "sub.rn.f32.bf16", [], "bf16 f32", lambda a, c: result(_single(a) - c, "f32")
    for kind in FLOATS:
        fma = _float(lambda a, b, c: fused(a.astype("f8"), b.astype("f8"), c.astype("f8")), kind)
        yield f"fma.rn.{kind}", [], f"{kind} {kind} {kind}", fma
        both = "b64" if kind == "f32" else "b32"
        yield f"fma.rn.{kind}x2", [], f"{both} {both} {both}", _pairs(fma, kind)
    for part in ("hi", "wide", "lo"):
        some = INTEGERS if part != "wide" else [name for name in INTEGERS if "64" not in name]
        yield f"mul.{part}.*", some, "T T", partial(_product, part=part)
        third = "W" if part == "wide" else "T"
        yield f"mad.{part}.*", some, f"T T {third}", partial(_product, part=part)
    for name in ("rn", "full"):
        yield f"div.{name}.f32", [], "f32 f32", _float(np.divide, "f32")
    yield "div.*", INTEGERS, "T T", partial(_quotient, rest=False)
    yield "rem.*", INTEGERS, "T T", partial(_quotient, rest=True)
    yield "min.*", [*INTEGERS, "f32"], "T T", partial(_extreme, least=True)
    yield "max.*", [*INTEGERS, "f32"], "T T", partial(_extreme, least=False)
    yield "max.relu.s32", [], "s32 s32", lambda a, b: np.maximum(np.maximum(a, b), 0)
    yield "rsqrt.approx.ftz.f32", [], "f32", _square_root
    yield "abs.*", ["s16", "s32", "s64"], "T", np.abs
    yield "neg.*", ["s16", "s32", "s64"], "T", np.negative
    for kind, bits in (("f32", "b32"), ("f16", "b16"), ("bf16", "b16")):
        sign = TYPES[bits].type(1 << int(bits[1:]) - 1)
        yield f"abs.{kind}", [], bits, partial(lambda a, sign: a & ~sign, sign=sign)
        yield f"neg.{kind}", [], bits, partial(lambda a, sign: a ^ sign, sign=sign)
    for name, function in {
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }.items():
        yield f"{name}.*", ["pred", *BITS], "T T", function
    yield "not.*", ["pred", *BITS], "T", np.invert
    yield "shl.*", BITS, "T u32", partial(_shift, left=True)
    yield "shr.*", [*BITS, *INTEGERS], "T u32", partial(_shift, left=False)
    yield "bfe.*", ["u32", "s32", "u64", "s64"], "T u32 u32", _extract
    yield "bfi.b32", [], "b32 b32 u32 u32", _insert
    yield "prmt.b32", [], "b32 b32 b32", _permute
    yield "mov.*", ["pred", *BITS, *INTEGERS], "T", lambda a: a
    yield "selp.*", [*BITS, "f32"], "T T pred", lambda a, b, p: np.where(p, a, b)
    order = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
    for name, function in {**order, "eq": np.equal, "ne": _differ}.items():
        yield f"setp.{name}.*", [*BITS, *INTEGERS, "f32"], "T T", function
    yield from _conversions()


def _conversions() -> Iterator[tuple[str, list[str], str, Function]]:
    integers = [f"{kind}{size}" for kind in "us" for size in (8, 16, 32, 64)]
    for name in integers:
        yield f"cvt.{name}.*", integers, "T", partial(lambda a, to: a.astype(to), to=TYPES[name])
    yield "cvt.rn.f32.*", ["s16", "u16", "s32", "u32"], "T", lambda a: a.astype("f4")
    for kind in ("f16", "bf16"):
        yield f"cvt.f32.{kind}", [], kind, lambda a, of=kind: result(widen(a, of), "f32")
        yield f"cvt.rn.{kind}.f32", [], "f32", partial(narrow, name=kind)
        yield f"cvt.rz.{kind}.f32", [], "f32", partial(narrow, name=kind, to_zero=True)
        yield f"cvt.rn.{kind}x2.f32", [], "f32 f32", partial(_two, name=kind)
    for kind in ("e4m3", "e5m2"):
        yield f"cvt.rn.satfinite.{kind}x2.f32", [], "f32 f32", partial(_two, name=kind)


def _table() -> dict[str, tuple[list[str], Function]]:
    found = {}
    for opcode, names, types, function in _rows():
        for name in names or [""]:
            twice = f"{name[:1]}{2 * int(name[1:])}" if name[1:].isdigit() else ""
            operands = [{"T": name, "W": twice}.get(one, one) for one in types.split()]
            found.setdefault(opcode.replace("*", name), (operands, function))
    return found


TABLE = _table()
"""By opcode: types of what it reads, and the function."""
