"""The house keeps to the sizes that docs/structure.md gives."""

from __future__ import annotations

from tests import house

MOST_LINES = 700  # of a file: it is one idea


def test_no_folder_has_more_lines_than_its_budget() -> None:
    budgets = house.budgets()
    lines = {folder: size.lines for folder, size in house.sizes(house.tree(), budgets).items()}
    assert {folder: n for folder, n in lines.items() if n > budgets[folder]} == {}


def test_every_folder_of_the_package_has_a_budget() -> None:
    folders = {path.rpartition("/")[0] for path, _ in house.tree()}
    package = {folder for folder in folders if folder.startswith(("hcache_backend", "kernels"))}
    budgets = house.budgets()
    parts = {f"kernels/codecs/{part}" for part in ("exp3", "exp4", "scaled")}
    assert package - parts <= budgets.keys()


def test_no_file_is_longer_than_one_idea() -> None:
    lines = {path: len(text.splitlines()) for path, text in house.tree()}
    assert {path: n for path, n in lines.items() if n > MOST_LINES} == {}
