"""Agents' conversations, sent by clients that this project did not write, to a real model.

SGLang's benchmark (data set ``agentic-trace``) and AIPerf (Mooncake replay, with idle times between
turns) send the same conversations to HiCache without an L3, to SGLang's ``file`` backend, and to
this one with its default options. Servers with an L3 have read the conversations once, and were
started anew. Then the servers take turns, the others stopped meanwhile. Files of L3 are out of the
page cache, and a server forgets everything behind each run.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from statistics import fmean, median, quantiles
from tempfile import mkdtemp
from typing import Any, NamedTuple

from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE
from bench.fixtures.text import library_tokens
from bench.harness.methods import METHODS, Method, server_options
from bench.harness.program import Program, Run, Setting, at_least, names, scratch, steps
from bench.harness.report import Picture, Results, Row, Series, Table, by
from bench.harness.restorer import Restorer, forget_files, resting, restorer
from bench.harness.server import ServerError
from bench.harness.turns import NO_L3
from bench.workload.agents import agentic_trace, conversation, mooncake_trace, short_sessions
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env, stub_torchvision

SEED, LONGEST = 1, 45_000  # tokens of a prompt, before it is divided
REPLY, PARALLEL = 4, 4  # tokens; conversations at a time, which all begin at once in AIPerf
POOL = 1536  # tokens of the device; host memory has a quarter more
COMPARED = {
    NO_L3: replace(METHODS["host"], title="no L3"),
    "file": replace(METHODS["file"], title="`file`"),
    "ours": Method("ours", storage="dynamic"),
}
SERVING, AIPERF = "bench_serving", "AIPerf"
FILL, COLD = "empty", "full, cold"
NUMBERS = "mean_ms", "p50_ms", "p90_ms", "per_second", "from_l3", "cpu_s"
_AIPERF = Path(sys.prefix) / "aiperf" / "bin" / "aiperf"  # in an environment of its own
# Data sets of images import a package that the others have no use for.
_SERVING = """
import runpy, sys, types
sys.modules["datasets"] = types.SimpleNamespace(load_dataset=None)
runpy.run_module("sglang.benchmark.serving", run_name="__main__", alter_sys=True)
"""


class Replay(NamedTuple):
    """What a client says of one run; times and replies are by conversation and turn."""

    first_ms: Sequence[float]
    replies: Sequence[str]
    per_second: float
    failed: int


class Trace(NamedTuple):
    """Conversations, in a file for each client."""

    model: Path
    conversations: int
    requests: int
    agentic: Path
    mooncake: Path


def trace_of(model: Path, folder: Path, given: Any) -> Trace:
    stub_torchvision()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    library = library_tokens(tokenizer)

    def text(tokens: int) -> str:
        return str(tokenizer.decode([*islice(library, tokens)]))

    def talks() -> list[list[str]]:
        """Of other texts in each call: what one client has stored is new to the other."""
        return [conversation(session, given.tokens, text) for session in sessions]

    sessions = short_sessions(given.conversations, given.turns, LONGEST, SEED)
    agentic, mooncake = folder / "agentic.json", folder / "mooncake.jsonl"
    agentic.write_text(json.dumps(agentic_trace(talks())))
    lines = mooncake_trace(talks(), sessions, given.speed, REPLY)
    mooncake.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return Trace(model, len(sessions), given.turns * len(sessions), agentic, mooncake)


def bench_serving(trace: Trace, url: str, folder: Path) -> Replay:
    out = folder / "bench_serving.jsonl"
    arguments = ["--backend", "sglang-oai-chat", "--base-url", url, "--model", trace.model]
    arguments += ["--dataset-name", "agentic-trace", "--dataset-path", trace.agentic]
    arguments += ["--num-prompts", trace.conversations, "--max-concurrency", PARALLEL]
    arguments += ["--sharegpt-output-len", REPLY, "--warmup-requests", 0, "--disable-tqdm"]
    arguments += ["--output-file", out, "--output-details"]
    _call([sys.executable, "-c", _SERVING, *arguments], cpu_engine_env(), folder)
    found = json.loads(out.read_text())
    first_ms = [1e3 * seconds for seconds in found["ttfts"]]
    failed = trace.requests - found["completed"]
    return Replay(first_ms, found["generated_texts"], found["request_throughput"], failed)


def aiperf(trace: Trace, url: str, folder: Path) -> Replay:
    arguments = ["--model", trace.model.name, "--tokenizer", trace.model, "--url", url]
    arguments += ["--endpoint-type", "chat", "--streaming", "--use-legacy-max-tokens"]
    arguments += ["--extra-inputs", json.dumps({"temperature": 0, "ignore_eos": True})]
    arguments += ["--input-file", trace.mooncake, "--custom-dataset-type", "mooncake_trace"]
    arguments += ["--no-fixed-schedule", "--concurrency", trace.conversations]
    arguments += ["--request-count", trace.requests, "--ui", "none"]
    arguments += ["--export-outputs-json", "--output-artifact-dir", folder]
    _call([_AIPERF, "profile", *arguments], {}, folder)
    found = json.loads((folder / "outputs.json").read_text())["data"]
    found.sort(key=lambda one: (one["conversation_id"], one["turn_index"]))
    begin = min(one["request_start_ns"] for one in found)
    seconds = (max(one["request_end_ns"] for one in found) - begin) / 1e9
    first_ms = [one["metrics"]["time_to_first_token"] for one in found]
    replies = [one["response_text"] for one in found]
    return Replay(first_ms, replies, len(found) / seconds, trace.requests - len(found))


CLIENTS = {SERVING: bench_serving, AIPERF: aiperf}


def _call(command: Sequence[Any], environment: Mapping[str, str], folder: Path) -> None:
    """Run a client; raises ServerError if it failed."""
    env, given = {**os.environ, **environment}, [*map(str, command)]
    done = subprocess.run(given, check=False, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise ServerError(f"{given[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def replay(restored: Restorer, client: str, trace: Trace, folder: Path) -> Row:
    """One run of a server that is stopped before and behind it.

    Raises:
        ServerError: The client failed, or one of its requests did.
    """
    server, place = restored.server, Path(mkdtemp(prefix=f"{client}-", dir=folder))
    with restored.turn():
        forget_files(restored.l3)
        before, begin = restored.tokens_from_l3(), restored.cpu_seconds()
        found = CLIENTS[client](trace, server.url, place)
        came, spent = restored.tokens_from_l3() - before, restored.cpu_seconds() - begin
        server.flush_cache(300)
    if found.failed:
        raise server.error(f"{found.failed} requests of {client} failed")
    p90 = quantiles(found.first_ms, n=10, method="inclusive")[-1]
    times = fmean(found.first_ms), median(found.first_ms), p90
    numbers = (*times, found.per_second, came, spent)
    return {**dict(zip(NUMBERS, numbers, strict=True)), "replies": found.replies}


def measure(run: Run) -> Results:
    given = run.given
    if AIPERF in given.clients and not _AIPERF.exists():
        run.parser.error(f"--clients: {AIPERF} is not installed; `make bench-clients` does it")
    found: dict[tuple[str, str, str], list[Row]] = {}
    model, total = real_model("smollm2"), len(COMPARED) + given.rounds
    with scratch() as scratched, steps(total) as advance, ExitStack() as stack:
        folder, servers = Path(scratched), dict[str, Restorer]()
        trace = trace_of(model, folder, given)
        for name, method in COMPARED.items():
            advance(f"{name} stores the conversations")
            options = server_options(
                *(method, run.machine, model, folder / name),
                pool_tokens=POOL,
                dtype="bfloat16",
                hicache_ratio=1.25,
                metrics=True,
                # The others' weights and pools count as used.
                extra_args=("--mem-fraction-static", "0.5"),
            )
            if name != NO_L3:
                with restorer(options, folder / name / "l3") as server:
                    for client in given.clients:
                        one = replay(server, client, trace, folder / name)
                        found[client, name, FILL] = [one]
            servers[name] = stack.enter_context(resting(options, folder / name / "l3"))
        for number in range(given.rounds):
            advance(f"round {number}")
            for client in given.clients:
                for name in random.Random(f"{number}{client}").sample([*servers], len(servers)):
                    one = replay(servers[name], client, trace, folder / name)
                    found.setdefault((client, name, COLD), []).append(one)
    rows = [
        {"client": client, "server": COMPARED[name].title, "phase": phase}
        | summary(found[client, name, phase], found[client, NO_L3, COLD][0])
        for client, phase, name in product(given.clients, (FILL, COLD), COMPARED)
        if (client, name, phase) in found
    ]
    return {"model": TITLE, "rows": rows}


def summary(rounds: Sequence[Row], first: Row) -> dict[str, Any]:
    """Medians of a server's rounds; its replies are compared with those of the ``first`` run."""
    pairs = [pair for one in rounds for pair in zip(one["replies"], first["replies"], strict=False)]
    return {
        **{number: median(one[number] for one in rounds) for number in NUMBERS},
        "rounds": [{number: one[number] for number in NUMBERS} for one in rounds],
        "replies": len(pairs),
        "other_replies": sum(mine != its for mine, its in pairs),
    }


