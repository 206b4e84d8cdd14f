"""The comparison of all checks: to the bit, within rounding and a codec's loss, and its words."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.checks.comparison import (
    compare_projection,
    difference_problem,
    first_problem,
    kv_differences,
    projection_problem,
    rows_equal,
)
from hcache_backend.projection.attention import ProjectionFailed

LAYER: Any = SimpleNamespace(name="layers.0", kernel=None)


def test_rows_that_a_codec_cannot_hold_do_not_count() -> None:
    want = torch.arange(6).view(3, 2)
    got = want.clone()
    got[1, 0] += 1
    assert rows_equal(want, want) and not rows_equal(got, want)
    assert rows_equal(got, want, torch.tensor([True, False, True]))
    assert not rows_equal(got, want, torch.tensor([False, True, True]))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([0.0, 0.02], None),
        ([0.0, 0.021], "V is off by 2.10e-02 (allowed 0.02)"),
        ([0.021, math.inf], "K is off by 2.10e-02 (allowed 0.02)"),
        ([math.nan, 0.0], "K is off by nan (allowed 0.02)"),
    ],
)
def test_k_and_v_differ_by_no_more_than_allowed(found: list[float], said: str | None) -> None:
    assert difference_problem("{} is off", found, 0.02) == said


@pytest.mark.parametrize(
    ("kept", "codec", "allowed"),
    [
        (torch.float32, "none", 1e-4),
        (torch.bfloat16, "exp4", 2e-2),
        (torch.bfloat16, "int8", 4e-2),
    ],
)
def test_a_codec_may_add_its_loss_to_that_of_rounding(
    kept: torch.dtype, codec: str, allowed: float
) -> None:
    want = (torch.randn(8, 2, 4), torch.randn(8, 2, 4))
    for share, fine in ((0.95, True), (1.05, False)):
        off = kv_differences((want[0], want[1] * (1 + share * allowed)), want).tolist()
        assert off == [0.0, pytest.approx(share * allowed, rel=1e-3)]
        problem = projection_problem(LAYER, off, kept, codec)
        assert problem is None if fine else "projected V of layers.0 differs" in str(problem)


def failing(error: Exception) -> Any:
    """A projector that raises ``error``."""

    def project(*_: Any) -> Any:
        raise error

    return SimpleNamespace(project=project)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProjectionFailed("layers.0 did not call attention"), "layers.0 did not call attention"),
        (KeyError("x"), "layers.0 cannot be called alone: KeyError: 'x'"),
    ],
)
def test_a_layer_that_cannot_be_projected_is_a_problem(error: Exception, said: str) -> None:
    rows, projector = torch.zeros(1, 4), failing(error)
    assert compare_projection(LAYER, rows, rows, rows, projector) == said


def test_too_little_memory_says_nothing_of_a_layer() -> None:
    rows, projector = torch.zeros(1, 4), failing(torch.OutOfMemoryError("none left"))
    with pytest.raises(torch.OutOfMemoryError):
        compare_projection(LAYER, rows, rows, rows, projector)


def test_all_layers_are_looked_at_before_the_first_problem_is_told() -> None:
    """Some modules talk to other ranks, which find another layer at fault."""
    seen: list[int] = []
    found = first_problem(seen.append(layer) or (None, "one", "two")[layer] for layer in range(3))
    assert (found, seen) == ("one", [0, 1, 2])
