"""Sums in an order that depends on the number of rows, as GPUs have them.

On a CPU, attention sums in one order in every batch, and products change theirs for few numbers of
rows. A GPU splits the sums of few rows over its processors (split-K, attention in several parts of
the keys). With the variable set, products of linear layers and attention do so. Nothing else
differs: partial sums are float32, and a result is rounded once.

With the other variable, sums are float64, and the number of rows shows in next to no result. Tests
that ask for equal tokens of models that quantise the inputs of their layers need it: a difference
in the last place moves an FP8 value by a sixteenth, now and then.
"""

import os

import torch

VARIABLE = "HCACHE_CPU_REORDER_SUMS"
"""`1`: the order depends on the number of rows."""

EXACT = "HCACHE_CPU_EXACT_SUMS"
"""`1`: sums of linear layers and of attention are float64."""

_PARTS = ((16, 4), (64, 3), (256, 2))
"""Up to so many rows, so many parts; one part of more."""


def splits(rows: int) -> int:
    """Into how many parts the sums of so many rows are split; 0: nothing is reordered."""
    if os.environ.get(VARIABLE) != "1":
        return 0
    return next((parts for most, parts in _PARTS if rows <= most), 1)


def exact() -> bool:
    """Whether sums are to be float64."""
    return os.environ.get(EXACT) == "1"


def install() -> None:
    """Replace the products of linear layers, the model's and those of projections alike."""
    if os.environ.get(VARIABLE) == "1":
        torch.nn.functional.linear = linear
    elif exact():
        torch.nn.functional.linear = exact_linear
        torch.bmm = exact_bmm


def exact_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `linear`, with one rounding of the result and none before it that would show."""
    product = rows.double() @ weight.double().t()
    return (product if bias is None else product + bias.double()).to(rows.dtype)


def exact_bmm(
    left: torch.Tensor, right: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As `torch.bmm`, by which MLA's queries and values become latent ones and back."""
    product = (left.double() @ right.double()).to(left.dtype)
    return product if out is None else out.copy_(product)


def linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`rows @ weight.T + bias`, for `[..., k]` and `[n, k]`."""
    width = rows.shape[-1]
    parts = splits(rows.numel() // width)
    size = -(-width // parts)
    total: torch.Tensor | None = None
    for start in range(0, width, size):
        part = slice(start, start + size)
        product = rows[..., part].float() @ weight[:, part].float().t()
        total = product if total is None else total + product
    assert total is not None
    return (total if bias is None else total + bias.float()).to(rows.dtype)
