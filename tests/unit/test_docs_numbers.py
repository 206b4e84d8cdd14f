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
def readme() -> Page:
    return read_page(ROOT / "README.md")


def results(name: str) -> Any:
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def table(readme: Page, *header: str) -> Table:
    """The table whose header begins so."""
    [found] = [table for table in readme.tables if table.header[: len(header)] == header]
    return found


def cells(table: Table) -> list[tuple[str, ...]]:
    return [tuple(cell.replace("`", "") for cell in row.cells) for row in table.rows]


def test_the_page_store(readme: Page) -> None:
    found = results("store")
    labels = {256 * KIB: "256 KiB", 2048 * KIB: "2 MiB", 16384 * KIB: "16 MiB"}
    assert cells(table(readme, "page")) == [
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


def test_codecs(readme: Page) -> None:
    assert cells(table(readme, "codec", "in")) == [
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


def test_partitions(readme: Page) -> None:
    assert cells(table(readme, "bus, MB/s")) == [
        (
            "no limit" if row["mb_per_s"] is None else str(row["mb_per_s"]),
            *(f"{row['ms'][how]:,.0f}" for how in ("hidden", "kv", "recompute", "auto")),
            f"{row['auto_vs_best_pure']:.2f}",
            " + ".join(map(str, row["partition"])),
        )
        for row in results("partition")["rates"]
    ]


def test_the_demo(readme: Page) -> None:
    found = results("demo")
    [block] = [block for block in readme.blocks if "HCache with each codec" in block.text]
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


def test_numbers_in_sentences(readme: Page) -> None:
    found = results("store")
    text = " ".join(readme.path.read_text().split())
    for pages, start, middle in (
        ("1000000", "128 `exists` take", " (1.23 times raw lmdb gets), and it opens in"),
        ("10000000", "on a busy machine,", " (1.31 times) and"),
    ):
        row, times = found["indexes"][pages], f"{found['exists128_vs_lmdb'][pages]:.2f} times"
        assert times in middle
        assert f"{start} {row['exists128_us']:.0f} us{middle} {row['open_ms']:.0f} ms" in text
    faster = sorted(found["read_vs_hicachefile"].values())
    comparison = " ".join((ROOT / "docs" / "comparison.md").read_text().split())
    assert f"({faster[0]:.2f} to {faster[-1]:.2f} times in our measurement)" in comparison


def test_the_papers_partitions(readme: Page) -> None:
    def short(layers: dict[str, int], words: tuple[str, str, str] = ("", "", "")) -> str:
        counts = [layers[name] for name in ("hidden", "kv", "recompute")]
        shown = [f"{n} {word}".strip() for n, word in zip(counts, words, strict=True) if n]
        return " + ".join(shown if len(shown) > 1 else [*shown, "0"])

    names = ("hidden", "KV", "recomputed")
    assert [row[1:] for row in cells(table(readme, "", "the paper"))] == [
        (short(row["paper"], names), short(row["ours"]), short(row["closed_form"]))
        for row in results("paper")["table_3"]
    ]


def test_eager_restores(readme: Page) -> None:
    found = results("eager")

    def label(rate: float | None) -> str:
        if rate is None:
            return "no limit"
        return f"{rate:g}" + (" (balanced)" if rate == found["balanced_mb_per_s"] else "")

    assert cells(table(readme, "L3, MB/s")) == [
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
    gaps = found["time_between_tokens"]
    said = [f"{gaps[how]['mean_ms']:.0f} ms" for how in ("eager", "layerwise", "kv", "none")]
    text = " ".join(readme.path.read_text().split())
    assert (
        "{} with eager restores, {} with layer-wise ones, {} with KV, {} without".format(*said)
        in text
    )


def test_methods_compared(readme: Page) -> None:
    methods = results("compare")["restore"]["methods"]

    def shown(row: dict[str, Any], setting: str, part: str) -> str:
        return f"{row[setting][part]:,.0f}" if row[setting] and row[setting][part] else "-"

    assert cells(table(readme, "method", "bytes a token")) == [
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
    assert cells(table(readme, "ms between tokens")) == [
        (way["title"], *(f"{gap['median']:,.1f}" for gap in way["gaps_ms"].values()))
        for way in ways.values()
    ]


SETTINGS = ("disk", "balanced", "slow")


def has_l3(row: dict[str, Any] | None) -> bool:
    return row is not None and bool(row["bytes_per_token"])
