"""Restores on a real server over a bus, or from an L3, that is made slower and slower.

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import requests
import torch

from bench.compare.plan import with_bus
from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import LAYERWISE, Method, server_options
from bench.harness.models import TinyLlama
from bench.harness.program import failing, parser, stamp
from bench.harness.report import OUT, markdown, write
from bench.harness.restorer import Restore, Restorer, restorer
from hcache_backend.partition.measure import Bench, measure
from hcache_backend.partition.model_config import read_model

Row = dict[str, Any]
GAPS = 128
"""Tokens of the other request that are timed: they last longer than any of the restores."""
HOW = ("recomputed", "from hidden states", "loaded as KV")


@dataclass(frozen=True)
class Sweep:
    """What is measured.

    Attributes:
        slowed: What gets slower.
        layers: How many the model has.
        tokens: Tokens of the prompt but its last one: a whole number of pages.
        rates: MB/s; 0: no limit.
        rounds: Restores by every server at each rate.
        timed: Field of :class:`Restore`.
        methods: Servers, by name.
        hidden: The method that restores all layers from hidden states after L3 was read.
        automatic: Whether a server is started for each rate that chooses the partition itself.
    """

    slowed: Literal["bus", "L3"]
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
    """Ours, that reads L3 and then restores, unless the options say otherwise."""
    return Method(title, storage="dynamic", hcache={**LAYERWISE, **hcache})


AUTOMATIC = _ours("automatic", mode="auto")
SWEEPS = {
    "partition": Sweep(
        slowed="bus",
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
        layers=4,
        tokens=4096,
        rates=(10, 25, 100, 200, 400, 0),
        rounds=5,
        timed="ms",
        methods={
            "eager": _ours("eager", mode="hidden", restore="auto"),
            "layerwise": _ours("layer-wise", mode="hidden"),
            "kv": _ours("KV pages", mode="kv"),
        },
        hidden="layerwise",
        automatic=False,
    ),
}


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
    with turn(server):
        return server.restore(prompt(sweep, sweep.tokens))


@contextmanager
def turn(server: Restorer) -> Iterator[None]:
    """The server runs in the block and is stopped behind it."""
    server.server.signal(signal.SIGCONT)
    try:
        yield
    finally:
        server.server.signal(signal.SIGSTOP)


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

    with turn(restored):
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
        hidden = servers[sweep.hidden]
        alone = median(restore(hidden, sweep).load_ms for _ in range(3))
        size = sweep.tokens * sweep.shape.kv_bytes_per_token / 2
        balanced = round(size / alone / 1e3, 1)
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
    for server in servers.values():
        server.slow_down(**{sweep.slowed.lower(): mb_per_s * 1e6})


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
        part: median(getattr(each, f"{part}_ms") for each in found[sweep.hidden])
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
        found["none"].append(token_gaps(servers[sweep.hidden], sweep, number, restores=False))
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
    parsed = parser("bench.sweep", __doc__, "partition|eager [options]")
    parsed.add_argument("sweep", choices=SWEEPS)
    parsed.add_argument("--rates", type=float, nargs="+", help="MB/s; 0: no limit")
    parsed.add_argument("--rounds", type=int, help="restores by each server and rate")
    parsed.add_argument("--tokens", type=int, help="tokens of a restore")
    parsed.add_argument("--out", type=Path, default=OUT, help="folder for SWEEP.json and SWEEP.png")
    options = vars(parsed.parse_args())
    name, out = options.pop("sweep"), options.pop("out")
    sweep = replace(SWEEPS[name], **{key: value for key, value in options.items() if value})
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("this slows the CPU engine down; see bench/gpu/ for GPUs")
        results = {
            "sweep": name,
            **stamp(machine),
            "cores": os.cpu_count(),
            "model": sweep.shape.describe(),
            "tokens": sweep.tokens,
            **run(sweep, machine),
        }
    print(table_lines(results))
    write(out, name, results, draw)


if __name__ == "__main__":
    main()
