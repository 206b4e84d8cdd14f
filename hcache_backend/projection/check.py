"""Are projected K and V those that the model wrote?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.exactness import difference_on_device
from hcache_backend.projection.generic import ProjectionFailed
from hcache_backend.projection.projector import Projector

TOLERANCE = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 8e-2,
    torch.float8_e5m2: 1.6e-1,
}
"""Largest relative difference (root mean square over one head) that rounding can explain.

Rounding moves both sides by about half a unit in the last place each; the values leave it a factor
of five or more. A wrong projection (another RoPE, a missing norm) is off by a tenth or more.
"""

CODEC_TOLERANCE = {"none": 0.0, "exp4": 0.0, "int8": 2e-2, "fp8": 6e-2}
"""What a codec adds: twice the largest difference seen in K or V from encoded hidden states of
random models of nine architectures (int8 0.8%, fp8 2.8%; ``bench/codecs.py`` measures one). The
same for encoded K and V: normally distributed ones change by 0.7% and 2.7%. Models whose rows, or
K and V, have large outliers lose more with int8, and are refused it."""


def tolerance(dtype: torch.dtype, codec: str = "none") -> float:
    """The bound for K and V that are kept as ``dtype``, from hidden states kept by ``codec``.

    Raises:
        KeyError: Nobody has measured that type, or that codec.
    """
    return TOLERANCE[dtype] + CODEC_TOLERANCE[codec]


def projection_problem(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projector: Projector,
    codec: str = "none",
) -> str | None:
    """Why projected K and V of ``n`` tokens are not those in the pool, or None when they are.

    The arguments are those of :func:`projected_differences` and :func:`difference_problem`.
    """
    differences = projected_differences(layer, hidden, positions, slots, projector)
    if isinstance(differences, str):
        return differences
    return difference_problem(layer, differences.tolist(), projector, codec)


def projected_differences(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projector: Projector,
) -> torch.Tensor | str:
    """How far projected K and V of ``n`` tokens are from those in the pool; nobody waits.

    Args:
        hidden: ``[n, hidden]``; it may have been through a codec.
        positions: int64 ``[n]``.
        slots: Where the model has written K and V, int64 ``[n]``.

    Returns:
        The relative differences of K and V, float64 ``[2]`` on the device, or why there are none.
    """
    try:
        projected = projector.project(layer, hidden, positions)
    except ProjectionFailed as error:
        return str(error)
    except (torch.OutOfMemoryError, MemoryError):  # that says nothing of the layer
        raise
    except Exception as error:  # a model's own code, called in a way it was not made for
        return f"{layer.name} cannot be called alone: {type(error).__name__}: {error}"
    wanted = projector.pool.fetch(layer.kernel, slots, hidden.dtype)
    return torch.stack(
        [difference_on_device(*pair) for pair in zip(projected, wanted, strict=True)]
    )


def difference_problem(
    layer: AttentionLayer, differences: Sequence[float], projector: Projector, codec: str = "none"
) -> str | None:
    """Why ``differences`` of K and V are more than rounding explains, and ``codec``; else None."""
    allowed = tolerance(projector.pool.dtype, codec)
    for name, difference in zip("KV", differences, strict=True):
        if not difference <= allowed:
            return (
                f"projected {name} of {layer.name} differs from the model's by {difference:.2e} "
                f"(allowed {allowed:.1g})"
            )
    return None


def first_problem(problems: Iterable[str | None]) -> str | None:
    """The first problem, if any; only after all were looked for.

    Some attention modules talk to the other ranks, which may find another layer at fault.
    """
    return next(filter(None, list(problems)), None)
