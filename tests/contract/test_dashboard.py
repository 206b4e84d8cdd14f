"""The Grafana dashboard and the alerts of Prometheus ask for metrics that exist."""

import ast
import json
import re
from typing import Any

import pytest
import yaml

from hcache_backend import metrics
from hcache_backend.cli.metrics_page import PROMPT
from hcache_backend.sglang.compat import SUPPORTED
from hcache_backend.store import StoreStats
from tests.contract.versions import ROOT, source
from tests.docs.names import known_metrics

DASHBOARD = json.loads((ROOT / "dashboards" / "hcache.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ON_THE_DASHBOARD = [target["expr"] for panel in PANELS for target in panel["targets"]]
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "dashboards" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
EXPRESSIONS = [*ON_THE_DASHBOARD, *(alert["expr"] for alert in ALERTS)]
NAME = r"\b(?:hcache_|sglang:)\w+"
OURS = known_metrics()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()


def names(expressions: list[str]) -> set[str]:
    return {name for expression in expressions for name in re.findall(NAME, expression)}


def test_our_metrics_exist_and_each_is_on_the_dashboard() -> None:
    asked = {name for name in names(EXPRESSIONS) if name.startswith("hcache_")}
    assert asked <= set(OURS)
    families = {name.removesuffix("_bucket") for name in names(ON_THE_DASHBOARD)}
    assert {name for name in OURS if not name.endswith(("_sum", "_count", "_bucket"))} <= families


@pytest.mark.parametrize("version", SUPPORTED)
def test_sglangs_metrics_exist(version: str) -> None:
    text = (source(version).root / "sglang/srt/observability/metrics_collector.py").read_text()
    asked = names([*EXPRESSIONS, PROMPT[0]])
    for name in (name for name in asked if name.startswith("sglang:")):
        assert f'"{name.removesuffix("_bucket")}"' in text


def test_labels_exist() -> None:
    for expression in EXPRESSIONS:
        for name, inside in re.findall(rf"({NAME})(?:\{{([^}}]*)\}})?", expression):
            labels = set(re.findall(r"(\w+)!?=", inside))
            for grouped in re.findall(r"by \(([^)]*)\)", expression):
                labels |= set(grouped.split(", "))
            assert labels <= OURS.get(name, labels) | {"instance"}, expression


def test_values_of_labels_exist() -> None:
    """Those that are written in the package as they are, and counters of the store."""
    text = "\n".join(path.read_text() for path in (ROOT / "hcache_backend").rglob("*.py"))
    text += " ".join(StoreStats().snapshot())
    for expression in EXPRESSIONS:
        for value in re.findall(
            r'(?:event|result|kind|state|asked|used)!?=~?"([^"]*)"', expression
        ):
            for choice in value.split("|"):
                assert choice.removesuffix(".*") in text, f"{choice} in {expression}"


def test_panels_are_told_apart() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_is_a_rule_with_a_runbook(alert: dict[str, Any]) -> None:
    """As Prometheus reads it; its own checker is not a package of Python."""
    assert set(alert) <= {"alert", "expr", "for", "labels", "annotations"}
    assert set(alert["labels"]) == {"severity"}
    assert re.fullmatch(r"\d+[smhd]", alert.get("for", "0s"))
    assert alert["expr"].count("(") == alert["expr"].count(")")
    name = alert["alert"]
    assert alert["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
    assert f"\n#### {name}\n" in OPERATIONS
    shown = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) - {"instance"}
    assert shown <= set().union(*(OURS[name] for name in names([alert["expr"]])))


def test_each_runbook_is_of_an_alert() -> None:
    assert re.findall(r"^#### (HCache\w+)$", OPERATIONS, re.M) == [rule["alert"] for rule in ALERTS]


def test_every_event_that_is_counted_has_a_counter() -> None:
    """``Events.count`` would raise within SGLang."""
    tables = {
        name: table for name, table in vars(metrics).items() if isinstance(table, metrics.Events)
    }
    counted = {("STORE", name) for name in StoreStats().snapshot()}
    for path in (ROOT / "hcache_backend").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            table = ast.unparse(call.func.value).rpartition(".")[2]
            if table in tables and call.func.attr == "add":
                counted |= {(table, str(keyword.arg)) for keyword in call.keywords if keyword.arg}
            if table in tables and call.func.attr == "count":
                event = call.args[0]
                if isinstance(event, ast.JoinedStr):  # any value, after what all of them begin with
                    first = next(part for part in event.values if isinstance(part, ast.Constant))
                    counted.add((table, f"{first.value!s}reason"))
                elif isinstance(event, ast.Constant):
                    counted.add((table, str(event.value)))
    assert len(counted) > 50
    for of, happened in counted:
        known = any(re.fullmatch(one.events, happened) for one in tables[of].counters)
        assert known, (of, happened)


def texts_in(node: ast.AST) -> set[str]:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {text.replace(" ", "_") for text in parts if isinstance(text, str)}


def texts(path: str, *functions: str) -> set[str]:
    """What these functions of the package return, or call a problem, as texts."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / "hcache_backend" / path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            for part in ast.walk(node):
                if isinstance(part, ast.Return) or (
                    isinstance(part, ast.Assign | ast.AnnAssign)
                    and ast.unparse(part).startswith("problem")
                ):
                    found |= texts_in(part.value) if part.value is not None else set()
    return found


def kinds() -> set[str]:
    """The kinds of problems that the package counts."""
    found = texts("host/page_headers.py", "seal", "_seal")
    found |= {f"page_{why}" for why in refusals()}
    found |= {"stale_host_page", "layers_not_recomputable"}
    for path in (ROOT / "hcache_backend").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            said = ast.unparse(call)
            if re.match(r"(metrics\.)?PROBLEMS\.count\('|metrics\.catching\('", said):
                found |= texts_in(call.args[0])
            elif said.startswith("partial(metrics.catching, "):
                found |= texts_in(call.args[1])
            elif said.startswith("_catching('"):  # of tiers/storage.py
                found |= {f"storage_{what}" for what in texts_in(call.args[0])}
    return found


def refusals() -> set[str]:
    return texts("format/page.py", "problem") | texts("host/page_headers.py", "verified_pages")


def documented(title: str) -> set[str]:
    """The values in the first column of the table of this title in docs/operations.md."""
    _, _, rest = OPERATIONS.partition(f"| {title} | ")
    rows = rest.partition("\n\n")[0].splitlines()[2:]
    return {value for row in rows for value in re.findall("`(.+?)`", row.split("|")[1])}


def test_every_kind_and_reason_is_documented() -> None:
    assert documented("`kind` of `hcache_problems_total`") == kinds()
    not_backed_up = texts("arena.py", "problem") | texts("host/node_backups.py", "_ended")
    not_backed_up |= {"rows_not_encodable", "another_rank", "host_pool_full"}
    assert documented("`reason` of `hcache_not_backed_up_tokens_total`") == not_backed_up
    not_restored = texts("sglang/controller.py", "_plan_load") | {"another_rank"}
    assert documented("`reason` of `hcache_not_restored_tokens_total`") == not_restored
    row = re.search(r"\n\| `refused_...` \|(.*)\n", OPERATIONS)
    assert row and set(re.findall("`(.+?)`", row[1])) == refusals()
