"""Options of ``bench.multiturn`` that are wrong, and what a running server may lack."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench.harness.program import parser
from bench.multiturn import __main__ as program
from bench.multiturn.report import notes
from bench.multiturn.run import Measured, check_length
from bench.workload.base import Session, Turn, Workload, WorkloadError
from bench.workload.options import add_workload_options, choose, load_tokenizer
from hcache_backend.cli.ingest import UnusableServer
from hcache_backend.cli.metrics_page import MetricsPage, NoMetrics, moved, parse

NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "magic"], "argument --method: invalid choice: 'magic' (choose from"),
        (["--request-rate", "0"], "--request-rate 0: must be above 0"),
        (["--scale", "0"], "--scale 0: must be a number above 0"),
        (["--url", NOBODY, "--port", "3"], "give it, or --host and --port, and not both"),
        (["--url", "localhost:30000"], "--url localhost:30000: must be http://HOST:PORT"),
        (["--url", NOBODY], f"no usable SGLang server at {NOBODY}"),
        (["--host", "127.0.0.1", "--port", "9"], f"no usable SGLang server at {NOBODY}"),
        (
            ["--workload", "rag", "--request-length", "5"],
            "--request-length 5: is for --workload multiturn; rag has its own",
        ),
        (["--zipf-skew", "1"], "--zipf-skew 1.0: is for --workload zipf and rag"),
        (["--workload", "zipf", "--zipf-skew", "3"], "--zipf-skew 3: must be from 0"),
        (["--workload", "leval", "--leval-task", "law"], "--leval-task 'law': must be one of"),
        (["--workload", "sharegpt"], "--workload sharegpt: needs --sharegpt FILE"),
        (["--sharegpt", "talks.json"], "--sharegpt: needs --model-path, whose tokenizer"),
        (["--max-context", "10"], "--max-context 10: a question and its reply of workload"),
        (["--min-rounds", "3", "--max-rounds", "2"], "--min-rounds 3: must be at most"),
        (["--model-path", "/no/model"], "argument --model-path: /no/model: there is nothing"),
        (["--num-clients", "0"], "argument --num-clients: 0 must be at least 1"),
        (["--ready-queue-policy", "lifo"], "argument --ready-queue-policy: invalid choice: 'lifo'"),
    ],
)
def test_a_wrong_option_is_named_with_what_would_be_right(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def none_starts(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(program, "started", none_starts)
    with pytest.raises(SystemExit, match="2"):
        program.main(arguments)
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"--model-path .*: has no tokenizer"):
        load_tokenizer(str(tmp_path))


def options(**given: Any) -> argparse.Namespace:
    made = parser("bench.test", None)
    add_workload_options(made, "what is asked", "multiturn")
    made.set_defaults(**{"num_clients": 2, "model_path": None, **given})
    return made.parse_args([])


def test_rounds_mean_what_they_mean_in_sglangs_benchmark() -> None:
    def rounds(**given: Any) -> list[int]:
        return [len(session.turns) for session in choose(options(**given)).sessions]

    assert rounds() == [5, 5]
    assert rounds(num_rounds=3) == [3, 3]
    assert rounds(min_rounds=2) == rounds(max_rounds=2) == [2, 2]
    assert set(rounds(num_clients=50, min_rounds=2, max_rounds=3)) == {2, 3}


def test_the_interval_is_not_scaled_where_it_is_given() -> None:
    assert choose(options(workload="sharegpt4", scale=0.1)).interval_s == pytest.approx(3)
    assert choose(options(workload="sharegpt4", scale=0.1, interval=4.0)).interval_s == 4


def test_a_workload_that_the_server_would_refuse_is_refused_before() -> None:
    workload = Workload("test", (Session((Turn(90, 10),)),))
    check_length(workload, {"max_req_input_len": 101})
    check_length(workload, {})
    with pytest.raises(
        UnusableServer, match=r"100 tokens .* fewer than 100: give --max-context 99"
    ):
        check_length(workload, {"max_req_input_len": 100})


MODE = 'hcache_mode_info{mode="hidden",pages="own"} 1.0\n'


def page(read: int, restored: int, dropped: int = 0) -> MetricsPage:
    return parse(
        MODE
        + f"hcache_store_read_bytes_total {read}\n"
        + f'hcache_store_pages_total{{event="dropped_full"}} {dropped}\n'
        + f'hcache_device_bytes_total{{transfer="restored_hidden"}} {restored}\n'
        + 'hcache_device_bytes_total{transfer="restored_kv"} 5\n'
        + 'hcache_device_bytes_total{transfer="captured"} 1000\n'
    )


def test_bytes_are_those_of_the_run() -> None:
    found = moved(page(10, 100), page(30, 400, dropped=2))
    assert (found["bytes_read"], found["bytes_restored"]) == (20, 300)
    assert (found["bytes_written"], found["pages_dropped"]) == (0, 2)


def test_bytes_are_missing_with_a_reason() -> None:
    assert moved(NoMetrics("start it with --enable-metrics"), page(0, 0)) == {
        "missing": "start it with --enable-metrics"
    }
    assert "anew" in moved(page(10, 0), page(0, 0))["missing"]


def test_notes_say_what_a_reader_has_to_know() -> None:
    parts = {
        "errors": {"400: too long": 3},
        "l3": {"missing": "no metrics"},
        "summary": {"storage_hit_rate": None},
    }
    assert notes([Measured(parts, []), Measured(parts, [])]) == [
        "3 requests failed: 400: too long",
        "no bytes of L3: no metrics",
        "the server does not say where hits were: start it with --enable-cache-report",
    ]
