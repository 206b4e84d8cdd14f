"""Requests under load when L3 is faster or slower than computing.

SGLang serves random models on the CPU. Requests come at random, 1.2 times as fast as they could be
computed, each with a history of its own that is in L3 and nowhere else, over an L3 twice and half
as fast as computing. Without L3 (HiCache in host memory, which has nothing of it), with ours
reading every hit, and with ours and its default options: these servers take turns at the same
bursts, the others stopped meanwhile. Requests per second and the time to the first token (its mean
in a burst) are medians over bursts.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch

from bench.harness.machine import MachineError, find_machine
from bench.harness.program import at_least, failing, names, parser, stamp, steps
from bench.harness.report import COLOURS, OUT, markdown, picture, times, write
from bench.harness.restorer import Restorer
from bench.harness.turns import NO_L3, Turns, history, question
from bench.hits.cases import ALWAYS, COMPARED, MODELS, OURS
from bench.hits.measure import learn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OFFERED = 1.2
"""Requests come so many times as fast as they can be computed."""
SPEEDS = (2.0, 0.5)
"""Of L3; 1: as fast as computing."""
SERVERS = (NO_L3, ALWAYS, OURS)
BARS = {
    NO_L3: ("computed", COLOURS["computed"]),
    ALWAYS: ("hcache, all read", COLOURS["ours, all read"]),
    OURS: ("hcache, default options", COLOURS["ours"]),
}
"""Label and colour."""


def main() -> int:
    parsed = parser("bench.hits.load", __doc__)
    add = parsed.add_argument
    add("--models", type=names(list(MODELS)), default=list(MODELS), help="kinds of models")
    add("--tokens", type=at_least(128), default=1024, help="of a history")
    add("--requests", type=at_least(1), default=24, help="of a burst")
    add("--rounds", type=at_least(1), default=3, help="bursts to each server and speed")
    add("--out", type=Path, default=OUT, help="folder for hits_load.json and hits_load.png")
    given = parsed.parse_args()
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("this slows the CPU engine down; see bench/gpu/ for GPUs")
        torch.set_num_threads(1)
        total = len(given.models) * (2 + len(SPEEDS) * given.rounds * len(SERVERS))
        rows = []
        with (
            steps(total) as (_, advance),
            tempfile.TemporaryDirectory(prefix="hcache-bench-") as folder,
        ):
            for kind in given.models:
                advance(f"{kind}: starting servers")
                case, tokens = MODELS[kind], given.tokens
                # The other servers' methods are not asked.
                methods = {name: case.methods()[name] for name in SERVERS}
                with case.turns(machine, Path(folder), tokens, **methods) as turns:
                    advance(f"{kind}: histories")
                    store_histories(turns, given.requests)
                    for speed in SPEEDS:
                        row = under_load(turns, speed, given.requests, given.rounds, advance)
                        rows.append({"model": kind, "pages": case.pages, "tokens": tokens, **row})
    results = {**stamp(machine), "cores": os.cpu_count(), "rows": rows}
    print(table_lines(results))
    write(given.out, "hits_load", results, draw)
    return 0


def store_histories(turns: Turns, requests: int) -> None:
    """Have L3 store what requests under load ask for."""
    for name in (ALWAYS, OURS):
        with turns.servers[name].turn():
            for number in range(1, requests + 1):
                turns.servers[name].server.generate(history(turns.tokens, number), 1)
            turns.servers[name].server.flush_cache(300)


def under_load(
    turns: Turns, speed: float, requests: int, rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """A row: what each server did with the same bursts."""
    learn(turns, OURS, speed)
    rates: dict[str, list[float]] = {name: [] for name in SERVERS}
    waits: dict[str, list[float]] = {name: [] for name in SERVERS}
    for number in range(rounds):
        for name in random.Random(number).sample(SERVERS, len(SERVERS)):
            advance(f"L3 at {speed:g} times the speed of computing, burst {number + 1}: {name}")
            with turns.servers[name].turn():
                rate, wait = _burst(turns, turns.servers[name], requests, number)
            rates[name].append(rate)
            waits[name].append(wait)
    return {
        "speed": speed,
        "requests": requests,
        "rounds_per_second": {name: [round(r, 3) for r in all_] for name, all_ in rates.items()},
        "rounds_first_token_s": {name: [round(w, 3) for w in all_] for name, all_ in waits.items()},
        **compared(rates, waits),
    }


def compared(rates: Mapping[str, list[float]], waits: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians, and the default's goodput and wait as ratios of the better one's, burst by burst."""
    goodput = [
        ours / max(none, always)
        for none, always, ours in zip(*(rates[name] for name in SERVERS), strict=True)
    ]
    wait = [
        ours / min(none, always)
        for none, always, ours in zip(*(waits[name] for name in SERVERS), strict=True)
    ]
    return {
        "per_second": {name: median(all_) for name, all_ in rates.items()},
        "first_token_s": {name: median(all_) for name, all_ in waits.items()},
        "goodput_of_better": median(goodput),
        "wait_of_better": median(wait),
    }


