"""Tables and pictures of the documentation are those that programs make of recorded results."""

import pytest

from bench import claims
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


NUMBERS = [
    pytest.param(name, said, id=f"{page.name}-{name}-{number}")
    for page in PAGES
    for number, (name, said) in enumerate(claims.marked(page.read_text()))
]


@pytest.mark.parametrize(("name", "said"), NUMBERS)
def test_a_number_in_prose_is_that_of_the_results(name: str, said: str) -> None:
    assert said == claims.CLAIMS[name](results_of), "run python -m bench.record --tables"


def test_every_number_that_is_made_stands_on_a_page() -> None:
    assert {str(number.values[0]) for number in NUMBERS} == {*claims.CLAIMS}


def test_the_worst_is_that_of_all_medians() -> None:
    recorded = {path.stem for path in RESULTS.glob("hits*.json")}
    assert recorded == {*claims.HITS, "hits_load"}


@pytest.mark.parametrize("name", drawn())
def test_a_picture_can_be_drawn(name: str) -> None:
    pytest.importorskip("matplotlib")
    figure = program_of(name).draw(results_of(name))
    figure.draw_without_rendering()
    assert figure.get_suptitle() or any(axes.get_title() for axes in figure.axes)


def test_every_picture_is_drawn_by_a_program() -> None:
    assert {path.stem for path in RESULTS.glob("*.png")} == {*drawn()}
