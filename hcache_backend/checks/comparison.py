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
    """True if rows that the codec holds (``fits``, bool ``[n]``; None: all) are the wanted ones."""
    return torch.equal(got, wanted) if fits is None else torch.equal(got[fits], wanted[fits])


def difference_problem(what: str, differences: Sequence[float], allowed: float) -> str | None:
    """A message if one of ``differences`` (of K and of V, relative to the root mean square) is more
    than ``allowed``; or None. The message begins with ``what``, in which ``{}`` becomes K or V."""
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
    """:func:`kv_differences` of K and V projected from ``hidden`` (``[n, hidden]``) against those
    that the model wrote to ``slots`` of the KV pool; a message if the layer cannot be projected."""
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
    """A message if the ``differences`` of K and V (:func:`compare_projection`) are more than
    rounding to ``pool_dtype``, that of the KV pool, and the codec of hidden states explain."""
    what = f"projected {{}} of {layer.name} differs from the model's"
    return difference_problem(what, differences, tolerance(pool_dtype, codec))


def first_problem(problems: Iterable[str | None]) -> str | None:
    """The first problem that is not None, if any. All of ``problems`` are made before: attention
    modules, which some call, talk to other ranks, whose first problem may be another."""
    return next(filter(None, list(problems)), None)
