"""Which recurrent states of agents' sessions should L3 keep?

A state of Qwen3-Next takes 75.5 MB, as much as its K and V of 3,072 tokens. A hit can only end
where there is a state. SGLang makes one at the end of each chunk of a prefill, of each prompt and
of each reply. The program counts what a store writes, and which part of the prompts it then brings
back, if it keeps a state only so many tokens behind the one before in its sequence. Nothing is
evicted, and every turn asks L3. "Replayed": instead of the states that are left out the store keeps
the inputs of the recurrent layers behind the last state, 0.147 MB a token.

Then the store is bounded, and has states 1,024 tokens apart. A hit uses its pages and either all
states in them or the last one. What was used least recently goes first, of pages the end.
"""

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from bench.agents import session_settings
from bench.harness.program import Program, Run
from bench.harness.report import Column, Picture, Results, Row, Series, Table, by
from bench.workload.agents import AgentTurn, Session, agent_sessions, generated

SEED, GRID, CHUNK = 1, 64, 8192  # tokens
STATE_MB, TOKEN_MB = 75.5, 24_576 / 1e6
INPUT_MB = 36 * 2048 * 2 / 1e6  # of a token: 36 layers, 2,048 values of bfloat16
APART = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768)
DEFAULT, REPLAYED = 1024, 512  # tokens
ROOMS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # of a store, in all bytes that are ever written
SPAN_S = 4 * 3600.0  # sessions begin within it


