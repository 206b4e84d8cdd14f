"""How soon agents that come back get their first token, by what keeps their histories.

Sessions of agents (:mod:`bench.workload.agents`) with windows of up to 160,000 tokens, scaled down,
take turns on a server of each method. Tokens are divided by --tokens, and idle times by --speed.
Idle times, and ten seconds of them, are those before scaling. A turn's history is the part
of its prompt that is a prompt before it: was it on the device or in host memory when the turn came?
The device has room for an eighth of the tokens, or for the longest prompt, and host memory for
twice as many.

- host memory: HiCache without L3
- L3: ours, which is read when a turn comes
- everything kept: the device has room for all

The servers take turns, the others stopped meanwhile: in each round every server has all sessions
once, with tokens that none has had before.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from bench.harness.client import StreamingClient
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.models import SMALL, VOCABULARY
from bench.harness.options import ADMIN_KEY
from bench.harness.program import MODEL, Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Column, Picture, Results, Row, Series, Table
from bench.harness.restorer import Restorer, resting
from bench.workload.agents import WINDOW, Session, agent_sessions, generated

SEED, IDLE_S = 1, 10.0
LONGEST_IDLE_S, BEGIN_S = 300.0, 300.0
WAYS = {
    "host": ("host memory", "host"),
    "l3": ("L3", "hcache-eager"),
    "all": ("everything kept", "ideal"),
}
"""Title, and method of the server."""


@dataclass(frozen=True)
class Turn:
    """A prompt, whose first ``shared`` tokens are those of the one before; ``idle`` seconds are
    between the reply before and this turn, before they are scaled."""

    prompt: Sequence[int]
    shared: int
    output: int
    idle: float


def turns_of(session: Session, number: str, tokens: int, most: int) -> list[Turn]:
    """The last turns of a session, at most so many, all lengths divided by ``tokens``; ``number``
    draws the tokens."""
    chance, ids, found = random.Random(f"{SEED}/{number}"), list[int](), list[Turn]()
    before = None
    for turn in session[-most:]:
        del ids[min(len(ids), turn.shared // tokens) :]
        shared = len(ids)
        ids += [chance.randrange(VOCABULARY) for _ in range(turn.prompt // tokens - shared)]
        idle = 0.0 if before is None else min(LONGEST_IDLE_S, turn.time - before.answered)
        output = max(1, turn.output // tokens)
        found.append(Turn((*ids, chance.randrange(VOCABULARY)), shared, output, max(0.0, idle)))
        before = turn
    return found


def sessions_of(given: Any) -> Sequence[Session]:
    """Sessions with small windows: ``--sessions`` of the trace if there is one, or generated."""
    sessions = generated(given.sessions, SEED)
    if given.trace is not None:
        read = [session for session in agent_sessions(given.trace) if session]
        chosen = np.random.default_rng(SEED).permutation(len(read))[: given.sessions]
        sessions = [read[place] for place in chosen]
    return [one for one in sessions if max(turn.prompt for turn in one) <= WINDOW]


async def _talk(client: StreamingClient, turns: Sequence[Turn], speed: float) -> list[Row]:
    rows: list[Row] = []
    await asyncio.sleep(random.Random(f"{turns[0].prompt}").uniform(0, BEGIN_S / speed))
    for place, turn in enumerate(turns):
        await asyncio.sleep(turn.idle / speed)
        reply = await client.generate(turn.prompt, turn.output)
        history = turn.shared // PAGE_SIZE * PAGE_SIZE
        if place and history:
            cached = reply.cached
            rows.append(
                {
                    "idle_s": turn.idle,
                    "history": history,
                    "in_memory": cached.device + cached.host >= 0.95 * history,
                    "from_l3": cached.storage,
                    "first_ms": 1e3 * reply.ttft_s,
                    "said": reply.output_ids,
                }
            )
    return rows


async def _serve(url: str, sessions: Sequence[Sequence[Turn]], speed: float) -> list[Row]:
    async with StreamingClient(url, ADMIN_KEY) as client:
        told = await asyncio.gather(*(_talk(client, turns, speed) for turns in sessions))
    return [row for rows in told for row in rows]


def summary(way: str, turns: Sequence[Row], kept: Sequence[Row]) -> Row:
    """Of the turns that were idle for more than ten seconds; ``kept``: those of the same sessions
    where everything is kept."""
    idle = [turn for turn in turns if turn["idle_s"] > IDLE_S]
    first = sorted(turn["first_ms"] for turn in idle)
    return {
        "way": WAYS[way][0],
        "turns": len(turns),
        "idle": len(idle),
        "in_memory": sum(turn["in_memory"] for turn in idle) / len(idle),
        "from_l3": sum(turn["from_l3"] for turn in idle) / sum(turn["history"] for turn in idle),
        "first_ms": median(first),
        "first_p90_ms": first[math.ceil(0.9 * len(first)) - 1],
        "mean_ms": fmean(turn["first_ms"] for turn in idle),
        "all_mean_ms": fmean(turn["first_ms"] for turn in turns),
        "other_replies": sum(a["said"] != b["said"] for a, b in zip(turns, kept, strict=True)),
    }


def measure(run: Run) -> Results:
    given = run.given
    small = sessions_of(given)
    rounds = [
        [turns_of(one, f"{number}/{n}", given.tokens, given.turns) for n, one in enumerate(small)]
        for number in range(given.rounds)
    ]
    sessions = rounds[0]
    longest = max(len(turn.prompt) + turn.output for turns in sessions for turn in turns)
    histories = sum(max(len(turn.prompt) for turn in turns) for turns in sessions)
    pool = math.ceil(max(1.25 * longest, histories / 8) / PAGE_SIZE) * PAGE_SIZE
    told: dict[str, list[Row]] = {way: [] for way in WAYS}
    spent = dict.fromkeys(WAYS, 0.0)
    with scratch() as scratched, ExitStack() as stack, steps(len(WAYS) * given.rounds) as advance:
        folder, servers = Path(scratched), dict[str, Restorer]()
        model = given.model_path or SMALL.build(folder)
        for way, (_, name) in WAYS.items():
            options = server_options(
                *(METHODS[name], run.machine, model, folder / way),
                pool_tokens=pool if way != "all" else 2 * histories + 2 * longest,
                hicache_ratio=2.0,
                # The others' weights and pools count as used.
                extra_args=("--mem-fraction-static", "0.5", *given.server_args),
            )
            servers[way] = stack.enter_context(resting(options, folder / way / "l3"))
        for number, turns in enumerate(rounds):
            for way in random.Random(number).sample([*WAYS], len(WAYS)):
                advance(f"round {number}, {WAYS[way][0]}")
                one = servers[way]
                with one.turn():
                    before = one.cpu_seconds()
                    told[way] += asyncio.run(_serve(one.server.url, turns, given.speed))
                    spent[way] += one.cpu_seconds() - before
                    one.server.flush_cache(300)
    rows = [{**summary(way, told[way], told["all"]), "cpu_s": spent[way]} for way in WAYS]
    each = {
        WAYS[way][0]: [{k: v for k, v in turn.items() if k != "said"} for turn in all_]
        for way, all_ in told.items()
    }
    facts = {"sessions": len(sessions), "histories": histories, "pool": pool}
    return {**facts, "tokens": given.tokens, "speed": given.speed, "rows": rows, "turns": each}


def finding(results: Results) -> str:
    first = {row["way"]: row["mean_ms"] for row in results["rows"]}
    host, l3 = (first[WAYS[way][0]] for way in ("host", "l3"))
    return f"Agents that come back wait {l3:.0f} ms with L3, {host:.0f} ms without, in the mean"


def missed(results: Results) -> list[str]:
    replies = sum(row["other_replies"] for row in results["rows"])
    return [f"{replies} replies differ from those of a server that keeps all"] * bool(replies)


PROGRAM = Program(
    name="returns",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--sessions", at_least(1), 20, "sessions, generated or of the trace"),
        Setting("--trace", Path, None, "a file of sessions, see bench/workload/agents.py"),
        *MODEL,
        Setting("--turns", at_least(2), 8, "of a session, the last ones"),
        Setting("--tokens", at_least(1), 128, "divides lengths"),
        Setting("--speed", at_least(1.0), 10.0, "divides idle times"),
        Setting("--rounds", at_least(1), 3, "of all sessions on each server"),
    ),
    tables=Table(
        "rows",
        [
            Column("histories are kept by", "way"),
            "turns",
            "idle for more than 10 s = idle",
            "of these, in memory = in_memory :.0%",
            "tokens from L3 = from_l3 :.0%",
            "first token, ms = first_ms :.0f",
            "90%, ms = first_p90_ms :.0f",
            "mean = mean_ms :.0f",
            "all turns, mean = all_mean_ms :.0f",
            "CPU s = cpu_s :.0f",
            "other replies = other_replies",
        ],
    ),
    draw=Picture(
        title=finding,
        panels=lambda results: {f"{results['sessions']} sessions": results["rows"]},
        x="way",
        x_label="histories are kept by",
        y_label="first token of turns idle for more than 10 s, ms",
        series=(
            Series("mean", "mean_ms", "ours"),
            Series("median", "first_ms", "computed"),
            Series("90%", "first_p90_ms", "file"),
        ),
        bars="%.0f",
    ),
    wrong=missed,
)

if __name__ == "__main__":
    PROGRAM.run()
