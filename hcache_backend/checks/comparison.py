"""The comparison of all checks, at the start and in service: are K and V the right ones?

They are, in one of three ways (the numbers are in :mod:`hcache_backend.projection.exactness`):

- to the bit: copies, rows of hidden states, codecs without loss (:func:`rows_equal`);
- within rounding, and the loss of a codec: projected K and V, lossy codecs
  (:func:`difference_problem`);
- as exact as the model's own at other batch sizes: recomputed layers, specs
  (:meth:`.KVExactness.as_good_as`).

A problem is a message, or None."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hcache_backend.projection.attention import KV, AttentionLayer, ProjectionFailed
from hcache_backend.projection.exactness import difference_on_device, tolerance
from hcache_backend.projection.projector import Projector


def rows_equal(got: torch.Tensor, wanted: torch.Tensor, fits: torch.Tensor | None = None) -> bool:
    """True if the rows are equal that the codec holds (``fits``, bool ``[n]``; None: all)."""
    return torch.equal(got, wanted) if fits is None else torch.equal(got[fits], wanted[fits])


def difference_problem(what: str, differences: Sequence[float], allowed: float) -> str | None:
    """The problem if K or V differ by more than ``allowed``, relative to their root mean square.
    ``what`` says of ``{}``, which becomes K or V, that it differs."""
    for name, value in zip("KV", differences, strict=True):
        if not value <= allowed:  # not a number, too
            return f"{what.format(name)} by {value:.2e} (allowed {allowed:.1g})"
    return None


def kv_differences(got: KV, wanted: KV) -> torch.Tensor:
    """Relative differences of K and V: float64 ``[2]`` on the device, without waiting."""
    return torch.stack([difference_on_device(*pair) for pair in zip(got, wanted, strict=True)])


def compare_projection(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projector: Projector,
) -> torch.Tensor | str:
    """:func:`kv_differences` of projected K and V against those that the model wrote to ``slots``,
    or the reason why there are none. ``hidden`` (``[n, hidden]``) may have been through a codec."""
    try:
        kv = projector.project(layer, hidden, positions)
    except ProjectionFailed as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError):  # that says nothing of the layer
        raise
    except Exception as error:  # a model's own code, called in a way it was not made for
        return f"{layer.name} cannot be called alone: {type(error).__name__}: {error}"
    return kv_differences(kv, projector.pool.fetch(layer.kernel, slots, hidden.dtype))


def projection_problem(
    layer: AttentionLayer,
    differences: Sequence[float],
    pool_dtype: torch.dtype,
    codec: str = "none",
) -> str | None:
    """The problem if rounding (``pool_dtype``: of the KV pool) and the codec of hidden states do
    not explain the differences of :func:`compare_projection`."""
    what = f"projected {{}} of {layer.name} differs from the model's"
    return difference_problem(what, differences, tolerance(pool_dtype, codec))


def first_problem(problems: Iterable[str | None]) -> str | None:
    """The first problem, if any, after all were looked for: some attention modules talk to the
    other ranks, which may find another layer at fault."""
    return next(filter(None, list(problems)), None)
