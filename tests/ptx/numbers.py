"""Numbers as PTX has them: how the bits of each type are read, and one rounding to each type."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

_NAMES = {"b": "u", "u": "u", "s": "i", "f": "f"}
TYPES: dict[str, np.dtype[Any]] = {
    **{f"{kind}{8 * n}": np.dtype(f"{_NAMES[kind]}{n}") for kind in "bus" for n in (1, 2, 4, 8)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    **{"bf16": np.dtype("u2"), "pred": np.dtype(bool)},
}
"""NumPy's types; of bf16 the bits."""
UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
NAN: dict[str, Any] = {
    "f32": np.uint32(0x7FFFFFFF),
    "f16": np.uint16(0x7FFF),
    "bf16": np.uint16(0x7FFF),
}
"""Operations have this one, whatever their operands'."""


class Small(NamedTuple):
    """A type of 8 bits."""

    mantissa: int  # bits
    lowest: int  # exponent of normal numbers
    largest: float


SMALL = {"e4m3": Small(3, -6, 448.0), "e5m2": Small(2, -14, 57344.0)}


def widen(bits: Array, name: str) -> Array:
    """Numbers of a type in one that holds the product of two."""
    if name == "bf16":
        return (bits.astype("u4") << 16).view("f4").astype("f8")
    return bits.astype("f8") if bits.dtype != "f8" else bits


def narrow(x: Array, name: str, *, to_zero: bool = False) -> Array:
    """Bits of float32 or float64, rounded once to nearest, ties to even, or to zero."""
    if name == "bf16":
        bits = (_to_odd(x) if x.dtype == "f8" else np.ascontiguousarray(x)).view("u4")
        if not to_zero:
            bits = bits + (0x7FFF + (bits >> 16 & 1)).astype("u4")
        found = (bits >> 16).astype("u2")
    else:
        found = np.asarray(x.astype(TYPES[name])).view(UNSIGNED[TYPES[name].itemsize])
        if to_zero:
            farther = np.abs(found.view(TYPES[name]).astype("f8")) > np.abs(x)
            found = found - farther.astype(found.dtype)
    return np.where(np.isnan(x), NAN[name], found)


def narrow_small(x: Array, name: str) -> Array:
    """Codes of 8 bits of float32, rounded to nearest, ties to even; what is too large is the
    largest number."""
    kind, size = SMALL[name], np.abs(x).astype("f8")
    step = np.exp2(np.maximum(_exponent(size), kind.lowest) - kind.mantissa)
    size = np.minimum(np.rint(size / step) * step, kind.largest)
    above = np.maximum(_exponent(size) - kind.lowest, 0)  # exponents above the lowest
    # From a power of two on the code has a bit more than the mantissa: that raises the exponent.
    code = size / np.exp2(above + kind.lowest - kind.mantissa) + above * 2**kind.mantissa
    code = np.where(np.isnan(x), 0x7F, np.nan_to_num(code)).astype("u1")
    return code | np.where(np.signbit(x) & ~np.isnan(x), 0x80, 0).astype("u1")


def _exponent(size: Array) -> Array:
    finite = np.where(np.isfinite(size) & (size > 0), size, 2.0**-1000)
    return np.frexp(finite)[1].astype("f8") - 1


def _to_odd(x: Array) -> Array:
    """Float64 as float32 to zero, the last bit one if that was not exact: rounding what comes out
    to fewer bits is one rounding."""
    y = np.ascontiguousarray(x.astype("f4"))
    inexact = y.astype("f8") != x
    bits = y.view("u4") - (np.abs(y.astype("f8")) > np.abs(x)).astype("u4")
    return (bits | (inexact & ~np.isnan(x)).astype("u4")).view("f4")


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in float64 of which one more rounding is the only one; a * b must be exact."""
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)  # Knuth's sum of two
    bits = np.ascontiguousarray(total).view("i8")
    # Toward zero if the sum was rounded away from it, then odd.
    away = (error != 0) & (np.signbit(error) != np.signbit(total))
    odd = ((bits - away) | (error != 0)).view("f8")
    return np.where(np.isfinite(total) & (error != 0), odd, total)


def result(x: Array, name: str) -> Array:
    """Bits of what an operation of a type gives, from numbers of that or of a wider type."""
    if name == "f32":
        return np.where(np.isnan(x), NAN["f32"], x.astype("f4", copy=False).view("u4"))
    return narrow(x, name) if name in NAN else x
