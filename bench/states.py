"""Which recurrent states of agents' sessions should L3 keep?

A state of Qwen3-Next takes 75.5 MB, as much as its K and V of 3,072 tokens. A hit can only end
where there is a state. SGLang makes one at the end of each chunk of a prefill, of each prompt and
of each reply. The program counts what a store writes, and which part of the prompts it then brings
back, if it keeps a state only so many tokens behind the one before in its sequence. Nothing is
evicted, and every turn asks L3.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.harness.program import Program, Run, Setting, at_least
from bench.harness.report import Column, Picture, Results, Row, Series, Table
from bench.workload.agents import Session, agent_sessions, generated

SEED, GRID, CHUNK = 1, 64, 8192  # tokens
STATE_MB, TOKEN_MB = 75.5, 24_576 / 1e6
APART = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)


def kept(sessions: Sequence[Session], apart: int, *, chunks: bool = True) -> Row:
    """Tokens, states and bytes of all ``sessions``, with states at least ``apart`` tokens apart;
    without those of ``chunks`` only ends of prompts and replies have one."""
    prompts = found = tokens = states = turns = 0
    for session in sessions:
        places: list[int] = []
        before, reply = 0, 0
        for turn in session:
            whole = turn.shared >= before // GRID * GRID  # nothing of the last prompt was left out
            there = min(turn.prompt - 1, before + reply if whole and before else turn.shared)
            places = [place for place in places if place <= there]
            hit = max(places, default=0)
            ends = [turn.prompt, turn.prompt + turn.output]
            if chunks:
                ends += range(hit + CHUNK, turn.prompt, CHUNK)
            for end in sorted(end // GRID * GRID for end in ends):
                if not places or end - max(places) >= max(apart, 1):
                    places.append(end)
                    states += 1
            prompts, found, turns = prompts + turn.prompt, found + hit, turns + 1
            tokens += turn.prompt + turn.output - there
            before, reply = turn.prompt, turn.output
    state_mb, kv_mb = states * STATE_MB / turns, tokens * TOKEN_MB / turns
    return {
        "apart": apart,
        "chunks": chunks,
        "found": found / prompts,
        "computed": (prompts - found) / turns,
        "states": states / turns,
        "state_mb": state_mb,
        "written_mb": state_mb + kv_mb,
        "share": state_mb / (state_mb + kv_mb),
    }


def measure(run: Run) -> Results:
    """Every distance, and every state without those of chunks, for both workloads."""
    given = run.given
    workloads = {"generated": generated(given.sessions, SEED)}
    if given.trace:
        workloads["trace"] = agent_sessions(given.trace)
    rows: list[Row] = []
    for name, sessions in workloads.items():
        found = [kept(sessions, 0, chunks=False), *(kept(sessions, apart) for apart in APART)]
        rows += [{"workload": name, **row} for row in found]
    return {"rows": rows}


def rows_of(results: Results) -> list[Row]:
    return [{**row, "which": which_of(row)} for row in results["rows"]]


def which_of(row: Row) -> str:
    if row["apart"]:
        return f"{row['apart']:,} tokens apart"
    return "each" if row["chunks"] else "each, not of chunks"


def finding(results: Results) -> str:
    rows = {row["apart"]: row for row in results["rows"] if row["chunks"]}  # of the last workload
    bytes_left = rows[1024]["written_mb"] / rows[0]["written_mb"]
    more = rows[0]["found"] - rows[1024]["found"]
    return (
        f"States 1,024 tokens apart: {bytes_left:.2f} of the bytes, {more:.1%} fewer tokens found"
    )


def panels(results: Results) -> dict[str, list[Row]]:
    shown: dict[str, list[Row]] = {}
    for row in results["rows"]:
        if row["chunks"]:
            shown.setdefault(row["workload"], []).append(row)
    return shown


PROGRAM = Program(
    name="states",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("--sessions", at_least(1), 152, "generated sessions"),
        Setting("--trace", Path, None, "a file of sessions, see bench/workload/agents.py"),
    ),
    tables=Table(
        rows_of,
        [
            "workload",
            Column("states kept", "which"),
            "states a turn = states :.2f",
            "MB written a turn = written_mb :.0f",
            "of these, states = share :.0%",
            "of prompts, found = found :.3f",
            "tokens computed a turn = computed :.0f",
        ],
    ),
    draw=Picture(
        title=finding,
        panels=panels,
        x="written_mb",
        x_label="MB written a turn",
        y_label="tokens of prompts found, of all",
        series=(Series("states at least so far apart", "found", "ours", "o-"),),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
