"""Short runs of the programs in ``bench`` that serve, and ``hcache ingest``, on real servers."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.compare.__main__ import main as run_compare
from bench.demo.__main__ import main as run_demo
from bench.harness.client import Reply, StreamingClient
from bench.harness.methods import METHODS, SERVED
from bench.harness.server import CachedTokens
from bench.multiturn.__main__ import main as run_multiturn
from bench.multiturn.__main__ import started
from bench.multiturn.run import Target
from hcache_backend.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine

HIDDEN_BYTES = 4 * 256 * 4
"""Bytes per token of the tiny models: four layers of 256 float32."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The one that the program starts if none is named."""
    with started("hcache-hidden", None, 8192, (), tmp_path_factory.mktemp("bench")) as found:
        yield found


def bench(server: Target, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command against the server; the line of its only run."""
    log = folder / "log.jsonl"
    status = run_multiturn(
        [
            *("--url", server.url, "--api-key", server.key or ""),
            *("--request-rate", "inf", "--log-file", str(log), *arguments),
        ]
    )
    assert status == 0
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    summary = line["summary"]
    assert summary["failed_requests"] == 0
    assert summary["total_requests"] == line["workload"]["requests"]
    assert 0 < summary["median_ttft"] <= summary["p90_ttft"] <= summary["p99_ttft"]
    found: dict[str, Any] = line
    return found


def test_histories_come_from_l3_where_rounds_are_flushed(server: Target, tmp_path: Path) -> None:
    line = bench(
        *(server, tmp_path, "--num-clients", "3", "--num-rounds", "3", "--request-length", "128"),
        *("--output-length", "8", "--flush-between-rounds", "--tag", "short"),
        *("--requests-file", str(tmp_path / "requests.jsonl")),
    )
    assert line["tag"] == "short"
    summary, rounds, l3 = line["summary"], line["round"], line["l3"]
    assert (summary["total_requests"], summary["average_output_len"]) == (9, 8)
    # Prompts of 128, 264 and 400 tokens; whole pages of 64 of the history before came back.
    assert rounds["round_0"]["cache_hit_rate"] == 0
    assert rounds["round_1"]["storage_hit_rate"] == pytest.approx(128 / 264)
    assert rounds["round_2"]["storage_hit_rate"] == pytest.approx(256 / 400)
    assert summary["device_hit_rate"] == summary["host_hit_rate"] == 0
    assert l3["mode"] == "hidden"
    assert l3["bytes_restored"] == 3 * (128 + 256) * HIDDEN_BYTES
    assert l3["bytes_read"] >= l3["bytes_restored"]
    assert l3["bytes_written"] > 0
    assert 0 < summary["median_itl"] <= summary["p99_itl"]
    requests = [json.loads(text) for text in (tmp_path / "requests.jsonl").open()]
    assert [request["output_tokens"] for request in requests] == [8] * 9
    assert {len(request["gaps_s"]) for request in requests} == {7}


def test_sharegpt4(server: Target, tmp_path: Path) -> None:
    line = bench(
        *(server, tmp_path, "--workload", "sharegpt4", "--num-clients", "4", "--scale", "0.1"),
        *("--max-rounds", "3", "--interval", "0"),
    )
    assert line["workload"]["arrivals"] == "sessions"
    assert line["summary"]["device_hit_rate"] > 0.3


@pytest.mark.parametrize("task", ["paper", "gsm", "quality", "mixed"])
def test_leval_restores_contexts_from_l3(server: Target, tmp_path: Path, task: str) -> None:
    line = bench(
        *(server, tmp_path, "--workload", "leval", "--leval-task", task, "--num-clients", "2"),
        *("--scale", "0.05"),
    )
    assert line["pace"]["max_parallel"] == 1
    assert line["summary"]["storage_hit_rate"] > 0.7


def test_zipf_hits_favourites_on_the_device(server: Target, tmp_path: Path) -> None:
    line = bench(
        *(server, tmp_path, "--workload", "zipf", "--num-clients", "10", "--scale", "0.02"),
        *("--zipf-skew", "2", "--num-documents", "4"),
    )
    assert line["summary"]["device_hit_rate"] > 0.3
    assert line["summary"]["storage_hit_rate"] > 0


def test_agents_share_their_system_prompt(server: Target, tmp_path: Path) -> None:
    line = bench(
        *(server, tmp_path, "--workload", "agent", "--num-clients", "3", "--scale", "0.05"),
        *("--max-rounds", "4", "--interval", "0", "--max-parallel", "1"),
    )
    assert line["summary"]["device_hit_rate"] > 0.7


def test_rag_finds_documents_that_were_prefilled(server: Target, tmp_path: Path) -> None:
    line = bench(
        *(server, tmp_path, "--workload", "rag", "--num-clients", "4", "--scale", "0.1"),
        *("--num-documents", "3"),
    )
    assert line["summary"]["storage_hit_rate"] > 0.3
    assert line["summary"]["cache_hit_rate"] > 0.7


def test_conversations_of_a_file(server: Target, tmp_path: Path) -> None:
    words = {"[UNK]": 0, **{f"w{n}": n for n in range(1, 50)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    talk = [
        {"from": who, "value": " ".join(f"w{(7 * n + start) % 50}" for n in range(length))}
        for start, (who, length) in enumerate(
            [("human", 90), ("gpt", 4), ("human", 80), ("gpt", 6)]
        )
    ]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps([{"id": "1", "conversations": talk}]))
    line = bench(
        *(server, tmp_path, "--sharegpt", str(path), "--model-path", str(tmp_path)),
        *("--num-clients", "1", "--interval", "0"),
    )
    assert line["workload"]["name"] == "sharegpt"
    assert line["summary"]["average_prompt_len"] == (90 + 174) / 2
    assert line["summary"]["average_output_len"] == 5


def test_a_history_that_is_too_long_for_the_server_is_refused(
    server: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_multiturn(
            [
                *("--url", server.url, "--api-key", server.key or ""),
                *("--num-clients", "1", "--request-length", "4000"),
            ]
        )
    said = capsys.readouterr().err
    assert "takes fewer than 8," in said
    assert "--scale 0.3" in said


def test_ingested_documents_are_found_in_l3_and_not_sent_again(
    server: Target, tmp_path: Path
) -> None:
    document = [n * 7 % 1000 for n in range(300)]
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"id": "long", "input_ids": document}) + "\n")

    def ingest() -> dict[str, Any]:
        done = CliRunner().invoke(
            app,
            [
                *("ingest", str(path), "--url", server.url, "--api-key", server.key or ""),
                *("--journal", str(tmp_path / "journal.jsonl"), "--json"),
            ],
        )
        assert done.exit_code == 0, done.output
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    first = ingest()
    assert (first["stored"], first["tokens"], first["tokens_found_in_l3"]) == (1, 300, 0)
    assert first["l3"]["bytes_written"] >= 256 * HIDDEN_BYTES
    assert first["failed"] == {}

    async def question() -> Reply:
        async with StreamingClient(server.url, server.key) as client:
            return await client.generate([*document, 1, 2, 3], 1)

    assert asyncio.run(question()).cached == CachedTokens(storage=256)

    again = ingest()
    assert (again["stored"], again["already_stored"]) == (0, 1)
    assert again["l3"]["bytes_written"] == 0


def test_a_document_that_the_server_refuses_is_named(server: Target, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"id": "huge", "input_ids": [1] * 9000}) + "\n")
    done = CliRunner().invoke(
        app,
        [
            *("ingest", str(path), "--url", server.url, "--api-key", server.key or ""),
            *("--journal", str(tmp_path / "journal.jsonl")),
        ],
    )
    assert done.exit_code == 1
    assert "documents.jsonl:1 (huge): " in done.output
    assert not (tmp_path / "journal.jsonl").read_text()


def compare(model: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """The report of a comparison."""
    out = folder / "compare.json"
    said = io.StringIO()
    with redirect_stdout(said):
        status = run_compare(
            [
                *("--model-path", str(model), "--out", str(out)),
                *("--scratch-dir", str(folder), *arguments),
            ]
        )
    assert status == 0
    assert out.with_suffix(".md").read_text() in said.getvalue()
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_restores_are_timed_in_the_server(model: Path, tmp_path: Path) -> None:
    found = compare(
        *(model, tmp_path, "--part", "restore", "--methods", "hcache-hidden"),
        *("--tokens", "256", "--rounds", "1"),
    )["restore"]
    row = found["methods"]["hcache-hidden"]
    for times in (row[setting] for setting in ("disk", "balanced", "slow")):
        assert times["said"].startswith("hidden mode: 4 layers from hidden states")
        # Beside the hidden states a page has headers.
        assert HIDDEN_BYTES < times["bytes_per_token"] < 1.1 * HIDDEN_BYTES
        assert 0 < times["l3_ms"] < times["ms"]
        assert 0 < times["load_ms"] < times["ms"]
        assert len(times["all_ms"]) == 1
    # Nothing can be faster than what imitates the bus and the disk.
    alone = row["disk"]["load_ms"]
    assert row["balanced"]["load_ms"] > 0.9 * alone
    assert row["slow"]["l3_ms"] > 0.9 * 3 * alone
    bus, l3 = (found[f"{name}_bytes_per_second"] for name in ("balanced_bus", "slow_l3"))
    assert bus == pytest.approx(3 * l3)
    assert (tmp_path / "compare_restore.png").exists()
    assert not list(tmp_path.glob("hcache-compare-*"))


@pytest.mark.long
def test_saving_is_timed_beside_a_server_that_saves_nothing(model: Path, tmp_path: Path) -> None:
    found = compare(model, tmp_path, "--part", "saving", "--rounds", "1")["saving"]
    assert list(found["ways"]) == ["none", "staged"]
    for way in found["ways"].values():
        assert all(0 < gaps["median"] <= gaps["p99"] for gaps in way["gaps_ms"].values())
    assert (tmp_path / "compare_saving.png").exists()


def test_the_demo_leaves_the_checkout_as_it_was() -> None:
    def status() -> str:
        command = ["git", "status", "--porcelain"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    before = status()
    said = io.StringIO()
    with redirect_stdout(said):
        assert run_demo(["--tokens", "256", "--random"]) == 0
    assert "out/demo.json" in said.getvalue()
    assert status() == before


@pytest.mark.long
@pytest.mark.timeout(1800)  # four servers, and a model that may have to be trained
def test_codecs_are_compared_with_a_server_without_a_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.codecs", "--quick", "--dtypes", "float32"]
    command += ["--conversations", "2", "--turns", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {
        row["codec"]: row for row in json.loads((tmp_path / "codecs.json").read_text())["codecs"]
    }
    assert list(rows) == ["decoded", "none", "int8", "fp8"]
    scored = 2 * 2 * 64  # replies behind a history
    for name in ("decoded", "none"):
        exact = rows[name]["as_recomputed"]
        assert (exact["same"], exact["tokens"]) == (scored, scored)
        assert exact["largest_difference"] < 1e-3
    assert rows["none"]["as_uncoded"] is None  # it would be compared with itself
    for name in ("int8", "fp8"):
        assert 1e-4 < rows[name]["as_uncoded"]["mean_difference"] < 1
        assert rows[name]["share_of_uncoded"] < 0.5
    assert (tmp_path / "codecs.png").exists()


@pytest.mark.long
@pytest.mark.timeout(3600)  # two dozen servers
def test_all_methods_are_compared(model: Path, tmp_path: Path) -> None:
    found = compare(
        *(model, tmp_path, "--tokens", "512", "--rounds", "2", "--scale", "0.2"),
        *("--max-rounds", "3", "--interval", "0.2", "--rates", "4,8"),
    )
    restores, loads = found["restore"]["methods"], found["load"]["methods"]
    assert set(restores) == set(METHODS) - {"ideal", "host"}
    assert restores["file"]["disk"]["bytes_per_token"] == 2 * HIDDEN_BYTES
    assert restores["hcache-kv"]["slow"]["bytes_per_token"] > 1.9 * HIDDEN_BYTES
    shared = restores["hcache-hidden"]["disk"]["bytes_per_token"]
    assert restores["hcache-hidden-eager"]["disk"]["bytes_per_token"] == shared
    # What would wait for all of L3 first is overlapped.
    slow = {name: row["slow"]["ms"] for name, row in restores.items() if row["slow"]}
    assert slow["hcache-hidden-eager"] < slow["hcache-hidden"]
    assert set(loads) == set(SERVED)
    for row in loads.values():
        assert [run["request_rate"] for run in row["runs"]] == [4, 8]
        assert all(not run["failed_requests"] for run in row["runs"])
    assert all(run["cache_hit_rate"] == 0 for run in loads["recompute"]["runs"])
    assert all(run["device_hit_rate"] > 0 for run in loads["ideal"]["runs"])
    assert all(run["storage_hit_rate"] == 0 for run in loads["host"]["runs"])
    stored = [loads[f"hcache{kind}"] for kind in ("", "-kv", "-hidden", "-hidden-eager")]
    stored.append(loads["file"])
    assert all(load["l3_bytes"] > 0 for load in stored)
    # How much of it leaves host memory meanwhile is a matter of time, for each of them.
    assert any(run["storage_hit_rate"] > 0 for load in stored for run in load["runs"])
    assert (tmp_path / "compare_load.png").exists()
