"""Restores at every rate, by servers that take turns."""

from __future__ import annotations

import random
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import requests
import torch

from bench.compare.plan import with_bus
from bench.harness.machine import Machine
from bench.harness.methods import Method, server_options
from bench.harness.restorer import Restore, Restorer, restorer
from bench.sweep.plans import AUTOMATIC, Sweep
from hcache_backend.partition.measure import Bench, measure
from hcache_backend.partition.model_config import read_model

Row = dict[str, Any]
GAPS = 128
"""Tokens of the other request that are timed: they last longer than any of the restores."""
HOW = ("recomputed", "from hidden states", "loaded as KV")


def prompt(sweep: Sweep, tokens: int, seed: int = 0) -> list[int]:
    """Random tokens; others for each seed."""
    source = random.Random(seed)
    return [source.randrange(sweep.shape.vocabulary) for _ in range(tokens)]


@contextmanager
def started(
    sweep: Sweep, machine: Machine, model: Path, name: str, method: Method, **hcache: str
) -> Iterator[Restorer]:
    """A server of a method that has the prompt in its L3, and is stopped but for its turns.

    Args:
        name: Name of its folder, which is beside the model's.
        hcache: More options of ours.
    """
    folder = model.parent / name
    options = server_options(
        method,
        machine,
        model,
        folder,
        pool_tokens=2 * sweep.tokens,
        hcache=hcache,
        extra_args=("--mem-fraction-static", "0.5"),  # the others' weights count as used
    )
    with restorer(options, folder / "l3") as server:
        server.store(prompt(sweep, sweep.tokens))
        restore(server, sweep)  # what is done once only
        yield server


def restore(server: Restorer, sweep: Sweep) -> Restore:
    """Bring the prompt back, in a turn of the server."""
    with server.turn():
        return server.restore(prompt(sweep, sweep.tokens))


def token_gaps(
    restored: Restorer, sweep: Sweep, number: int, *, restores: bool = True
) -> list[float]:
    """Milliseconds between tokens of another request, from when the prompt is asked for.

    Args:
        number: Another request for each.
        restores: False: the prompt is not asked for.
    """
    begun, stamps = threading.Event(), []
    sampling = {"max_new_tokens": GAPS + 32, "ignore_eos": True}
    body: dict[str, Any] = {
        "input_ids": prompt(sweep, 65, number),
        "sampling_params": sampling,
        "stream": True,
    }
    server = restored.server

    def generate() -> None:
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    stamps.append(time.monotonic())
                    begun.set()

    with restored.turn():
        other = threading.Thread(target=generate)
        other.start()
        begun.wait()
        start = end = time.monotonic()
        if restores:
            server.generate([*prompt(sweep, sweep.tokens), 0], 1)
            end = time.monotonic()
        other.join()
        server.flush_cache()
    last = sum(stamp < start for stamp in stamps) - 1
    timed = stamps[last : last + GAPS + 1]
    if len(timed) <= GAPS or timed[-1] < end:
        raise server.error("the other request ended before the restore")
    return [1e3 * (b - a) for a, b in pairwise(timed)]


def partition(server: Restorer) -> list[int]:
    """Layers by method, in the order of :data:`HOW`, as the server's log says."""
    log = server.server.log_text()
    (said,) = set(re.findall(r"hcache: partition: (.*); the best for", log))
    numbers = (re.search(rf"(\d+) layers? {how}", said) for how in HOW)
    return [int(number[1]) if number else 0 for number in numbers]


def run(sweep: Sweep, machine: Machine) -> Row:
    """All rates, and the balanced one with another request."""
    torch.set_num_threads(1)  # as the servers compute
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        model = sweep.shape.build(Path(scratch))
        start = partial(started, sweep, machine, model)
        bench = Bench(read_model(model), torch.device("cpu"), torch.float32, 2.0)
        profile = measure(bench, None, ()) if sweep.automatic else None
        servers = {
            name: stack.enter_context(start(name, how)) for name, how in sweep.methods.items()
        }
        slow_down(sweep, servers, 0.0)
        one_by_one = servers[sweep.one_by_one]
        alone = median(restore(one_by_one, sweep).load_ms for _ in range(3))
        balanced = round(sweep.stored_bytes / alone / 1e3, 1)
        rows = []
        for rate in sorted({*sweep.rates, balanced}, key=lambda rate: rate or float("inf")):
            print(f"{rate or 'no limit of'} MB/s", flush=True)
            with ExitStack() as once:
                every = dict(servers)
                if profile is not None:
                    path = Path(scratch) / "profile.json"
                    (with_bus(profile, rate * 1e6) if rate else profile).save(path)
                    server = start(f"auto-{rate:g}", AUTOMATIC, profile=str(path))
                    every["auto"] = once.enter_context(server)
                slow_down(sweep, every, rate)
                rows.append(measure_rate(rate, every, sweep))
        print("while another request generates", flush=True)
        slow_down(sweep, servers, balanced)
        gaps = measure_gaps(servers, sweep)
    return {"balanced_mb_per_s": balanced, "rates": rows, "time_between_tokens": gaps}


def slow_down(sweep: Sweep, servers: Mapping[str, Restorer], mb_per_s: float) -> None:
    """Limit what the sweep slows down, for all servers; 0: no limit."""
    rates = {"bus": sweep.bus * 1e6, sweep.slowed.lower(): mb_per_s * 1e6}
    for server in servers.values():
        server.slow_down(**rates)


def measure_rate(rate: float, servers: Mapping[str, Restorer], sweep: Sweep) -> Row:
    """Rounds of one restore by every server, in changing order."""
    found: dict[str, list[Restore]] = {name: [] for name in servers}
    for number in range(sweep.rounds):
        order = list(servers)
        random.Random(number).shuffle(order)
        for name in order:
            found[name].append(restore(servers[name], sweep))
    times = {name: [getattr(each, sweep.timed) for each in all_] for name, all_ in found.items()}
    parts = {
        part: median(getattr(each, f"{part}_ms") for each in found[sweep.one_by_one])
        for part in ("l3", "load")
    }
    return {
        "mb_per_s": rate or None,
        "ms": {name: median(values) for name, values in times.items()},
        "layerwise_parts_ms": parts,
        "partition": partition(servers["auto"]) if sweep.automatic else None,
        "rounds": {name: [round(ms, 1) for ms in values] for name, values in times.items()},
    }


def measure_gaps(servers: Mapping[str, Restorer], sweep: Sweep) -> Row:
    """Time between tokens of another request while each server restores; ``none``: nothing."""
    found: dict[str, list[list[float]]] = {name: [] for name in (*servers, "none")}
    for number in range(1, sweep.rounds + 1):
        for name, server in servers.items():
            found[name].append(token_gaps(server, sweep, number))
        found["none"].append(token_gaps(servers[sweep.one_by_one], sweep, number, restores=False))
    return {
        name: {
            "tokens": GAPS,
            "mean_ms": median(map(fmean, gaps)),
            "median_ms": median(map(median, gaps)),
            "longest_ms": median(map(max, gaps)),
            "rounds_mean_ms": [round(fmean(one), 1) for one in gaps],
        }
        for name, gaps in found.items()
    }
