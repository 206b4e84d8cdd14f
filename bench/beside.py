"""Front pages that are recomputed while L3 is read from the back, beside each of both alone.

SGLang serves a random Llama with grouped-query attention on the CPU. A history is in L3 and nowhere
else, and a question behind it is asked, over an L3 that brings the whole history 0.25 to 4 times as
fast as it is computed. Three servers take turns in changing order, the others stopped meanwhile:
one computes everything, one restores from L3 while L3 is being read ("L3 alone": option
``recompute: never``), and one has default options.

A time is that to the first token. It is compared with the other servers' of the same round: the
table has medians of the ratios, and intervals that hold the true ones with 95%. The floor is the
time of a restore whose processor and L3 are busy from start to end, with the question behind it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness.machine import Machine, MachineError
from bench.harness.methods import EVERY_HIT, METHODS, PAGE_SIZE, Method
from bench.harness.models import TinyLlama, narrowed
from bench.harness.program import Advance, Program, Run, Setting, at_least, scratch, several, steps
from bench.harness.report import Picture, Results, Row, Series, Table, by, times
from bench.harness.rounds import median_interval
from bench.harness.turns import NO_L3, Answer, Turns, differing, taking_turns
from hcache_backend.plan.restore import side_by_side

_LAYERS_2K = 12
ALONE, BOTH = "alone", "both"
TITLES = {NO_L3: "computed", ALONE: "L3 alone", BOTH: "both"}
CHOSEN_TOKENS = 2048


METHODS_COMPARED = {
    NO_L3: METHODS["host"],
    ALONE: Method(ALONE, storage="dynamic", hcache={"recompute": "never", **EVERY_HIT}),
    BOTH: Method(BOTH, storage="dynamic"),
}


def shape(tokens: int) -> TinyLlama:
    """A model that computes a history in seconds, and takes next to nothing for a question."""
    layers, hidden = max(2, _LAYERS_2K * 2048 // tokens), narrowed(512, tokens)
    return TinyLlama(layers, hidden, 4, kv_heads=2, intermediate=hidden * 11 // 4, positions=65536)


def at_length(
    machine: Machine, tokens: int, speeds: Sequence[float], rounds: int, advance: Advance
) -> list[dict[str, Any]]:
    """A row of results for each speed of L3; the servers are the same.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    with scratch() as folder:
        advance(f"{tokens:,} tokens: starting servers")
        model = shape(tokens).build(Path(folder))
        with taking_turns(machine, model, METHODS_COMPARED, tokens) as turns:
            question = turns.seconds_of_question(NO_L3)
            # The fastest first: that L3 became faster servers notice only in time.
            ordered = sorted(speeds, reverse=True)
            return [at_speed(turns, speed, question, rounds, advance) for speed in ordered]


def at_speed(
    turns: Turns, speed: float, question: float, rounds: int, advance: Advance
) -> dict[str, Any]:
    """A row: times to the first token of every server, and how they compare.

    Args:
        question: Seconds of a question alone.
    """
    rate = turns.slow_down(speed, ALONE)
    turns.ask(BOTH, turns.new_question())  # it gets to know how fast L3 is now
    found: list[dict[str, Answer]] = []
    for number in range(rounds + 1):
        advance(f"{turns.tokens:,} tokens, L3 {speed:g} times as fast, round {number}")
        found.append(turns.round(list(TITLES), number))
    # The first round is for that, too: a server believes two requests in a row.
    seconds = {name: [answers[name].seconds for answers in found[1:]] for name in TITLES}
    return {
        "tokens": turns.tokens,
        "model": shape(turns.tokens).describe(),
        "speed": speed,
        "mb_per_s": rate / 1e6,
        "question_ms": 1e3 * question,
        "rounds_ms": {name: [round(1e3 * s, 1) for s in all_] for name, all_ in seconds.items()},
        "share_from_l3": {name: min(answers[name].share for answers in found) for name in TITLES},
        "differing_replies": sum(map(differing, found)),
        **compared(seconds, speed, question),
    }


def compared(
    seconds: Mapping[str, Sequence[float]], speed: float, question: float
) -> dict[str, Any]:
    """Medians, and ratios of ``both`` to others of the same round, with their intervals."""
    floors = [question + side_by_side(one - question, one / speed) for one in seconds[NO_L3]]
    best = min((NO_L3, ALONE), key=lambda name: median(seconds[name]))
    others = {"of_alone": seconds[ALONE], "of_best": seconds[best], "of_floor": floors}
    found: dict[str, Any] = {"ms": {name: 1e3 * median(all_) for name, all_ in seconds.items()}}
    for name, other in others.items():
        ratios = [mine / its for mine, its in zip(seconds[BOTH], other, strict=True)]
        found[name] = median(ratios)
        found[f"{name}_interval"] = median_interval(ratios)
    return found


