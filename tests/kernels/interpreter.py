"""Triton's interpreter with bf16 and fp8 arithmetic mended.

As shipped (seen in 3.6 to 3.9) it multiplies the raw bits of bf16, truncates float32 to bf16
instead of rounding, and rounds to fp8 wrongly. Arithmetic on bf16 tensors other than ``tl.dot``
stays wrong: kernels convert to float32 first, as they must for accuracy anyway.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from bench.gpu.program import mend_scalars

_TORCH_TYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ROUND_TO_ZERO = interpreter._ir.ROUNDING_MODE.RTZ


def mend() -> None:
    """Make casts and products of this process's interpreter equal to torch's."""
    mend_scalars()
    interpreter._convert_float = _convert_float
    shipped = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return shipped(self, _widened(a), _widened(b), *args)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter.ScanOps.generic_scan = _scan
    interpreter._patch_lang(tl.interleave.fn)  # what Triton's own functions call
    interpreter.InterpretedFunction.__call__ = _call


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> Any:
    """Bits of ``data`` as ``target``: rounded to nearest, ties to even, overflow as in torch."""
    assert rounding != _ROUND_TO_ZERO, "torch casts only round to nearest"
    bits = torch.from_numpy(np.ascontiguousarray(data).view(_BITS[data.itemsize]).copy())
    converted = bits.view(_TORCH_TYPES[source]).to(_TORCH_TYPES[target])
    out = _BITS[converted.element_size()]
    return converted.view(getattr(torch, np.dtype(out).name)).numpy().reshape(data.shape)


def _scan(self: Any, values: list[Any]) -> list[Any]:
    """A scan of one block in logarithmic time; as shipped it calls Python for each element."""
    [value] = values
    found, step = value.handle.data, 1
    assert found.ndim == 1
    while step < len(found):
        before = np.concatenate([found[:step], found[:-step]])
        parts = (self.to_tensor(part, value.dtype) for part in (before, found))
        after = self.combine_fn.fn(*parts).handle.data
        found, step = np.concatenate([found[:step], after[step:]]), 2 * step
    return [self.to_tensor(found, value.dtype)]


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    """Of a function of a kernel. As shipped each call patches triton.language again."""
    return self.rewrite()(*arguments, **named)


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = _convert_float(operand.data, tl.bfloat16, tl.float32, None)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
