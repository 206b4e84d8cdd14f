"""Comparison of projected K and V with those that the model wrote."""

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

Both sides round by about half a unit in the last place; a factor of five or more is left. A wrong
projection (another RoPE, a missing norm) is off by a tenth or more.
"""

CODEC_TOLERANCE = {"none": 0.0, "exp4": 0.0, "int8": 2e-2, "fp8": 6e-2}
"""Added by a codec: twice the largest difference seen in random models of nine architectures (int8
0.8%, fp8 2.8%; ``bench/codecs.py``). The same for encoded K and V. int8 loses more if rows, or K
and V, have large outliers, and is refused to such models."""


def tolerance(dtype: torch.dtype, codec: str = "none") -> float:
    """The bound for K and V kept as ``dtype``, from hidden states kept by ``codec``. Raises
    KeyError if the type or the codec was not measured."""
    return TOLERANCE[dtype] + CODEC_TOLERANCE[codec]


def projection_problem(
    layer: AttentionLayer,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projector: Projector,
    codec: str = "none",
) -> str | None:
    """The difference of projected K and V from the pool, as a message, or None if there is none."""
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
    """Relative differences of projected K and V from those that the model wrote to ``slots``.

    ``hidden`` (``[n, hidden]``) may have been through a codec. Returns float64 ``[2]`` on the
    device, without waiting, or the reason why there are none.
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
    """A message if rounding and ``codec`` do not explain ``differences`` of K and V, or None."""
    allowed = tolerance(projector.pool.dtype, codec)
    for name, difference in zip("KV", differences, strict=True):
        if not difference <= allowed:
            return (
                f"projected {name} of {layer.name} differs from the model's by {difference:.2e} "
                f"(allowed {allowed:.1g})"
            )
    return None


def first_problem(problems: Iterable[str | None]) -> str | None:
    """The first problem, if any, after all were looked for: some attention modules talk to the
    other ranks, which may find another layer at fault."""
    return next(filter(None, list(problems)), None)
