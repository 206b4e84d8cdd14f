"""Which bytes a torch operation reads and writes, row by row where it indexes."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.order.memory import Block, Region

aten = torch.ops.aten
Offsets = npt.NDArray[np.int64]

VIEWS = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh.default,
    aten.resolve_conj.default,
    aten.resolve_neg.default,
}
"""Touch no bytes, and do not say so in their schema's aliases."""

FACTS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
"""Give the host a number: it waits for the stream."""

SIZED_BY_DATA = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
}
"""The size of their result hangs on what is in memory: the host waits for the stream."""

INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
"""``self[indices]``: one index for each of the first dimensions."""

ALONG_ONE_DIMENSION = {
    aten.index_select.default,
    aten.index_select.out,
    aten.index_copy_.default,
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
    aten.index_add_.default,
}


@cache
def parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Names of an operation's parameters, and whether it writes to them."""
    return tuple(
        (arg.name, arg.alias_info is not None and arg.alias_info.is_write)
        for arg in func._schema.arguments
    )


def arguments(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[int, torch.Tensor, bool]]:
    """Position, tensor, and whether it is written, for all tensors that an operation gets."""
    for position, (name, written) in enumerate(parameters(func)):
        value = args[position] if position < len(args) else kwargs.get(name)
        for tensor in tensors(value):
            yield position, tensor, written


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def touched(
    func: Any, args: Sequence[Any], position: int, tensor: torch.Tensor, block: Block
) -> Region:
    """The cells of ``block`` that an operation touches through its argument at ``position``."""
    if position == 0 and func in INDEXED:
        return rows(block, tensor, args[1])
    if position == 0 and func in ALONG_ONE_DIMENSION:
        return rows(block, tensor, [None] * (args[1] % max(1, tensor.dim())) + [args[2]])
    if position == 0 and func is aten.embedding.default:
        return rows(block, tensor, [args[1]])
    return whole(block, tensor)


def whole(block: Block, tensor: torch.Tensor) -> Region:
    starts, length = _runs(tensor.shape, tensor.stride(), tensor.element_size())
    return _cells(block, starts + tensor.storage_offset() * tensor.element_size(), length)


def rows(block: Block, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Region:
    """The cells of ``tensor[indices]``; None takes a whole dimension."""
    size, dim = tensor.element_size(), 0
    at, others = np.zeros((), np.int64), []
    for index in indices:
        if index is None:
            others.append(dim)
            dim += 1
            continue
        values = index.detach().numpy()
        each = np.nonzero(values) if values.dtype in (np.bool_, np.uint8) else (values,)
        for found in each:
            wrapped = np.where(found < 0, found + tensor.shape[dim], found).astype(np.int64)
            at = at + wrapped * (tensor.stride(dim) * size)
            dim += 1
    others += range(dim, tensor.dim())
    first = np.unique(at) + tensor.storage_offset() * size
    shape, strides = [tensor.shape[d] for d in others], [tensor.stride(d) for d in others]
    starts, length = _runs(shape, strides, size)
    return _cells(block, (first[:, None] + starts).ravel(), length)


def _runs(shape: Sequence[int], strides: Sequence[int], size: int) -> tuple[Offsets, int]:
    """First bytes of the contiguous runs that make up a strided array, and a run's bytes."""
    if 0 in shape:
        return np.empty(0, np.int64), 0
    steps = sorted((s * size, n) for n, s in zip(shape, strides, strict=True) if n > 1 and s)
    length = size
    while steps and steps[0][0] == length:
        length *= steps.pop(0)[1]
    starts = np.zeros(1, np.int64)
    for stride, count in steps:
        starts = (starts[:, None] + np.arange(count) * stride).ravel()
    return starts, length


def _cells(block: Block, starts: Offsets, length: int) -> Region:
    """The cells that bytes ``[start, start + length)`` of every start lie in."""
    if not len(starts):
        return slice(0, 0)
    cell = block.cell
    first = starts // cell
    if len(starts) == 1:
        return slice(int(first[0]), int(-(-(starts[0] + length) // cell)))
    last = (starts + length - 1) // cell
    span = int((last - first).max()) + 1
    return np.minimum(first[:, None] + np.arange(span), last[:, None]).ravel()