def kept(
    sessions: Sequence[Session], apart: int, *, chunks: bool = True, replayed: bool = False
) -> Row:
    """Tokens, states and bytes of all ``sessions``, with states at least ``apart`` tokens apart;
    without those of ``chunks`` only ends of prompts and replies have one."""
    prompts = found = tokens = states = inputs = turns = 0
    for session in sessions:
        places: list[int] = []
        covered: list[int] = []  # ends that can be replayed, or have a state
        before, reply = 0, 0
        for turn in session:
            there = known(turn, before, reply)
            places = [place for place in places if place <= there]
            covered = [place for place in covered if place <= there]
            hit = max(covered if replayed else places, default=0)
            ends = [turn.prompt, turn.prompt + turn.output]
            if chunks:
                ends += range(hit + CHUNK, turn.prompt, CHUNK)
            for end in sorted(end // GRID * GRID for end in ends):
                if not places or end - max(places) >= max(apart, 1):
                    places.append(end)
                    states += 1
                elif replayed:
                    inputs += max(0, end - max(covered))
                covered.append(end)
            prompts, found, turns = prompts + turn.prompt, found + hit, turns + 1
            tokens += turn.prompt + turn.output - there
            before, reply = turn.prompt, turn.output
    state_mb = (states * STATE_MB + inputs * INPUT_MB) / turns
    kv_mb = tokens * TOKEN_MB / turns
    return {
        "apart": apart,
        "chunks": chunks,
        "replayed": replayed,
        "found": found / prompts,
        "computed": (prompts - found) / turns,
        "states": states / turns,
        "state_mb": state_mb,
        "written_mb": state_mb + kv_mb,
        "share": state_mb / (state_mb + kv_mb),
    }


def known(turn: AgentTurn, before: int, reply: int) -> int:
    """Tokens of a prompt that a store without bounds has K and V of: those of the prompt before it,
    and of its reply if nothing of that prompt was left out."""
    whole = before and turn.shared >= before // GRID * GRID
    return min(turn.prompt - 1, before + reply if whole else turn.shared)


def bounded(sessions: Sequence[Session], room_mb: float, *, last: bool) -> tuple[float, float]:
    """Share of the prompts' tokens that a store finds, and the MB that were written to it. A hit
    uses the ``last`` state of its pages, or all."""
    starts = np.random.default_rng([SEED, 5]).uniform(0, SPAN_S, len(sessions))
    turns = sorted(
        (float(start) + turn.time, number, place)
        for number, (start, session) in enumerate(zip(starts, sessions, strict=True))
        for place, turn in enumerate(session)
    )
    pages, used = [0] * len(sessions), [0.0] * len(sessions)  # tokens, time of the last use
    states: list[dict[int, float]] = [{} for _ in sessions]  # by place, with times of last uses
    goes: list[tuple[float, int, int]] = []  # what may go next: time, session, a state's place or 0
    here = written = 0.0
    found = prompts = 0
    for now, number, place in turns:
        turn, own = sessions[number][place], states[number]
        before = sessions[number][place - 1] if place else None
        there = min(pages[number], known(turn, *(before[1::2] if before else (0, 0))))
        here -= (pages[number] - there) * TOKEN_MB  # branches that end go at once
        for end in [end for end in own if end > there]:
            here -= STATE_MB
            del own[end]
        hit = max(own, default=0)
        prompts, found = prompts + turn.prompt, found + hit
        own |= dict.fromkeys([hit] * bool(hit) if last else own, now)
        new = (turn.prompt + turn.output - there) * TOKEN_MB
        ends = turn.prompt, turn.prompt + turn.output, *range(hit + CHUNK, turn.prompt, CHUNK)
        for end in sorted(end // GRID * GRID for end in ends):
            if not any(end - DEFAULT < other <= end for other in own):
                own[end], new = now, new + STATE_MB
        pages[number], used[number] = turn.prompt + turn.output, now
        here, written = here + new, written + new
        for end in (0, *(end for end, time in own.items() if last and time == now)):
            heappush(goes, (now, number, end))
        while here > room_mb:
            time, oldest, end = heappop(goes)
            own = states[oldest]
            if end:
                if own.get(end) == time < used[oldest]:
                    here -= STATE_MB
                    del own[end]
            elif time == used[oldest] and pages[oldest]:
                heappush(goes, (time, oldest, 0))
                end = max(own, default=0)
                if end == pages[oldest]:
                    here -= STATE_MB
                    del own[end]
                    end = max(own, default=0)
                here -= (pages[oldest] - end) * TOKEN_MB
                pages[oldest] = end
    return found / prompts, written


def measure(run: Run) -> Results:
    """Every distance, and every state without those of chunks, and bounds, for both workloads."""
    given = run.given
    workloads = {"generated": generated(given.sessions, SEED)}
    if given.trace:
        workloads["trace"] = agent_sessions(given.trace)
    rows, bounds = list[Row](), list[Row]()
    for name, sessions in workloads.items():
        found = [kept(sessions, 0, chunks=False), *(kept(sessions, apart) for apart in APART)]
        found.insert(3, kept(sessions, REPLAYED, replayed=True))
        rows += [{"workload": name, **row} for row in found]
        _, whole = bounded(sessions, math.inf, last=False)
        for room in ROOMS:
            of_all, _ = bounded(sessions, room * whole, last=False)
            of_last, _ = bounded(sessions, room * whole, last=True)
            row = {"workload": name, "room": room, "gb": room * whole / 1e3}
            bounds.append(row | {"all": of_all, "last": of_last})
    return {"rows": rows, "bounds": bounds}


def rows_of(results: Results) -> list[Row]:
    return [{**row, "which": which_of(row)} for row in results["rows"]]


def which_of(row: Row) -> str:
    if row["apart"]:
        return f"{row['apart']:,} tokens apart" + ", others replayed" * row["replayed"]
    return "each" if row["chunks"] else "each, not of chunks"


def finding(results: Results) -> str:
    rows = {row["apart"]: row for row in results["rows"] if _shown(row)}  # of the last workload
    bytes_left = rows[1024]["written_mb"] / rows[0]["written_mb"]
    more = rows[0]["found"] - rows[1024]["found"]
    return (
        f"States 1,024 tokens apart: {bytes_left:.2f} of the bytes, {more:.1%} fewer tokens found"
    )


def _shown(row: Row) -> bool:
    return bool(row["chunks"] and not row["replayed"])


KEPT = Table(
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
)
BOUNDED = Table(
    "bounds",
    [
        "workload",
        "room, of all bytes = room :.0%",
        "GB = gb :,.0f",
        "found, a hit uses all its states = all :.3f",
        "found, it uses the last one = last :.3f",
    ],
)
PROGRAM = Program(
    name="states",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=session_settings(152),
    tables={"table": (KEPT, BOUNDED), "kept": KEPT, "bounds": BOUNDED},
    draw=Picture(
        title=finding,
        panels=by("workload", lambda results: filter(_shown, results["rows"])),
        x="written_mb",
        x_label="MB written a turn",
        y_label="tokens of prompts found, of all",
        series=(Series("states at least so far apart", "found", "ours", "o-"),),
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
