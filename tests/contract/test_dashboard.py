"""The Grafana dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re

import pytest

from hcache_backend.cli.metrics_page import COUNTERS, STAGES
from hcache_backend.store import StoreStats
from tests.contract.versions import ROOT, WANTED, source
from tests.docs.names import known_metrics

DASHBOARD = json.loads((ROOT / "dashboards" / "hcache.json").read_text())
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
NAME = r"\b(?:hcache_|sglang:)\w+"
OURS = known_metrics()


def names(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(NAME, expression)}


def test_our_metrics_exist_and_each_is_on_the_dashboard() -> None:
    asked = {name for name in names(EXPRESSIONS) if name.startswith("hcache_")}
    assert asked <= set(OURS)
    families = {name.removesuffix("_bucket") for name in asked}
    assert {name for name in OURS if not name.endswith(("_sum", "_count", "_bucket"))} <= families


@pytest.mark.parametrize("version", WANTED)
def test_sglangs_metrics_exist(version: str) -> None:
    text = source(version).text("sglang/srt/observability/metrics_collector.py")
    asked = names([*EXPRESSIONS, *(metric for metric, _ in COUNTERS.values())])
    for name in (name for name in asked if name.startswith("sglang:")):
        assert f'"{name.removesuffix("_bucket")}"' in text


def test_labels_exist() -> None:
    for expression in EXPRESSIONS:
        for name, inside in re.findall(rf"({NAME})\{{([^}}]*)\}}", expression):
            labels = set(re.findall(r"(\w+)=", inside)) - {"instance"}
            if name in OURS:
                grouped = re.search(r"by \(([^)]*)\)", expression)
                labels |= set(grouped[1].split(", ")) - {"instance"} if grouped else set()
                assert labels <= OURS[name], expression


def test_counters_of_the_store_that_are_asked_for_exist() -> None:
    counted = set(StoreStats().snapshot())
    for pattern in re.findall(r'what=~"([^"]*)"', " ".join(EXPRESSIONS)):
        assert any(re.fullmatch(pattern, name) for name in counted), pattern
        for choice in re.findall(r"\w+", re.sub(r"[().*|]", " ", pattern)):
            assert any(choice in name for name in counted), choice


def test_top_reads_metrics_that_exist() -> None:
    for metric, label in COUNTERS.values():
        assert metric.startswith("sglang:") or label in OURS[metric]
    assert f"{STAGES}_bucket" in OURS
