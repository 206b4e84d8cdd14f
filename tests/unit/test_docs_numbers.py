"""Tables in the README say what the benchmarks' results say."""

from __future__ import annotations

import json
from statistics import median
from typing import Any

import pytest

from tests.docs.__main__ import ROOT
from tests.docs.pages import Page, Table, read_page

KIB = 1 << 10


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


def test_the_demo(pages: list[Page]) -> None:
    found = results("demo")
    [block] = [
        block for page in pages for block in page.blocks if "HCache with each codec" in block.text
    ]
    lines = [line.split() for line in block.text.splitlines()]
    assert f"SGLang {found['sglang_version']} on {found['device']}" in block.text
    for label, method in (("KV offload", "kv_offload"), ("HCache", "hcache")):
        row = found["methods"][method]
        times = (row[f"{stage}_ms_per_1k_tokens"] for stage in ("restore", "l3", "load"))
        assert [
            *label.split(),
            f"{row['stored_bytes_per_token']:,.0f}",
            f"{row['l3_tokens']:,}",
            *(f"{time:.1f}" for time in times),
            "yes" if row["identical_tokens"] else "no",
        ] in lines
    recompute = f"{found['methods']['recompute']['restore_ms_per_1k_tokens']:.1f}"
    assert ["recompute", "-", "-", recompute, "-", "-", "-"] in lines
    exact, *others = found["codecs"]["codecs"].items()
    assert exact[0] == "none"
    for name, row in others:
        stored, share = row["stored_bytes_per_token"], row["share_of_kv"]
        same = (str(row["same_tokens"]), "of", str(row["reply_tokens"]))
        assert [name, f"{stored:,.0f}", f"{share:.2f}", f"{row['l3_tokens']:,}", *same] in lines


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


def test_the_papers_partitions(pages: list[Page]) -> None:
    def short(layers: dict[str, int], words: tuple[str, str, str] = ("", "", "")) -> str:
        counts = [layers[name] for name in ("hidden", "kv", "recompute")]
        shown = [f"{n} {word}".strip() for n, word in zip(counts, words, strict=True) if n]
        return " + ".join(shown if len(shown) > 1 else [*shown, "0"])

    names = ("hidden", "KV", "recomputed")
    assert [row[1:] for row in cells(table(pages, "", "the paper"))] == [
        (short(row["paper"], names), short(row["ours"]), short(row["closed_form"]))
        for row in results("paper")["table_3"]
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


def test_methods_compared(pages: list[Page]) -> None:
    methods = results("compare")["restore"]["methods"]

    def shown(row: dict[str, Any], setting: str, part: str) -> str:
        return f"{row[setting][part]:,.0f}" if row[setting] and row[setting][part] else "-"

    assert cells(table(pages, "method", "bytes a token")) == [
        (
            row["title"],
            next((f"{row[s]['bytes_per_token']:,.0f}" for s in SETTINGS if has_l3(row[s])), "-"),
            shown(row, "disk", "ms"),
            shown(row, "disk", "l3_ms"),
            shown(row, "balanced", "load_ms"),
            shown(row, "slow", "ms"),
        )
        for row in methods.values()
    ]
    ways = results("compare_saving")["saving"]["ways"]
    assert cells(table(pages, "ms between tokens")) == [
        (way["title"], *(f"{gap['median']:,.1f}" for gap in way["gaps_ms"].values()))
        for way in ways.values()
    ]


SETTINGS = ("disk", "balanced", "slow")


def has_l3(row: dict[str, Any] | None) -> bool:
    return row is not None and bool(row["bytes_per_token"])
