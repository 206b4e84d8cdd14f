"""Short runs on real servers: the programs in ``bench`` that serve, and ``examples/ingest.py``."""

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

from bench import clients, real, replies, restores
from bench.demo import PROGRAM as DEMO
from bench.harness.client import Reply, StreamingClient
from bench.harness.machine import find_machine
from bench.harness.methods import METHODS, server_options
from bench.harness.options import ADMIN_KEY
from bench.harness.program import Program
from bench.harness.server import CachedTokens, Server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bench")
    how = METHODS["hcache-hidden"]
    options = server_options(how, find_machine(), model, folder, pool_tokens=8192, metrics=True)
    with Server(options) as found:
        yield found


def results_of(program: Program, folder: Path, name: str, *arguments: str) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()) as said:
        assert program.main(["--out", str(folder), *arguments]) == 0
    assert f"Results: {folder}/{name}.json" in said.getvalue()
    assert (folder / f"{name}.png").exists()
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def test_ingested_documents_are_found_in_l3(server: Server, tmp_path: Path) -> None:
    document = [n * 7 % 1000 for n in range(300)]
    path = tmp_path / "documents.jsonl"
    path.write_text(json.dumps({"input_ids": document}) + "\n")

    def ingest() -> dict[str, int]:
        program = [sys.executable, str(ROOT / "examples" / "ingest.py"), str(path)]
        given = ["--url", server.url, "--api-key", ADMIN_KEY]
        done = subprocess.run([*program, *given], capture_output=True, text=True, check=True)
        said: dict[str, int] = json.loads(done.stdout)
        return said

    said = {"documents": 1, "refused": 0, "tokens": 300}
    assert ingest() == {**said, "tokens_found_in_l3": 0}

    async def question() -> Reply:
        async with StreamingClient(server.url, ADMIN_KEY) as client:
            return await client.generate([*document, 1, 2, 3], 1)

    assert asyncio.run(question()).cached == CachedTokens(storage=256)
    server.flush_cache()
    assert ingest() == {**said, "tokens_found_in_l3": 256}


def test_restores_are_timed_in_the_server(tmp_path: Path) -> None:
    arguments = ("codec", "--tokens", "256", "--rounds", "1", "--rates", "5", "0")
    found = results_of(restores.PROGRAM, tmp_path, "restores_codec", *arguments)
    size = {row["method"]: row["bytes_per_token"] for row in found["stored"]}
    plain, exp4, exp3 = (size[f"`{codec}`"] for codec in ("none", "exp4", "exp3"))
    assert exp3 < exp4 < 0.8 * plain
    assert all("KV mode, own pages" in row["said"] for row in found["stored"])
    slow, fast = (row["ms"] for row in found["rows"])
    # Nothing can be faster than what imitates the disk.
    for codec, ms in slow.items():
        assert ms > 0.9 * 256 * size[f"`{codec}`"] / 5e3 and fast[codec] > 0


@pytest.mark.long
def test_a_real_model_is_asked_cold_and_warm_after_a_restart(tmp_path: Path) -> None:
    arguments = ("--forms", "smollm2", "--dtypes", "float32", "--tokens", "256", "--rounds", "1")
    found = results_of(real.PROGRAM, tmp_path, "real", *arguments, "--methods", "none,file,ours")
    [row] = found["rows"]
    assert row["share_from_l3"] == {"none": 0, "file": 1, "ours": 1}
    assert row["rounds_with_differing_replies"] == 0
    assert row["bytes_per_token"]["file"] == 46080  # before questions added pages
    assert all(len(asked) == 2 for rounds in row["rounds_ms"].values() for asked in rounds)
    assert min(row["cpu_s"].values()) > 0


@pytest.mark.long
def test_a_client_of_sglang_replays_conversations(tmp_path: Path) -> None:
    arguments = ("--conversations", "2", "--turns", "2", "--rounds", "1", "--tokens", "64")
    found = results_of(
        clients.PROGRAM, tmp_path, "clients", "--clients", "bench_serving", *arguments
    )
    cold = {row["server"]: row for row in found["rows"] if row["phase"] == clients.COLD}
    assert [row["replies"] for row in cold.values()] == [4, 4, 4]
    assert cold["no L3"]["from_l3"] == 0 < cold["ours"]["from_l3"] == cold["`file`"]["from_l3"]
    assert all(0 < row["p50_ms"] <= row["p90_ms"] for row in cold.values())


@pytest.mark.long
@pytest.mark.timeout(1800)  # without instructions for bfloat16 a prompt takes half a minute
def test_replies_behind_a_recomputed_front_are_compared_with_computed_ones(tmp_path: Path) -> None:
    few = ("--histories", "1", "--tokens", "1000", "--questions", "1", "--reply", "2")
    assert replies.PROGRAM.main(["--out", str(tmp_path), *few, "--methods", "front,never"]) == 0
    front, never = json.loads((tmp_path / "replies.json").read_text())["rows"]
    assert (front["replies"], front["hit"], never["hit"]) == (1, 1, 1)
    assert never["recomputed"] == 0 < front["recomputed"] < 1


@pytest.mark.long
def test_the_demo_leaves_the_checkout_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    def status() -> str:
        command = ["git", "status", "--porcelain"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    before = status()
    assert DEMO.main(["--tokens", "256", "--random"]) == 0
    said = capfd.readouterr()
    assert "out/demo.json" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    assert "shards" not in said.err  # loaders are quiet
    assert status() == before
    found = json.loads((ROOT / "out" / "demo.json").read_text())
    ours = {part: found[part]["ours"] for part in ("restart", "burst", "damaged", "hung")}
    assert ours["burst"]["share"] == 1 and ours["hung"]["seconds"] < 10
    # A damaged page ends the hit of ours; the other backend's goes on behind it.
    whole, other = ours["restart"]["from_l3"][0], found["damaged"]["file"]
    assert 0 < ours["damaged"]["from_l3"] < whole <= other["from_l3"]
    assert ours["damaged"]["change"] < 1e-3 < other["change"]
    assert all(one["same_logprobs"] for one in found["bfloat16"].values())
    sizes = {part: found[part]["ours"]["bytes_per_token"] for part in ("bfloat16", "hidden")}
    assert sizes["bfloat16"] < 0.8 * found["bfloat16"]["file"]["bytes_per_token"]
    assert sizes["hidden"] < 0.52 * found["hidden"]["file"]["bytes_per_token"]


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
    assert list(rows) == ["decoded", "none", "int8"]
    scored = 2 * 2 * 64  # replies behind a history
    for name in ("decoded", "none"):
        exact = rows[name]["as_recomputed"]
        assert (exact["same"], exact["tokens"]) == (scored, scored)
        assert exact["largest_difference"] < 1e-3
    assert rows["none"]["as_uncoded"] is None  # it would be compared with itself
    assert 1e-4 < rows["int8"]["as_uncoded"]["mean_difference"] < 1
    assert rows["int8"]["share_of_uncoded"] < 0.5
    assert (tmp_path / "codecs.png").exists()
