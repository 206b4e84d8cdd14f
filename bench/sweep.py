"""Restores on a real server over a bus, or from an L3, that is made slower and slower.

    python -m bench.sweep partition|eager [--rates 20 50 ... 0] [--rounds N] [--tokens N]

SGLang serves a random Llama on the CPU, with a prompt whose pages are in L3 and nowhere else. Every
method has a server; they take turns at each rate, the others stopped meanwhile. One rate is found
by measuring: at the balanced rate hidden states take as long to transfer as to project.

- ``partition``: copies to the device are slowed down. All layers from hidden states, all from K and
  V, all recomputed, and the automatic partition, which goes by a profile of this machine with the
  rate for its bus. Timed is the load, from its launch to the last layer in the pool.
- ``eager``: reads of page files are slowed down. Hidden states restored while L3 is being read, the
  same pages restored after it was read, and K and V. Timed from the start of the prefetch on.

Times are medians. At the balanced rate another request generates meanwhile, too: its time between
tokens, as many whatever is restored, from the moment on at which the prompt was sent. So the time
in which the engine computes only the prompt's last token counts wherever it falls.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import requests
import torch

from bench.compare.plan import with_bus
from bench.harness.machine import Machine, find_machine
from bench.harness.methods import Method, server_options
from bench.harness.models import TinyLlama
from bench.harness.report import OUT, markdown, write
from bench.harness.server import Server
from hcache_backend.partition.measure import Bench, measure
from hcache_backend.partition.model_config import read_model
from hcache_backend.trace import Restore, read_trace, restored_from_l3

Row = dict[str, Any]
GAPS = 128
"""Tokens of the other request that are timed: they last longer than any of the restores."""
HOW = ("recomputed", "from hidden states", "loaded as KV")


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        slowed: What gets slower.
        variable: Of the CPU engine: names a file with the rate in bytes per second; 0: no limit.
        layers: Of the model.
        tokens: Tokens of the prompt but its last one: a whole number of pages.
        rates: MB/s; 0: no limit.
        rounds: Restores by every server at each rate.
        timed: Field of :class:`Restore`.
        methods: Servers, by name.
        hidden: The method that restores all layers from hidden states after L3 was read.
        automatic: Whether a server is started for each rate that chooses the partition itself.
    """

    slowed: str
    variable: str
    layers: int
    tokens: int
    rates: tuple[float, ...]
    rounds: int
    timed: str
    methods: Mapping[str, Method]
    hidden: str
    automatic: bool

    @property
    def shape(self) -> TinyLlama:
        return TinyLlama(layers=self.layers, hidden=1024, heads=8, kv_heads=8, intermediate=2816)


def _ours(title: str, **hcache: Any) -> Method:
    return Method(title, storage="dynamic", hcache=hcache)


AUTOMATIC = _ours("automatic", mode="auto")
SWEEPS = {
    "partition": Sweep(
        slowed="bus",
        variable="HCACHE_CPU_BUS_FILE",
        layers=8,
        tokens=1024,
        rates=(20, 50, 100, 200, 400, 800, 0),
        rounds=6,
        timed="load_ms",
        methods={
            "hidden": _ours("hidden states", partition={"hidden": 8}),
            "kv": _ours("KV", mode="kv"),  # as a server that chooses KV for every layer serves
            "recompute": _ours("recompute", partition={"recompute": 8}),
        },
        hidden="hidden",
        automatic=True,
    ),
    "eager": Sweep(
        slowed="L3",
        variable="HCACHE_CPU_L3_FILE",
        layers=4,
        tokens=4096,
        rates=(10, 25, 100, 200, 400, 0),
        rounds=5,
        timed="ms",
        methods={
            "eager": _ours("eager", mode="hidden", restore="eager"),
            "layerwise": _ours("layer-wise", mode="hidden", restore="layerwise"),
            "kv": _ours("KV pages", mode="kv"),
        },
        hidden="layerwise",
        automatic=False,
    ),
}


