"""The comparison of all checks: to the bit, within rounding and a codec's loss, and its words."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.checks.comparison import (
    difference,
    equal,
    first_problem,
    of_kv,
    projected,
    projected_difference,
)
from hcache_backend.projection.attention import ProjectionFailed

LAYER: Any = SimpleNamespace(name="layers.0", kernel=None)


def test_rows_that_a_codec_cannot_hold_do_not_count() -> None:
    want = torch.arange(6).view(3, 2)
    got = want.clone()
    got[1, 0] += 1
    assert equal(want, want) and not equal(got, want)
    assert equal(got, want, torch.tensor([True, False, True]))
    assert not equal(got, want, torch.tensor([False, True, True]))


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
    assert difference("{} is off", found, 0.02) == said


@pytest.mark.parametrize(
    ("kept", "codec", "off", "fine"),
    [
        (torch.float32, "none", 0.9e-4, True),
        (torch.float32, "none", 1.1e-4, False),
        (torch.bfloat16, "exp4", 1.9e-2, True),
        (torch.bfloat16, "exp4", 2.1e-2, False),
        (torch.bfloat16, "int8", 3.9e-2, True),
        (torch.bfloat16, "int8", 4.1e-2, False),
        (torch.bfloat16, "fp8", 7.9e-2, True),
        (torch.bfloat16, "fp8", 8.1e-2, False),
    ],
)
def test_a_codec_may_add_its_loss_to_that_of_rounding(
    kept: torch.dtype, codec: str, off: float, fine: bool
) -> None:
    want = (torch.randn(8, 2, 4), torch.randn(8, 2, 4))
    got = (want[0], want[1] * (1 + off))
    assert of_kv(got, want).tolist() == [0.0, pytest.approx(off, rel=1e-3)]
    problem = projected_difference(LAYER, of_kv(got, want).tolist(), kept, codec)
    assert problem is None if fine else "projected V of layers.0 differs" in str(problem)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProjectionFailed("layers.0 did not call attention"), "layers.0 did not call attention"),
        (KeyError("x"), "layers.0 cannot be called alone: KeyError: 'x'"),
        (torch.OutOfMemoryError("none left"), None),  # it says nothing of the layer
    ],
)
def test_a_layer_that_cannot_be_projected_is_a_problem(error: Exception, said: str | None) -> None:
    def project(*_: Any) -> Any:
        raise error

    rows, projector = torch.zeros(1, 4), SimpleNamespace(project=project)
    if said is None:
        with pytest.raises(torch.OutOfMemoryError):
            projected(LAYER, rows, rows, rows, projector)  # type: ignore[arg-type]
    else:
        assert projected(LAYER, rows, rows, rows, projector) == said  # type: ignore[arg-type]


def test_all_layers_are_looked_at_before_the_first_problem_is_told() -> None:
    """Some modules talk to other ranks, which find another layer at fault."""
    seen: list[int] = []
    found = first_problem(seen.append(layer) or (None, "one", "two")[layer] for layer in range(3))
    assert (found, seen) == ("one", [0, 1, 2])
