"""Pictures of recorded results say what they show, and can be read in the documentation."""

from __future__ import annotations

import pytest

from bench.harness.report import SMALLEST, WIDTH, ratio_axis, times
from bench.record import RESULTS, drawn, program_of, results_of

OTHERS = {"plan"}
"""Pictures of commands."""


@pytest.mark.parametrize("name", drawn())
def test_a_picture_has_a_title_and_letters_that_can_be_read(name: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    figure = program_of(name).draw(results_of(name))
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= WIDTH
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)
    assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert {text.get_text() for text in texts if text.get_fontsize() < SMALLEST} == set()


def test_every_picture_is_drawn_by_a_program() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == {*drawn(), *OTHERS}


def test_the_ticks_of_a_ratio_axis_are_powers_of_two() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.plot([0.25, 4], [0.1, 17])
    ratio_axis(axes, "x", [0.25, 4])
    assert [text.get_text() for text in axes.get_xticklabels()] == [
        "1/4x",
        "1/2x",
        "1x",
        "2x",
        "4x",
    ]
    assert [times(value) for value in (0.125, 3)] == ["1/8x", "3x"]