def cold(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["phase"] == COLD]


def finding(results: Results) -> str:
    mean = {(row["client"], row["server"]): row["mean_ms"] for row in cold(results)}
    clients = dict.fromkeys(client for client, _ in mean)
    said = [f"{mean[n, 'ours'] / mean[n, 'no L3']:.2f} by {n}" for n in clients]
    return f"From cold disks the first token takes {', '.join(said)} of the mean time without L3"


PROGRAM = Program(
    name="clients",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--clients", names(list(CLIENTS)), list(CLIENTS), "that send the conversations"),
        Setting("--conversations", at_least(1), 5, "of agents"),
        Setting("--turns", at_least(2), 3, "of each"),
        Setting("--tokens", at_least(1), 48, "divides lengths"),
        Setting("--speed", at_least(1.0), 10.0, "divides idle times (AIPerf)"),
        Setting("--rounds", at_least(1), 3, "with everything in L3"),
    ),
    tables=Table(
        "rows",
        "client | server | L3 = phase | mean, ms = mean_ms :,.0f | p50 = p50_ms :,.0f | "
        "p90 = p90_ms :,.0f | requests/s = per_second | CPU s = cpu_s :.0f | "
        "tokens from L3 = from_l3 :,.0f | replies | other replies = other_replies",
    ),
    said=lambda results: [finding(results)],
    draw=Picture(
        title=finding,
        panels=by("client", cold),
        x="server",
        x_label="",
        y_label="ms to the first token, cold",
        series=(Series("mean", "mean_ms", "ours"), Series("90%", "p90_ms", "file")),
        bars="%.0f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
