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
from bench.harness.report import OUT, markdown, write
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
    """Mean time to the first token of every burst, a panel for each model and speed of L3.

    Models stand beside each other.
    """
    from matplotlib.figure import Figure

    rows = results["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    speeds = list(dict.fromkeys(row["speed"] for row in rows))
    figure = Figure(figsize=(2.6 * len(models), 3 * len(speeds)), layout="constrained")
    panels = figure.subplots(len(speeds), len(models), squeeze=False)
    for row in rows:
        axes = panels[speeds.index(row["speed"]), models.index(row["model"])]
        for place, name in enumerate(SERVERS):
            each = row["rounds_first_token_s"][name]
            axes.plot([place] * len(each), each, "o", label=COMPARED[name].title)
        axes.set_title(f"{row['model']}, L3 {row['speed']:g} times as fast", fontsize=9)
        axes.set_xticks([])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("mean seconds to the first token", fontsize=8)
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(f"Bursts of requests, {results['device']}", fontsize=10)
    return figure


if __name__ == "__main__":
    sys.exit(main())
