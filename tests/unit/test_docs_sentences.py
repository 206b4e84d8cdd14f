"""README and docs are written in short sentences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.__main__ import ROOT, pages_of
from tests.docs.sentences import sentences

AVERAGE, LONGEST = 18, 40  # words


def wrong(path: Path) -> list[str]:
    found = list(sentences(path))
    average = sum(sentence.words for sentence in found) / len(found)
    long = [f"line {s.line}: {s.words} words: {s.text}" for s in found if s.words > LONGEST]
    return [*long, *([f"{average:.1f} words on average"] if average >= AVERAGE else [])]


@pytest.mark.parametrize("path", pages_of(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_are_short(path: Path) -> None:
    found = wrong(path)
    assert not found, "\n".join(found)


def test_code_headings_and_tables_are_no_sentences(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading\n\nOne `piece of code` counts once. Version 0.5 is\nno end, e.g. here! So\n\n"
        "| a | table |\n|---|---|\n| with | cells |\n\n- An item [with a link](to/there.md)\n\n"
        "```sh\nmake demo\n```\n"
    )
    assert [sentence.words for sentence in sentences(page)] == [4, 7, 1, 5]
    assert [sentence.line for sentence in sentences(page)] == [3, 3, 3, 10]


def test_a_long_sentence_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * LONGEST}end. {'Short. ' * 9}")
    assert [text[:17] for text in wrong(page)] == ["line 1: 41 words:"]


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", ["options", "operations", "serving", "limits"])
def test_cells_of_tables_are_short(name: str) -> None:
    lines = (ROOT / "docs" / f"{name}.md").read_text().splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > 35] == []
