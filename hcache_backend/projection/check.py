"""Are projected K and V those that the model wrote?"""

from __future__ import annotations

import math

import torch

_TOLERANCE = {
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


def tolerance(dtype: torch.dtype) -> float:
    """The bound for K and V that are kept as ``dtype``.

    Raises:
        KeyError: Nobody has measured that type.
    """
    return _TOLERANCE[dtype]


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest relative difference of any head.

    Args:
        got: Projected values ``[n, heads, dim]``.
        want: What the pool holds, same shape.

    Returns:
        ``max over heads of rms(got - want) / rms(want)``; infinity when something is not finite.
    """
    if got.shape != want.shape:
        return float("inf")
    difference = (got.double() - want.double()).square().mean(dim=(0, 2)).sqrt()
    scale = want.double().square().mean(dim=(0, 2)).sqrt()
    worst = float((difference / scale.clamp_min(1e-12)).max())
    return worst if math.isfinite(worst) else float("inf")
