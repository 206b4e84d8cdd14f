"""Tables and pictures of the documentation are those that programs make of recorded results."""

import json

import pytest

from bench.record import PAGES, RESULTS, drawn, marked, program_of, recorded, results_of
from bench.record import table as made

BLOCKS = [
    pytest.param(name, content, id=f"{page.name}-{name}")
    for page in PAGES
    for name, content in marked(page.read_text())
]


@pytest.mark.parametrize(("name", "content"), BLOCKS)
def test_a_table_says_what_the_results_say(name: str, content: str) -> None:
    assert content == made(name), f"run python -m bench.record --tables, or record {name} again"


def test_all_results_of_programs_have_a_table_in_the_documentation() -> None:
    assert {str(block.values[0]).split()[0] for block in BLOCKS} == {*recorded()}


def test_what_pages_say_of_the_judgement_of_hits_is_what_was_measured() -> None:
    cases = [
        case
        for name in ("hits.json", "hits_latents.json")
        for case in json.loads((RESULTS / name).read_text())["cases"]
    ]
    points = [point for case in cases for point in case["points"]]
    assert (len(points), f"{max(point['of_better'] for point in points):.2f}") == (60, "1.04")
    [slower] = [point for point in points if (point["interval"] or [0])[0] > 1]
    assert [f"{value:.2f}" for value in slower["interval"]] == ["1.02", "1.13"]
    for name in ("README.md", "CHANGELOG.md", "docs/serving.md"):
        said = " ".join((RESULTS.parents[1] / name).read_text().split())
        assert "of 60 " in said.lower() and "1.04 times" in said, name
    readme = " ".join((RESULTS.parents[1] / "README.md").read_text().split())
    for case in cases:
        if case["model"] in ("MHA", "GQA") and case["tokens"] == 1024:
            stored = case["bytes_per_token"]
            for who in ("ours", "file"):
                assert f"{stored[who]:,.0f}" in readme


@pytest.mark.parametrize("name", drawn())
def test_a_picture_can_be_drawn(name: str) -> None:
    pytest.importorskip("matplotlib")
    figure = program_of(name).draw(results_of(name))
    figure.draw_without_rendering()
    assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)


def test_every_picture_is_drawn_by_a_program_or_a_command() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == {*drawn(), "plan"}