def _burst(turns: Turns, restored: Restorer, requests: int, round_: int) -> tuple[float, float]:
    """Requests per second of one burst, and seconds until a first token on average.

    Caches are flushed behind it.
    """
    source, pause = random.Random(round_), turns.computing / OFFERED
    prompts = [
        [*history(turns.tokens, number), *question(1000 * (round_ + 1) + number)]
        for number in range(1, requests + 1)
    ]
    source.shuffle(prompts)
    start, threads, waits = time.perf_counter(), [], []

    def ask(prompt: list[int]) -> None:
        asked = time.perf_counter()
        restored.server.generate(prompt, 1)
        waits.append(time.perf_counter() - asked)

    for prompt in prompts:
        thread = threading.Thread(target=ask, args=(prompt,))
        thread.start()
        threads.append(thread)
        time.sleep(source.expovariate(1 / pause))
    for thread in threads:
        thread.join()
    taken = time.perf_counter() - start
    restored.server.flush_cache(300)
    return requests / taken, mean(waits)


def table_lines(results: Mapping[str, Any]) -> str:
    """A row for each model and speed of L3: requests per second, and the time to the first token.

    Of three servers each, and what default options have of the better one of the others.
    """
    titles = [COMPARED[name].title for name in SERVERS]
    heads = ("model, history", "speed of L3", *(f"{title}, 1/s" for title in titles))
    more = ("default / better", *(f"{title}, s" for title in titles), "default / better")
    rows = [
        (
            f"{row['model']} ({row['pages']}), {row['tokens']:,}",
            f"{row['speed']:g}",
            *(f"{row['per_second'][name]:.2f}" for name in SERVERS),
            row["goodput_of_better"],
            *(f"{row['first_token_s'][name]:.2f}" for name in SERVERS),
            row["wait_of_better"],
        )
        for row in results["rows"]
    ]
    return markdown((*heads, *more), rows)


def draw(results: Mapping[str, Any]) -> Figure:
    """Seconds to the first token in bursts, a panel for each speed of L3; ranges of the bursts."""
    rows = results["rows"]
    ratios = [row["wait_of_better"] for row in rows]
    figure = picture(
        f"In bursts the first token comes after {min(ratios):.2f} to {max(ratios):.2f} times the "
        "wait of the better choice"
    )
    speeds = list(dict.fromkeys(row["speed"] for row in rows))
    panels = figure.subplots(1, len(speeds), sharey=True, squeeze=False)[0]
    for axes, speed in zip(panels, speeds, strict=True):
        mine = [row for row in rows if row["speed"] == speed]
        for number, (name, (label, colour)) in enumerate(BARS.items()):
            places = [place + 0.27 * (number - 1) for place in range(len(mine))]
            middles = [row["first_token_s"][name] for row in mine]
            each = [row["rounds_first_token_s"][name] for row in mine]
            below = [middle - min(all_) for middle, all_ in zip(middles, each, strict=True)]
            above = [max(all_) - middle for middle, all_ in zip(middles, each, strict=True)]
            axes.bar(places, middles, 0.25, yerr=(below, above), color=colour, label=label)
        axes.set_title(f"L3 {times(speed)} as fast as computing", fontsize=10)
        names = [row["model"].replace("-", "\n") for row in mine]
        axes.set_xticks(range(len(mine)), names, fontsize=10)
        axes.set_xlabel("attention, and bfloat16 instead of float32", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds to the first token, mean of a burst", fontsize=10)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=10
    )
    return figure


if __name__ == "__main__":
    sys.exit(main())