class Runner:
    """A server that has the prompt in its L3, and is stopped but for its turns."""

    def __init__(self, server: Server, sweep: Sweep) -> None:
        self._server, self._sweep = server, sweep
        self._trace = server.options.log.parent / "trace.jsonl"
        server.generate(self._prompt(sweep.tokens), 1)
        server.flush_cache(timeout=300)
        server.signal(signal.SIGSTOP)
        self.restore()  # what is done once only

    def _prompt(self, tokens: int, seed: int = 0) -> list[int]:
        chosen = random.Random(seed)
        return [chosen.randrange(self._sweep.shape.vocabulary) for _ in range(tokens + 1)]

    @contextmanager
    def _turn(self) -> Iterator[Server]:
        self._server.signal(signal.SIGCONT)
        try:
            yield self._server
        finally:
            self._server.signal(signal.SIGSTOP)

    def restore(self) -> Restore:
        """Ask for a token after the prompt, which is in L3 only, and forget it again."""
        with self._turn() as server:
            _, offset = read_trace(self._trace)
            server.generate(self._prompt(self._sweep.tokens), 1)
            server.flush_cache()
        restored = restored_from_l3(read_trace(self._trace, offset)[0])
        tokens = restored.tokens if restored else 0
        if restored is None or tokens < self._sweep.tokens:
            raise SystemExit(f"only {tokens} of {self._sweep.tokens} tokens came back from L3")
        return restored

    def token_gaps(self, number: int, *, restore: bool = True) -> list[float]:
        """Milliseconds between tokens of another request, from when the prompt is asked for.

        Args:
            number: Another request for each.
            restore: False: the prompt is not asked for.
        """
        begun, stamps = threading.Event(), []
        sampling = {"max_new_tokens": GAPS + 32, "ignore_eos": True}
        body = {"input_ids": self._prompt(64, number), "sampling_params": sampling, "stream": True}

        def generate() -> None:
            url = f"{self._server.url}/generate"
            with requests.post(url, json=body, stream=True, timeout=600) as answer:
                for line in answer.iter_lines():
                    if line.startswith(b"data: {"):
                        stamps.append(time.monotonic())
                        begun.set()

        with self._turn() as server:
            other = threading.Thread(target=generate)
            other.start()
            begun.wait()
            start = restored = time.monotonic()
            if restore:
                server.generate(self._prompt(self._sweep.tokens), 1)
                restored = time.monotonic()
            other.join()
            server.flush_cache()
        last = sum(stamp < start for stamp in stamps) - 1
        timed = stamps[last : last + GAPS + 1]
        if len(timed) <= GAPS or timed[-1] < restored:
            raise SystemExit("the other request ended before the restore")
        return [1e3 * (b - a) for a, b in pairwise(timed)]

    def partition(self) -> list[int]:
        """Layers by method, in the order of :data:`HOW`, as the server's log says."""
        (said,) = set(re.findall(r"hcache: partition: (.*); the best for", self._server.log_text()))
        numbers = (re.search(rf"(\d+) layers? {how}", said) for how in HOW)
        return [int(number[1]) if number else 0 for number in numbers]


class Starter:
    """Starts servers of a sweep, in folders of their own."""

    def __init__(self, sweep: Sweep, machine: Machine, folder: Path) -> None:
        self._sweep, self._machine, self._folder = sweep, machine, folder
        self._rate = folder / "rate"
        self.slow_down(0)
        self.model = sweep.shape.build(folder)

    def slow_down(self, mb_per_s: float) -> None:
        """For all servers; 0: no limit."""
        self._rate.write_text(str(mb_per_s * 1e6))

    @contextmanager
    def __call__(self, name: str, method: Method, **hcache: str) -> Iterator[Runner]:
        """A server of a method, with more options of ours."""
        options = server_options(
            method,
            self._machine,
            self.model,
            self._folder / name,
            pool_tokens=2 * self._sweep.tokens,
            hcache=hcache,
            trace=True,
            extra_env={self._sweep.variable: str(self._rate)},
            extra_args=("--mem-fraction-static", "0.5"),  # the others' weights count as used
        )
        with Server(options) as server:
            yield Runner(server, self._sweep)


def run(sweep: Sweep, machine: Machine) -> Row:
    """All rates, and the balanced one with another request."""
    torch.set_num_threads(1)  # as the servers compute
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        start = Starter(sweep, machine, Path(scratch))
        bench = Bench(read_model(start.model), torch.device("cpu"), torch.float32, 2.0)
        profile = measure(bench, None, ()) if sweep.automatic else None
        runners = {
            name: stack.enter_context(start(name, how)) for name, how in sweep.methods.items()
        }
        hidden = runners[sweep.hidden]
        alone = median(hidden.restore().load_ms for _ in range(3))
        size = sweep.tokens * sweep.shape.kv_bytes_per_token / 2
        balanced = round(size / alone / 1e3, 1)
        rows = []
        for rate in sorted({*sweep.rates, balanced}, key=lambda rate: rate or float("inf")):
            print(f"{rate or 'no limit of'} MB/s", flush=True)
            start.slow_down(rate)
            with ExitStack() as once:
                every = dict(runners)
                if profile is not None:
                    path = Path(scratch) / "profile.json"
                    (with_bus(profile, rate * 1e6) if rate else profile).save(path)
                    server = start(f"auto-{rate:g}", AUTOMATIC, profile=str(path))
                    every["auto"] = once.enter_context(server)
                rows.append(measure_rate(rate, every, sweep))
        print("while another request generates", flush=True)
        start.slow_down(balanced)
        gaps = measure_gaps(runners, hidden, sweep.rounds)
    return {"balanced_mb_per_s": balanced, "rates": rows, "time_between_tokens": gaps}


