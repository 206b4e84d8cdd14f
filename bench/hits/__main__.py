"""The time to the first token when L3 is slower or faster than computing.

SGLang serves random models on the CPU. A history is in L3 and nowhere else, and a question behind
it is asked, over an L3 that brings the history 0.1 to 4 times as fast as it is computed: without
L3 (HiCache in host memory, which has nothing of it), with ours reading every hit, with ours and its
default options, and with SGLang's `file` and `nixl` backends. The servers take turns, the others
stopped meanwhile, and are compared round by round. The table has medians, and the median of the
differences between default options and the better one of the first two, with an interval that
holds the true one with 95%. L3 also stops while a history is being read, for five seconds and for
good.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.program import Program, Run, Setting, at_least, names, scratch, several, steps
from bench.harness.report import Column, Columns, Picture, Results, Row, Series, Table
from bench.harness.turns import NO_L3, Turns
from bench.hits.cases import ALWAYS, COMPARED, MODELS, OURS, WITH_FLAGS, title
from bench.hits.measure import at_speed, stalled

SHOWN_TOKENS, PANELS = 1024, 3
SHOWN_SPEEDS = (2, 1, 0.5, 0.1)
"""The models of longer histories have one layer: to recompute its K and V takes next to nothing."""


def measure(run: Run) -> Results:
    given, found = run.given, []
    torch.set_num_threads(1)
    total = len(given.models) * len(given.tokens) * (2 + len(given.speeds) * given.rounds)
    with steps(total) as advance, scratch() as folder:
        for kind in given.models:
            for tokens in given.tokens:
                advance(f"{kind}, {tokens:,} tokens: starting servers")
                model = (MODELS | WITH_FLAGS)[kind]
                with model.turns(run.machine, Path(folder), tokens, **model.methods()) as turns:
                    case = _case(turns, given.speeds, given.rounds, advance)
                stored = {"pages": model.pages, "codec": model.codec, "dtype": model.dtype}
                found.append({"model": kind, **stored, "tokens": tokens, **case})
    return {"cases": found}


def _case(
    turns: Turns, speeds: Sequence[float], rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Results of one model and one history."""
    advance("L3 stops")
    stalls = {
        "5 s, every hit read": stalled(turns, ALWAYS, 5.0),
        "5 s, default options": stalled(turns, OURS, 5.0),
        "for good, default options": stalled(turns, OURS, None),
    }
    # The fastest first: that L3 became slower is noticed by the next reads, faster only in time.
    points = [at_speed(turns, speed, rounds, advance) for speed in sorted(speeds, reverse=True)]
    return {
        "computing_ms": 1e3 * turns.computing,
        "bytes_per_token": {
            name: size / turns.tokens for name, size in turns.bytes.items() if size
        },
        "points": points,
        "stalled_ms": {name: 1e3 * seconds for name, seconds in stalls.items()},
    }


def points(results: Results) -> list[Row]:
    return [
        {**case, **point, "case": title(case)}
        for case in results["cases"]
        for point in case["points"]
    ]


def chosen(results: Results) -> list[Row]:
    """Points of MHA and GQA with 1,024 tokens, of some speeds."""
    return [
        row
        for row in points(results)
        if row["model"] in ("MHA", "GQA") and row["tokens"] == SHOWN_TOKENS
        if row["speed"] in SHOWN_SPEEDS
    ]


def all_columns(results: Results) -> Columns:
    measured = results["cases"][0]["points"][0]["ms"]
    times = (f"{COMPARED[name].title} = ms.{name} :,.0f" for name in measured)
    found = ("model, history = case | speed of L3 = speed :g", *times)
    return [*found, "default / better = of_better | 95% = interval"]


def stop_columns(results: Results) -> Columns:
    stops = results["cases"][0]["stalled_ms"]
    times = (f"{name} = stalled_ms.{name} :,.0f" for name in stops)
    return [Column("ms when L3 stops", title), "computing = computing_ms :,.0f", *times]


def stopped(results: Results) -> list[Row]:
    return [case for case in results["cases"] if case["stalled_ms"]]


def panels(results: Results) -> Mapping[str, Sequence[Row]]:
    """Points of each float32 model with 1,024 tokens, as shares of computing."""
    shown = [case for case in results["cases"] if case["tokens"] == SHOWN_TOKENS]
    return {
        f"{title(case)} tokens": [
            {**point, "of_computing": {n: ms / point["ms"][NO_L3] for n, ms in point["ms"].items()}}
            for point in case["points"]
        ]
        for case in (shown or results["cases"])[:PANELS]
    }


def finding(results: Results) -> str:
    ratios = [point["of_better"] for rows in panels(results).values() for point in rows]
    return (
        f"At any disk speed the first token takes {min(ratios):.2f} to {max(ratios):.2f} of the "
        "faster of reading and computing (L3 slowed down)"
    )


_COMPARED = (
    "model, history = case | speed of L3 = speed :g | MB/s = mb_per_s :.1f | "
    f"computed = ms.{NO_L3} :,.0f | `file` = ms.file :,.0f | ours = ms.{OURS} :,.0f | "
    "ours / better = of_better | 95% = interval"
)
PROGRAM = Program(
    name="hits",
    doc=__doc__,
    measure=measure,
    slows=True,
    settings=(
        Setting("--models", names([*MODELS, *WITH_FLAGS]), list(MODELS), "kinds of models"),
        several("--tokens", at_least(128), [1024, 4096], "histories"),
        several(
            "--speeds", float, [4.0, 2.0, 1.0, 0.5, 0.25, 0.1], "of L3; 1: as fast as computing"
        ),
        Setting("--rounds", at_least(1), 9, "requests to each server and speed"),
    ),
    tables={
        "table": (Table(points, all_columns), Table(stopped, stop_columns)),
        "chosen": Table(chosen, _COMPARED),
    },
    draw=Picture(
        title=finding,
        panels=panels,
        x="speed",
        x_label="speed of L3, of computing",
        y_label="time to the first token, of computing",
        series=(
            Series("SGLang file", "of_computing.file", "file", ".--"),
            Series("hcache, all read", f"of_computing.{ALWAYS}", "ours, all read", ".--"),
            Series("hcache, default options", f"of_computing.{OURS}", "ours"),
        ),
        ratios="xy",
        at=(1, "computed", "computed"),
    ),
    wrong=lambda results: [
        f"{row['case']}: replies differ" for row in points(results) if row["differing_replies"]
    ],
)

if __name__ == "__main__":
    PROGRAM.run()