def kept_rows(path: Path, tokens: Sequence[int], device: str) -> list[dict[str, Any]]:
    """Rows of earlier results but those of ``tokens``; each has the date of its measurement.

    Raises:
        MachineError: They were measured on another device.
    """
    earlier = json.loads(path.read_text())
    if earlier["device"] != device:
        raise MachineError(f"{path} was measured on {earlier['device']}, this is {device}")
    rows = [row for row in earlier["rows"] if row["tokens"] not in tokens]
    return [{"date": earlier["date"], **row} for row in rows]


def of_computing(results: Results) -> Iterator[Row]:
    """Rows with times as shares of that of computing."""
    for row in results["rows"]:
        one = row["ms"][NO_L3]
        shares = {name: ms / one for name, ms in row["ms"].items()}
        yield {**row, "of_computing": {**shares, "floor": shares[BOTH] / row["of_floor"]}}


def finding(results: Results) -> str:
    """Of the model with most layers at the speed nearest to computing."""
    row = max(results["rows"], key=lambda row: (_layers(row), -abs(log2(row["speed"]))))
    return (
        f"Reading and recomputing at once takes {row['of_best']:.2f} of the time of the better "
        f"one (L3 {times(row['speed'])} as fast as computing, {_layers(row)} layers)"
    )


def _layers(row: Row) -> int:
    return int(row["model"]["layers"])


def measure(run: Run) -> Results:
    given, machine = run.given, run.machine
    torch.set_num_threads(1)
    histories = [tokens // PAGE_SIZE * PAGE_SIZE for tokens in given.tokens]
    rows = kept_rows(given.keep, histories, machine.name) if given.keep else []
    with steps(len(given.tokens) * (1 + len(given.speeds) * (1 + given.rounds))) as advance:
        for tokens in histories:
            rows += at_length(machine, tokens, given.speeds, given.rounds, advance)
    return {"rows": sorted(rows, key=lambda row: int(row["tokens"]))}


_TIMES = (
    "speed of L3 = speed :g",
    *(f"{title}, ms = ms.{name} :,.0f" for name, title in TITLES.items()),
)
_OF_BEST = "both / the better one = of_best | 95% = of_best_interval"
PROGRAM = Program(
    name="beside",
    doc=__doc__,
    measure=measure,
    slows=True,
    settings=(
        several("--tokens", at_least(PAGE_SIZE), [2048, 8192], "histories"),
        several("--speeds", float, [0.25, 0.5, 1.0, 2.0, 4.0], "of L3; 1: as fast as computing"),
        Setting("--rounds", at_least(1), 7, "requests to each server and speed"),
        Setting("--keep", Path, None, "JSON whose rows of other histories stay as they are"),
    ),
    tables={
        "table": Table(
            "rows",
            (
                *("tokens = tokens :,", *_TIMES),
                *("both / L3 alone = of_alone | 95% = of_alone_interval", _OF_BEST),
                "both / the floor = of_floor | 95% = of_floor_interval",
            ),
        ),
        "chosen": Table(
            lambda results: [r for r in results["rows"] if r["tokens"] == CHOSEN_TOKENS],
            (*_TIMES, _OF_BEST),
        ),
    },
    draw=Picture(
        title=finding,
        panels=by(lambda r: f"{r['tokens']:,} tokens, {_layers(r)} layers", of_computing),
        x="speed",
        x_label="speed of L3, of computing",
        y_label="time to the first token, of computing",
        series=(
            Series(TITLES[ALONE], f"of_computing.{ALONE}", "ours, all read", ".--"),
            Series(TITLES[BOTH], f"of_computing.{BOTH}", "ours"),
            Series("floor", "of_computing.floor", "limit", ":"),
        ),
        ratios="xy",
        at=(1, TITLES[NO_L3], "computed"),
    ),
    wrong=lambda results: [
        f"{row['tokens']:,} tokens, speed {row['speed']:g}: replies differ"
        for row in results["rows"]
        if row["differing_replies"]
    ],
)

if __name__ == "__main__":
    PROGRAM.run()
