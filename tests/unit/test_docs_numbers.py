"""Every table of results in the documentation is the one that its program makes of its results."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.record import PAGES, PROGRAMS, marked, record, refreshed
from bench.record import table as made
from tests.docs.__main__ import ROOT
from tests.docs.pages import Page, Table, read_page

KIB = 1 << 10
BLOCKS = [
    pytest.param(name, content, id=f"{page.name}-{name}")
    for page in PAGES
    for name, content in marked(page.read_text())
    if name in PROGRAMS
]


@pytest.mark.parametrize(("name", "content"), BLOCKS)
def test_a_table_says_what_the_results_say(name: str, content: str) -> None:
    assert content == made(name), f"run python -m bench.record --tables, or record {name} again"


def test_every_program_has_a_table_in_the_documentation() -> None:
    assert {block.values[0] for block in BLOCKS} == set(PROGRAMS)


def test_a_table_is_written_anew_between_its_marks_only() -> None:
    page = "before\n<!-- results: demo -->\nold\n<!-- end -->\nbehind\n"
    found = refreshed(page)
    assert found == f"before\n<!-- results: demo -->\n{made('demo')}\n<!-- end -->\nbehind\n"
    assert list(marked(found)) == [("demo", made("demo"))]


def test_results_that_are_missing_end_the_program(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"demo\.json is missing"):
        record("demo", tmp_path)


@pytest.fixture(scope="module")
def pages() -> list[Page]:
    return [read_page(ROOT / "README.md"), read_page(ROOT / "docs" / "benchmarks.md")]


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def table(pages: list[Page], *header: str) -> Table:
    """The table whose header begins so."""
    tables = (table for page in pages for table in page.tables)
    [found] = [table for table in tables if table.header[: len(header)] == header]
    return found


def cells(table: Table) -> list[tuple[str, ...]]:
    return [tuple(cell.replace("`", "") for cell in row.cells) for row in table.rows]


def test_codecs(pages: list[Page]) -> None:
    assert cells(table(pages, "codec", "in")) == [
        (
            row["codec"],
            row["dtype"],
            f"{row['stored_bytes_per_token']:,.0f}",
            f"{row['share_of_exact']:.2f}",
            f"{row['k_error']:.2%}",
            f"{row['v_error']:.2%}",
            f"{row['identical']} of {row['tokens']} ({row['identical_share']:.1%})",
        )
        for row in results("codecs")["codecs"]
    ]


def test_partitions(pages: list[Page]) -> None:
    assert cells(table(pages, "bus, MB/s")) == [
        (
            "no limit" if row["mb_per_s"] is None else str(row["mb_per_s"]),
            *(f"{row['ms'][how]:,.0f}" for how in ("hidden", "kv", "recompute", "auto")),
            f"{row['auto_vs_best_pure']:.2f}",
            " + ".join(map(str, row["partition"])),
        )
        for row in results("partition")["rates"]
    ]


def test_eager_restores(pages: list[Page]) -> None:
    found = results("eager")

    def label(rate: float | None) -> str:
        if rate is None:
            return "no limit"
        return f"{rate:g}" + (" (balanced)" if rate == found["balanced_mb_per_s"] else "")

    assert cells(table(pages, "L3, MB/s")) == [
        (
            label(row["mb_per_s"]),
            *(f"{row['ms'][how]:,.0f}" for how in ("eager", "layerwise", "kv")),
            *(
                f"{row[ratio]:.2f}"
                for ratio in ("eager_vs_layerwise", "eager_vs_larger_part", "kv_vs_eager")
            ),
        )
        for row in found["rates"]
    ]
    labels = {"none": "no restore", "kv": "KV pages", "eager": "eager", "layerwise": "layer-wise"}
    assert cells(table(pages, "during restores")) == [
        (label, f"{found['time_between_tokens'][how]['mean_ms']:.0f}")
        for how, label in labels.items()
    ]


def test_the_page_store(pages: list[Page]) -> None:
    found = results("store")
    labels = {256 * KIB: "256 KiB", 2048 * KIB: "2 MiB", 16384 * KIB: "16 MiB"}
    assert cells(table(pages, "page")) == [
        (
            label,
            f"{median(found['pages'][str(size)]['read']['store']):,.0f}",
            f"{found['read_vs_ceiling'][str(size)]:.2f}",
            f"{found['read_vs_hicachefile'][str(size)]:.2f}",
            f"{median(found['pages'][str(size)]['write']['store']):,.0f}",
            f"{found['write_vs_ceiling'][str(size)]:.2f}",
        )
        for size, label in labels.items()
    ]


def test_the_index_of_the_page_store(pages: list[Page]) -> None:
    found = results("store")
    assert cells(table(pages, "pages in the index")) == [
        (
            f"{int(count):,}",
            f"{row['exists128_us']:.0f}",
            f"{found['exists128_vs_lmdb'][count]:.2f}",
            f"{row['open_ms']:.0f}",
        )
        for count, row in found["indexes"].items()
    ]
