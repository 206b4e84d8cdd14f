"""What the benchmark of encoded K and V counts, and what it found."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from bench.record import RESULTS
from bench.segment_codec import KINDS, SHAPES, VALUES, WAYS, needed, synthetic

RESULT = json.loads((RESULTS / "segment_codec.json").read_text())


def test_exceptions_are_those_outside_the_windows() -> None:
    values = torch.full((2, 16, 64), 1.0)
    values[0, :4, :8] = 2.0**40
    values[0, 5, :8] = 2.0**-40
    found = needed(values.bfloat16())
    exceptions = {way: round(found[way]["most"] * 1024 / 100) for way in WAYS}
    # The extra exponent is that of the 32 values; each token has one window, and so each channel.
    assert exceptions == {"exp4": 8, "top": 0, "token": 4 * 8 + 8, "channel": 8 * 5, "channels": 40}
    assert found["exp4"]["mean"] == pytest.approx(100 * 4 / 1024)
    assert found["exp4"]["unfit"] == 0
    assert found["channel"]["share"] == (1.5 * 1024 + 40 + 64) / 2048


def test_synthetic_k_has_the_channels_that_it_says() -> None:
    scales, outliers, offsets, both = (
        torch.std_mean(synthetic(kind, 1, 4096, 128, seed=0)[0], 0) for kind in KINDS
    )
    assert scales[0].log().std() == pytest.approx(1, abs=0.2)
    assert (outliers[0] > 40).sum() == 2
    assert (offsets[1] > 90).sum() == 4
    assert (both[1].abs() > 90).sum() == 4


def overflow(kind: str, units: int, tokens: int, width: int, seed: int) -> tuple[int, float]:
    """Units of synthetic K that do not fit, and the exceptions of all in percent of the values."""
    found = needed(synthetic(kind, units, tokens, width, seed).bfloat16())["exp4"]
    return found["unfit"], found["mean"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_synthetic_k_fits(tokens: int, width: int, kind: str) -> None:
    unfit, mean = overflow(kind, 2**17 // (tokens * width), tokens, width, seed=100)
    assert unfit == 0 and mean <= (0.9 if kind == "all" else 0.5)


@pytest.mark.long
def test_the_hardest_synthetic_k_ten_times(
    record_property: Callable[[str, object], None],
) -> None:
    """Ten times as many units as the benchmark has: small ones, with all that is difficult."""
    units = 10 * VALUES // (16 * 64)
    unfit, mean = overflow("all", units, 16, 64, seed=101)
    record_property("units", units)
    record_property("units_that_do_not_fit", unfit)
    record_property("exceptions_percent", round(mean, 3))
    assert unfit <= 1e-3 * units


def test_every_recorded_unit_fits() -> None:
    synthetic_rows = [row for row in RESULT["rows"] if row["what"] in KINDS]
    assert len(synthetic_rows) == len(SHAPES) * len(KINDS)
    assert all(row["ways"]["exp4"]["unfit"] == 0 for row in RESULT["rows"])
    assert all(row["ways"]["exp4"]["share"] <= 0.766 for row in synthetic_rows)
