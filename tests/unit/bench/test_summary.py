"""Numbers of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness.server import CachedTokens
from bench.multiturn.driver import Request, RunResult
from bench.multiturn.report import append, log_lines, request_lines
from bench.multiturn.run import Measured
from bench.multiturn.summary import by_round, errors, percentile, summarise

REQUESTS = [
    Request(0, 0, 0.0, 100, 3, CachedTokens(), 0.1, 0.3, (0.1, 0.1)),
    Request(0, 1, 1.0, 200, 3, CachedTokens(20, 40, 80), 0.3, 0.9, (0.2, 0.4)),
    Request(1, 0, 0.0, error="refused"),
]


def test_percentiles_are_those_of_sglangs_benchmark() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.9) == 91
    assert percentile(values, 0.99) == 100
    assert percentile(values, 1.0) == 100
    assert percentile([], 0.5) == 0


def test_a_summary_has_sglangs_names_and_counts_what_succeeded() -> None:
    found = summarise(RunResult(REQUESTS, 2.0), 4.0)
    assert (found["total_requests"], found["failed_requests"]) == (2, 1)
    assert found["request_rate"] == 4
    assert found["average_ttft"] == pytest.approx(0.2)
    assert found["median_ttft"] == found["p90_ttft"] == found["p99_ttft"] == 0.3
    assert found["average_itl"] == pytest.approx(0.2)
    assert found["max_itl"] == 0.4
    assert found["average_latency"] == pytest.approx(0.6)
    assert found["throughput"] == 1
    assert found["input_token_throughput"] == 150
    assert found["output_token_throughput"] == 3
    assert found["average_prompt_len"] == 150


def test_the_papers_time_between_tokens_is_an_average_of_each_request() -> None:
    found = summarise(RunResult(REQUESTS, 2.0), 1.0)
    assert found["average_tbt"] == pytest.approx((0.1 + 0.3) / 2)
    assert found["max_tbt"] == pytest.approx(0.3)


def test_hits_are_shares_of_all_prompt_tokens() -> None:
    found = summarise(RunResult(REQUESTS, 2.0), 1.0)
    assert found["cache_hit_rate"] == pytest.approx(140 / 300)
    assert found["device_hit_rate"] == pytest.approx(20 / 300)
    assert found["host_hit_rate"] == pytest.approx(40 / 300)
    assert found["storage_hit_rate"] == pytest.approx(80 / 300)


def test_hits_that_are_not_split_have_no_tier() -> None:
    found = summarise(RunResult([Request(0, 0, 0.0, 100, 1, CachedTokens(unsplit=50))], 1.0), 1.0)
    assert found["cache_hit_rate"] == 0.5
    assert found["storage_hit_rate"] is None


def test_a_run_in_which_all_failed_is_no_error() -> None:
    found = summarise(RunResult([REQUESTS[2]], 1.0), 1.0)
    assert (found["total_requests"], found["failed_requests"]) == (0, 1)
    assert found["average_ttft"] == found["cache_hit_rate"] == 0


def test_rounds_are_told_apart() -> None:
    found = by_round(REQUESTS)
    assert list(found) == ["round_0", "round_1"]
    assert found["round_1"]["request_count"] == 1
    assert found["round_1"]["storage_hit_rate"] == pytest.approx(0.4)
    assert found["round_0"]["cache_hit_rate"] == 0


def test_reasons_of_failures_are_counted() -> None:
    failed = [Request(n, 0, 0.0, error=text) for n, text in enumerate(["a", "b", "b"])]
    assert errors([*REQUESTS, *failed]) == {"b": 2, "refused": 1, "a": 1}
    assert next(iter(errors(failed))) == "b"


def test_lines_are_added_to_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    measured = [Measured({"summary": {"x": 1}}, REQUESTS)]
    append(path, log_lines(measured, "first"))
    append(path, request_lines(measured))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 4
    assert (lines[0]["tag"], lines[0]["summary"]) == ("first", {"x": 1})
    assert lines[2]["cached"] == {"device": 20, "host": 40, "storage": 80, "unsplit": 0}
    assert lines[3]["error"] == "refused"
