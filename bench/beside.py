"""Front pages that are recomputed while L3 is read from the back, beside each of both alone.

SGLang serves a random Llama with grouped-query attention on the CPU. A history is in L3 and nowhere
else, and a question behind it is asked, over an L3 that brings the whole history 0.25 to 4 times as
fast as it is computed. Three servers take turns in changing order, the others stopped meanwhile:
one computes everything, one restores from L3 while L3 is being read ("L3 alone": option
``recompute: never``), and one does as servers do by default.

A time is that to the first token. It is compared with the other servers' of the same round: the
table has medians of the ratios, and intervals that hold the true ones with 95%. The floor is what
restores would take whose processor and L3 are busy from start to end; then comes the question.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import log2
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import METHODS, PAGE_SIZE, Method
from bench.harness.models import TinyLlama, narrowed
from bench.harness.program import at_least, failing, parser, stamp, steps
from bench.harness.report import COLOURS, OUT, markdown, picture, ratio_axis, times, write
from bench.harness.turns import NO_L3, Answer, Turns, taking_turns
from bench.pages import LEAST_ROUNDS, median_interval
from hcache_backend.partition.costs import side_by_side

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYERS_2K = 12
ALONE, BOTH = "alone", "both"
TITLES = {NO_L3: "computed", ALONE: "L3 alone", BOTH: "both"}
CHOSEN_TOKENS = 2048


METHODS_COMPARED = {
    NO_L3: METHODS["host"],
    ALONE: Method(ALONE, storage="dynamic", hcache={"mode": "kv", "recompute": "never"}),
    BOTH: Method(BOTH, storage="dynamic", hcache={"mode": "kv", "min_gain": 1.0}),
}


def shape(tokens: int) -> TinyLlama:
    """A model that computes a history in seconds, and takes next to nothing for a question."""
    layers, hidden = max(2, _LAYERS_2K * 2048 // tokens), narrowed(512, tokens)
    return TinyLlama(layers, hidden, 4, kv_heads=2, intermediate=hidden * 11 // 4, positions=65536)


def at_length(
    machine: Machine,
    tokens: int,
    speeds: Sequence[float],
    rounds: int,
    advance: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row of results for each speed of L3; the servers are the same.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as folder:
        advance(f"{tokens:,} tokens: starting servers")
        model = shape(tokens).build(Path(folder))
        with taking_turns(machine, model, METHODS_COMPARED, tokens) as turns:
            question = turns.seconds_of_question(NO_L3)
            # The fastest first: that L3 became faster servers notice only in time.
            ordered = sorted(speeds, reverse=True)
            return [at_speed(turns, speed, question, rounds, advance) for speed in ordered]


def at_speed(
    turns: Turns, speed: float, question: float, rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds to the first token of every server, round by round, and what they are compared to.

    The ``question`` alone takes so many.
    """
    found: dict[str, list[Answer]] = {name: [] for name in TITLES}
    rate = turns.slow_down(speed, ALONE)
    turns.ask(BOTH, turns.new_question())  # it gets to know how fast L3 is now
    for number in range(rounds + 1):
        advance(f"{turns.tokens:,} tokens, L3 {speed:g} times as fast, round {number}")
        prompt = turns.new_question()
        for name in random.Random(number).sample(list(found), len(found)):
            found[name].append(turns.ask(name, prompt))
    # The first one is for that, too: two in a row are believed.
    seconds = {name: [each.seconds for each in all_[1:]] for name, all_ in found.items()}
    return {
        "tokens": turns.tokens,
        "model": shape(turns.tokens).describe(),
        "speed": speed,
        "mb_per_s": rate / 1e6,
        "question_ms": 1e3 * question,
        "rounds_ms": {name: [round(1e3 * s, 1) for s in all_] for name, all_ in seconds.items()},
        "share_from_l3": {
            name: min(answer.share for answer in all_) for name, all_ in found.items()
        },
        "differing_replies": sum(
            len({answer.output_ids for answer in answers}) - 1
            for answers in zip(*found.values(), strict=True)
        ),
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
        enough = len(ratios) >= LEAST_ROUNDS
        found[f"{name}_interval"] = median_interval(ratios) if enough else None
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


def table_lines(results: Mapping[str, Any]) -> str:
    """A row for each history and speed of L3."""
    ratios = {"of_alone": "L3 alone", "of_best": "the better one", "of_floor": "the floor"}
    heads = ["tokens", "speed of L3", *(f"{title}, ms" for title in TITLES.values())]
    for title in ratios.values():
        heads += [f"both / {title}", "95%"]
    rows = []
    for row in results["rows"]:
        cells: list[object] = [f"{row['tokens']:,}", f"{row['speed']:g}"]
        cells += [f"{row['ms'][name]:,.0f}" for name in TITLES]
        for name in ratios:
            ends = row[f"{name}_interval"]
            cells += [row[name], tuple(ends) if ends else None]
        rows.append(cells)
    return markdown(heads, rows)


def chosen_lines(results: Mapping[str, Any]) -> str:
    """The rows of the model with most layers."""
    rows = [
        (
            f"{row['speed']:g}",
            *(f"{row['ms'][name]:,.0f}" for name in TITLES),
            row["of_best"],
            tuple(row["of_best_interval"]),
        )
        for row in results["rows"]
        if row["tokens"] == CHOSEN_TOKENS
    ]
    heads = ("speed of L3", *(f"{title}, ms" for title in TITLES.values()))
    return markdown((*heads, "both / the better one", "95%"), rows)


def draw(results: Mapping[str, Any]) -> Figure:
    """Time to the first token by the speed of L3, a panel for each history."""
    rows_of: dict[int, list[Mapping[str, Any]]] = {}
    for row in results["rows"]:
        rows_of.setdefault(row["tokens"], []).append(row)
    deepest = max(results["rows"], key=_nearest)
    figure = picture(
        f"Reading and recomputing at once takes {deepest['of_best']:.2f} of the time of the better "
        f"one (L3 {times(deepest['speed'])} as fast as computing, {_layers(deepest)} layers)"
    )
    panels = figure.subplots(1, len(rows_of), sharey=True, squeeze=False)[0]
    heights: list[float] = []
    for axes, (tokens, rows) in zip(panels, rows_of.items(), strict=True):
        rows.sort(key=lambda row: float(row["speed"]))
        speeds = [row["speed"] for row in rows]
        axes.axhline(1, color=COLOURS["computed"], label=TITLES[NO_L3])
        for name, style, colour in ((ALONE, ".--", "ours, all read"), (BOTH, "o-", "ours")):
            share = [row["ms"][name] / row["ms"][NO_L3] for row in rows]
            axes.plot(speeds, share, style, color=COLOURS[colour], label=TITLES[name])
            heights += share
        floor = [row["ms"][BOTH] / row["of_floor"] / row["ms"][NO_L3] for row in rows]
        axes.plot(speeds, floor, ":", color=COLOURS["limit"], label="floor")
        ratio_axis(axes, "x", speeds)
        axes.set_title(f"{tokens:,} tokens, {_layers(rows[0])} layers", fontsize=10)
        axes.set_xlabel("speed of L3, of computing", fontsize=10)
        axes.grid(alpha=0.3)
    ratio_axis(panels[0], "y", heights)
    panels[0].set_ylabel("time to the first token, of computing", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=10
    )
    return figure


def _layers(row: Mapping[str, Any]) -> int:
    return int(row["model"]["layers"])


def _nearest(row: Mapping[str, Any]) -> tuple[int, float]:
    """Orders rows by layers, then by how near L3 and computing are to each other."""
    return _layers(row), -abs(log2(row["speed"]))


def main() -> int:
    """Returns 1 if a reply differs from that of another server."""
    parsed = parser("bench.beside", __doc__)
    add = parsed.add_argument
    add("--tokens", type=at_least(PAGE_SIZE), nargs="+", default=[2048, 8192], help="histories")
    speeds = [0.25, 0.5, 1.0, 2.0, 4.0]
    add("--speeds", type=float, nargs="+", default=speeds, help="of L3; 1: as fast as computing")
    add("--rounds", type=at_least(1), default=7, help="requests to each server and speed")
    add("--out", type=Path, default=OUT, help="folder for beside.json and beside.png")
    add("--keep", type=Path, metavar="FILE", help="rows of other histories stay as in this JSON")
    given = parsed.parse_args()
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("only the CPU engine slows L3 down; see bench/gpu/ for GPUs")
        torch.set_num_threads(1)
        histories = [tokens // PAGE_SIZE * PAGE_SIZE for tokens in given.tokens]
        rows = kept_rows(given.keep, histories, machine.name) if given.keep else []
        total = len(given.tokens) * (1 + len(given.speeds) * (1 + given.rounds))
        with steps(total) as (_, advance):
            for tokens in histories:
                rows += at_length(machine, tokens, given.speeds, given.rounds, advance)
    results = {
        **stamp(machine),
        "cores": os.cpu_count(),
        "rows": sorted(rows, key=lambda row: int(row["tokens"])),
    }
    print(table_lines(results))
    write(given.out, "beside", results, draw)
    return min(1, sum(row["differing_replies"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
