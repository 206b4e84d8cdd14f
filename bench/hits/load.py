"""Requests under load when L3 is faster or slower than computing.

SGLang serves random models on the CPU. Requests come at random, 1.2 times as fast as they could be
computed, each with a history of its own that is in L3 and nowhere else, over an L3 twice and half
as fast as computing. Without L3 (HiCache in host memory, which has nothing of it), with ours
reading every hit, and with ours and its default options: these servers take turns at the same
bursts, the others stopped meanwhile. Requests per second and the time to the first token (its mean
in a burst) are medians over bursts.
"""

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from bench.harness.program import Advance, Program, Run, Setting, at_least, names, scratch, steps
from bench.harness.report import Column, Picture, Results, Row, Series, Table, by, times
from bench.harness.restorer import Restorer
from bench.harness.turns import NO_L3, Turns, history, question
from bench.hits.cases import ALWAYS, COMPARED, MODELS, OURS, title
from bench.hits.measure import learn

OFFERED = 1.2  # of the rate at which requests can be computed
SPEEDS = (2.0, 0.5)  # of L3; 1: as fast as computing
SERVERS = (NO_L3, ALWAYS, OURS)


def measure(run: Run) -> Results:
    given, rows = run.given, []
    torch.set_num_threads(1)
    total = len(given.models) * (2 + len(SPEEDS) * given.rounds * len(SERVERS))
    with steps(total) as advance, scratch() as folder:
        for kind in given.models:
            advance(f"{kind}: starting servers")
            case, tokens = MODELS[kind], given.tokens
            # The other servers' methods are not asked.
            methods = {name: case.methods()[name] for name in SERVERS}
            with case.turns(run.machine, Path(folder), tokens, **methods) as turns:
                advance(f"{kind}: histories")
                store_histories(turns, given.requests)
                for speed in SPEEDS:
                    row = under_load(turns, speed, given.requests, given.rounds, advance)
                    rows.append({"model": kind, "pages": case.pages, "tokens": tokens, **row})
    return {"rows": rows}


def store_histories(turns: Turns, requests: int) -> None:
    for name in (ALWAYS, OURS):
        with turns.servers[name].turn():
            for number in range(1, requests + 1):
                turns.servers[name].server.generate(history(turns.tokens, number), 1)
            turns.servers[name].server.flush_cache(300)


def under_load(
    turns: Turns, speed: float, requests: int, rounds: int, advance: Advance
) -> dict[str, Any]:
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

    def of(better: Callable[[float, float], float], found: Mapping[str, list[float]]) -> float:
        rounds = zip(*(found[name] for name in SERVERS), strict=True)
        return median(ours / better(none, always) for none, always, ours in rounds)

    return {
        "per_second": {name: median(all_) for name, all_ in rates.items()},
        "first_token_s": {name: median(all_) for name, all_ in waits.items()},
        "goodput_of_better": of(max, rates),
        "wait_of_better": of(min, waits),
    }


def _burst(turns: Turns, restored: Restorer, requests: int, round_: int) -> tuple[float, float]:
    """Requests per second of one burst, and seconds until a first token on average."""
    source, pause = random.Random(round_), turns.computing / OFFERED
    prompts = [
        [*history(turns.tokens, number), *question(1000 * (round_ + 1) + number)]
        for number in range(1, requests + 1)
    ]
    source.shuffle(prompts)
    start, waits = time.perf_counter(), []

    def ask(prompt: list[int]) -> float:
        asked = time.perf_counter()
        restored.server.generate(prompt, 1)
        return time.perf_counter() - asked

    with ThreadPoolExecutor(requests) as pool:
        for prompt in prompts:
            waits.append(pool.submit(ask, prompt))
            time.sleep(source.expovariate(1 / pause))
    taken = time.perf_counter() - start
    restored.server.flush_cache(300)
    return requests / taken, mean(wait.result() for wait in waits)


def named(results: Results) -> list[Row]:
    return [{**row, "name": row["model"].replace("-", ", ")} for row in results["rows"]]


def finding(results: Results) -> str:
    ratios = [row["wait_of_better"] for row in results["rows"]]
    return (
        f"In bursts the first token comes after {min(ratios):.2f} to {max(ratios):.2f} times the "
        "wait of the better choice"
    )


def _bars(name: str, label: str, colour: str) -> Series:
    each = f"rounds_first_token_s.{name}"
    return Series(label, f"first_token_s.{name}", colour, each=each)


PROGRAM = Program(
    name="hits_load",
    module="bench.hits.load",
    doc=__doc__,
    measure=measure,
    slows=True,
    settings=(
        Setting("--models", names(list(MODELS)), list(MODELS), "kinds of models"),
        Setting("--tokens", at_least(128), 1024, "of a history"),
        Setting("--requests", at_least(1), 24, "of a burst"),
        Setting("--rounds", at_least(1), 3, "bursts to each server and speed"),
    ),
    tables=Table(
        "rows",
        (
            *(Column("model, history", title), "speed of L3 = speed :g"),
            *(f"{COMPARED[n].title}, 1/s = per_second.{n}" for n in SERVERS),
            "default / better = goodput_of_better",
            *(f"{COMPARED[n].title}, s = first_token_s.{n}" for n in SERVERS),
            "default / better = wait_of_better",
        ),
    ),
    draw=Picture(
        title=finding,
        panels=by(lambda row: f"L3 {times(row['speed'])} as fast as computing", named),
        x="name",
        x_label="attention, and bfloat16 instead of float32",
        y_label="seconds to the first token, mean of a burst",
        series=(
            _bars(NO_L3, "computed", "computed"),
            _bars(ALWAYS, "hcache, all read", "ours, all read"),
            _bars(OURS, "hcache, default options", "ours"),
        ),
        bars="%.2f",
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