def measure_rate(rate: float, runners: dict[str, Runner], sweep: Sweep) -> Row:
    """Rounds of one restore by every server, in changing order."""
    found: dict[str, list[Restore]] = {name: [] for name in runners}
    for number in range(sweep.rounds):
        order = list(runners)
        random.Random(number).shuffle(order)
        for name in order:
            found[name].append(runners[name].restore())
    times = {name: [getattr(each, sweep.timed) for each in all_] for name, all_ in found.items()}
    parts = {
        part: median(getattr(each, f"{part}_ms") for each in found[sweep.hidden])
        for part in ("l3", "load")
    }
    return {
        "mb_per_s": rate or None,
        "ms": {name: median(values) for name, values in times.items()},
        "layerwise_parts_ms": parts,
        "partition": runners["auto"].partition() if sweep.automatic else None,
        "rounds": {name: [round(ms, 1) for ms in values] for name, values in times.items()},
    }


def measure_gaps(runners: dict[str, Runner], hidden: Runner, rounds: int) -> Row:
    """Time between tokens of another request while each server restores; ``none``: nothing."""
    found: dict[str, list[list[float]]] = {name: [] for name in (*runners, "none")}
    for number in range(1, rounds + 1):
        for name, runner in runners.items():
            found[name].append(runner.token_gaps(number))
        found["none"].append(hidden.token_gaps(number, restore=False))
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


def table_lines(results: Row) -> str:
    """Milliseconds by rate and method, how they compare, and time between tokens."""
    sweep = SWEEPS[results["sweep"]]
    heads, rows = [f"{sweep.slowed}, MB/s", *titles(results).values()], []
    if sweep.automatic:
        heads += ["fastest of the others / automatic", "R + H + K"]
    else:
        heads += ["eager / layer-wise", "eager / larger part", "KV / eager"]
    for row in results["rates"]:
        ms, compared = row["ms"], []
        if sweep.automatic:
            fastest = min(ms[name] for name in sweep.methods)
            compared = [fastest / ms["auto"], " + ".join(map(str, row["partition"]))]
        else:
            larger = max(row["layerwise_parts_ms"].values())
            compared = [ms["eager"] / ms["layerwise"], ms["eager"] / larger, ms["kv"] / ms["eager"]]
        times = (f"{ms[name]:,.0f}" for name in titles(results))
        rows.append([label(row, results), *times, *compared])
    table = markdown(heads, rows)
    if not (gaps := results.get("time_between_tokens")):
        return table
    means = {name: f"{found['mean_ms']:.0f}" for name, found in gaps.items()}
    cells = [(titles(results).get(name, "no restore"), mean) for name, mean in means.items()]
    return f"{table}\n\n{markdown(('during restores', 'ms between tokens'), cells)}"


def titles(results: Row) -> dict[str, str]:
    """The methods of the results, in words."""
    known = {**SWEEPS[results["sweep"]].methods, "auto": AUTOMATIC}
    return {name: known[name].title for name in results["rates"][0]["ms"]}


def label(row: Row, results: Row) -> str:
    """The rate of a row."""
    rate = row["mb_per_s"]
    balanced = " (balanced)" if rate and rate == results.get("balanced_mb_per_s") else ""
    return f"{rate:g}{balanced}" if rate else "no limit"


def draw(results: Row) -> Any:
    """Restore time by the rate."""
    from matplotlib.figure import Figure

    figure, rows = Figure(figsize=(8, 4.5), layout="constrained"), results["rates"]
    axes = figure.subplots()
    for name, title in titles(results).items():
        style = "o-" if name in ("auto", "eager") else "o--"
        axes.plot([row["ms"][name] for row in rows], style, label=title)
    axes.set_yscale("log")
    axes.set_xticks(range(len(rows)), [label(row, results).replace(" (", "\n(") for row in rows])
    axes.set_xlabel(f"{SWEEPS[results['sweep']].slowed}, MB/s")
    axes.set_ylabel("restore, ms")
    axes.set_title(f"Restores by method, {results['device']}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--rates", type=float, nargs="+", help="MB/s; 0: no limit")
    parser.add_argument("--rounds", type=int, help="restores by each server and rate")
    parser.add_argument("--tokens", type=int, help="tokens of a restore")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for SWEEP.json and SWEEP.png")
    options = vars(parser.parse_args())
    name, out = options.pop("sweep"), options.pop("out")
    sweep = replace(SWEEPS[name], **{key: value for key, value in options.items() if value})
    machine = find_machine()
    if machine.device != "cpu":
        raise SystemExit("this slows the CPU engine down; see bench/gpu/ for GPUs")
    results = {
        "sweep": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": machine.name,
        "cores": os.cpu_count(),
        "model": sweep.shape.describe(),
        "tokens": sweep.tokens,
        **run(sweep, machine),
    }
    print(table_lines(results))
    write(out, name, results, draw)


if __name__ == "__main__":
    main()
