"""Triton's interpreter, for all programs of a launch at once: a million small ones in minutes.

A value has one more dimension, its programs, in front of those that a kernel knows of: a scalar is
``[programs, 1]``, a block ``[programs, n]``. Where it is the same for all of them, that may lack.
This is for one layer, blocks of one dimension, and loops and branches that are the same
for all programs.
"""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from hcache_kernels.launch import Launch


def run_at_once(launch: Launch) -> None:
    """Do what ``launch.run()`` does."""
    programs, layers = launch.grid
    assert layers == 1

    def program_id(builder: Any, axis: int) -> TensorHandle:
        numbers = np.arange(1 if axis else programs, dtype=np.int32)
        return TensorHandle(numbers[:, None], tl.int32)

    with (
        patch.multiple(
            interpreter.InterpreterBuilder,
            create_get_program_id=program_id,
            create_masked_load=_load,
            create_masked_store=_store,
            create_splat=_splat,
            create_histogram=_histogram,
            create_gather=_gather,
        ),
        patch.multiple(interpreter, ReduceOps=_Reduce, ScanOps=_Scan),
    ):
        replace(launch, grid=(1, 1)).run()


class _Reduce(interpreter.ReduceOps):  # type: ignore[misc]
    """Of blocks, to scalars."""

    def __init__(self, axis: int | None, combine_fn: Any, keep_dims: bool) -> None:
        assert not axis and not keep_dims
        super().__init__(-1, combine_fn, keep_dims=True)

    def to_tensor(self, ret: np.ndarray, dtype: Any) -> tl.tensor:
        return _tensor(ret, dtype, dtype)


class _Scan(interpreter.ScanOps):  # type: ignore[misc]
    def __init__(self, axis: int, combine_fn: Any, reverse: bool) -> None:
        assert not axis
        super().__init__(-1, combine_fn, reverse)

    def to_tensor(self, ret: np.ndarray, dtype: Any) -> tl.tensor:
        return _tensor(ret, dtype, tl.block_type(dtype, [ret.shape[-1]]))


def _tensor(values: np.ndarray, dtype: Any, kind: Any) -> tl.tensor:
    return tl.tensor(TensorHandle(values.astype(interpreter._get_np_dtype(dtype)), dtype), kind)


def _alike(*values: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(value) for value in np.broadcast_arrays(*values)]


def _load(builder: Any, at: Any, mask: Any, other: Any, *_: Any) -> TensorHandle:
    kind = at.get_element_ty()
    dtype = interpreter._get_np_dtype(kind)
    instead = np.zeros(1, dtype) if other is None else other.data
    loaded = interpreter._interpreter.load(*_alike(at.data, mask.data, instead), dtype)
    return TensorHandle(loaded, kind)


def _store(builder: Any, at: Any, value: Any, mask: Any, *_: Any) -> None:
    interpreter._interpreter.store(*_alike(at.data, value.data, mask.data))


def _splat(builder: Any, kind: Any, value: Any) -> TensorHandle:
    programs = value.data.shape[:-1]
    return TensorHandle(np.broadcast_to(value.data, (*programs, *kind.shape)), value.dtype.scalar)


def _histogram(builder: Any, data: Any, bins: int, mask: Any) -> TensorHandle:
    values, counted = np.atleast_2d(*_alike(data.data, mask.data))
    numbers = values + bins * np.arange(len(values))[:, None]
    found = np.bincount(numbers[counted], minlength=bins * len(values))
    return TensorHandle(found.reshape(len(values), bins).astype(np.int32), tl.int32)


def _gather(builder: Any, source: Any, indices: Any, axis: int) -> TensorHandle:
    shape = np.broadcast_shapes(source.data.shape[:-1], indices.data.shape[:-1])
    values, at = (np.broadcast_to(v.data, (*shape, v.data.shape[-1])) for v in (source, indices))
    return TensorHandle(np.take_along_axis(values, at, axis=-1), source.dtype.scalar)
