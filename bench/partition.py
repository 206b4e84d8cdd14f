"""Partitions on a real server, over a bus that is made slower and slower.

    python bench/partition.py [--rates 20 50 100 ... 0] [--rounds 3]

SGLang serves a random Llama on the CPU. Two long prompts take turns, and the device's KV pool has
room for one: so each request brings its history back from host memory. Copies to the device are
slowed down to a rate (MB/s; 0: not at all). For every rate four servers take turns, the others
stopped meanwhile: all layers stored as hidden states, all as KV (KV mode), all recomputed, and the
automatic partition, which goes by a profile that was measured on this machine and has the rate for
its bus.

What is timed is the restore itself, from its launch to the last layer in the pool; medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hcache_backend.cli.common import progress_bar, screen, table
from hcache_backend.cli.compare_plan import with_bus
from hcache_backend.cli.demo_run import launch
from hcache_backend.cli.machine import Machine, find_machine
from hcache_backend.cli.serving import ServerProcess
from hcache_backend.cli.tiny_model import TinyLlama, build
from hcache_backend.partition.measure import Bench, measure
from hcache_backend.partition.model_config import read_model
from hcache_backend.trace import read_trace

RESULTS = Path(__file__).parent / "results"
RATES = (20, 50, 100, 200, 400, 800, 0)
SHAPE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
METHODS = {
    "hidden": {"partition": {"hidden": SHAPE.layers}},
    "kv": {"mode": "kv"},  # as a server that chooses KV for every layer serves
    "recompute": {"partition": {"recompute": SHAPE.layers}},
}
HOW = ("recomputed", "from hidden states", "loaded as KV")
Row = dict[str, Any]


class Runner(NamedTuple):
    """One server, and its trace."""

    server: ServerProcess
    trace: Path

    def restore_ms(self, prompt: Sequence[int]) -> tuple[int, float]:
        """Ask for a token after ``prompt``; how much of it came back from host memory, and how
        long that took."""
        with running(self.server):
            _, offset = read_trace(self.trace)
            self.server.generate(prompt, 1)
        events, _ = read_trace(self.trace, offset)
        loads = [event for event in events if event.stage == "load"]
        return sum(load.tokens for load in loads), sum(load.ms for load in loads)


@contextmanager
def running(server: ServerProcess) -> Iterator[None]:
    """The server runs within the block, and is stopped outside of it."""
    server.signal(signal.SIGCONT)
    try:
        yield
    finally:
        server.signal(signal.SIGSTOP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="MB/s; 0: no limit")
    parser.add_argument("--rounds", type=int, default=3, help="each restores both prompts once")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a restore")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # as the servers compute
    machine = find_machine()
    rows = []
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = build(SHAPE, folder / "model")
        bus = folder / "bus"
        bus.write_text("0")
        bench = Bench(read_model(model), torch.device("cpu"), torch.float32, 2.0)
        profile = measure(bench, machine.name, None, [], lambda: None)
        start = Starter(machine, model, folder, bus, options.tokens)
        pure = {name: stack.enter_context(start(name, how)) for name, how in METHODS.items()}
        with progress_bar(hidden=False) as progress:
            task = progress.add_task("", total=len(options.rates))
            for rate in options.rates:
                progress.update(task, description=f"{rate or 'no limit of'} MB/s")
                bus.write_text(str(rate * 1e6))
                slower = with_bus(profile, rate * 1e6) if rate else profile
                slower.save(folder / "profile.json")
                how = {"mode": "auto", "profile": str(folder / "profile.json")}
                with start(f"auto-{rate:g}", how) as auto:
                    rows.append(measure_rate(rate, {**pure, "auto": auto}, options))
                progress.advance(task)
    report(rows, machine.name, options)


class Starter:
    """Starts servers whose device pool has room for one of two prompts.

    Args:
        machine: Where.
        model: The model's folder.
        folder: For logs and stores.
        bus: File with the rate of the bus.
        tokens: Tokens of a restore.
    """

    def __init__(self, machine: Machine, model: Path, folder: Path, bus: Path, tokens: int) -> None:
        self._machine, self._model, self._folder, self._bus = machine, model, folder, bus
        self._tokens = tokens

    @contextmanager
    def __call__(self, name: str, hcache: dict[str, Any]) -> Iterator[Runner]:
        """A server with the options ``hcache``, stopped."""
        folder = self._folder / name
        folder.mkdir()
        command, environment = launch("hcache", self._machine, self._model, folder)
        extra = command.index("--hicache-storage-backend")
        command = command[:extra]  # pages stay in host memory
        room = command.index("--max-total-tokens") + 1
        command[room] = str(self._tokens * 3 // 2)
        command[command.index("--hicache-ratio") + 1] = "5"
        environment |= {
            "HCACHE_ENABLE": "1",
            "HCACHE_CONFIG": json.dumps({"dirs": [str(folder / "l3")], **hcache}),
            "HCACHE_CPU_BUS_FILE": str(self._bus),
        }
        with ServerProcess(command, environment, folder / "server.log") as server:
            runner = Runner(server, folder / "trace.jsonl")
            for prompt in prompts(self._tokens):
                server.generate(prompt, 1)
                time.sleep(1)  # what is not backed up yet when the other one comes is lost
            with running(server):
                pass
            yield runner
            server.signal(signal.SIGCONT)


def prompts(tokens: int) -> list[list[int]]:
    """Two prompts of a whole number of pages and one token."""
    chosen = random.Random(0)
    return [[chosen.randrange(SHAPE.vocabulary) for _ in range(tokens + 1)] for _ in range(2)]


def measure_rate(rate: float, runners: dict[str, Runner], options: Any) -> Row:
    """Rounds of one restore by every server, in changing order."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(options.rounds + 1):
        for prompt in prompts(options.tokens):
            order = list(runners)
            random.Random(number).shuffle(order)
            for name in order:
                tokens, took = runners[name].restore_ms(prompt)
                if number == 0:  # the first round brings what was touched last
                    continue
                if tokens < options.tokens:
                    raise SystemExit(f"{name}: only {tokens} tokens came back from host memory")
                times[name].append(took)
    ms = {name: statistics.median(found) for name, found in times.items()}
    best = min(METHODS, key=lambda name: ms[name])
    log = runners["auto"].server.log.read_text()
    (said,) = set(re.findall(r"hcache: partition: (.*); the best for", log))
    numbers = (re.search(rf"(\d+) layers? {how}", said) for how in HOW)
    return {
        "mb_per_s": rate or None,
        "ms": ms,
        "best_pure": best,
        "auto_vs_best_pure": ms[best] / ms["auto"],
        "partition": [int(number[1]) if number else 0 for number in numbers],
        "rounds": {name: [round(took, 1) for took in found] for name, found in times.items()},
    }


def report(rows: list[Row], device: str, options: Any) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cores": os.cpu_count(),
        "model": SHAPE.describe(),
        "tokens": options.tokens,
        "rates": rows,
    }
    (options.results / "partition.json").write_text(json.dumps(result, indent=2) + "\n")
    shown = table(
        "bus, MB/s#",
        "hidden, ms#",
        "KV, ms#",
        "recompute, ms#",
        "auto, ms#",
        "faster, x#",
        "R+H+K#",
    )
    for row in rows:
        ms = row["ms"]
        shown.add_row(
            f"{row['mb_per_s']:g}" if row["mb_per_s"] else "no limit",
            *(f"{ms[name]:,.0f}" for name in ("hidden", "kv", "recompute", "auto")),
            f"{row['auto_vs_best_pure']:.2f}",
            "+".join(map(str, row["partition"])),
        )
    screen.print(shown)
    draw(rows, device, options.results / "partition.png")


def draw(rows: list[Row], device: str, path: Path) -> None:
    """Restore time by the rate of the bus."""
    lines = {
        name: Line(name, style)
        for name, style in {"hidden": "--", "kv": "--", "recompute": ":"}.items()
    }
    lines["auto"] = Line("auto", "-", 2.5)
    words = ("copy to the device, MB/s", "restore, ms", f"Restores by method, {device}")
    draw_by_rate(rows, lines, words, path)


class Line(NamedTuple):
    """How one method is drawn."""

    label: str
    style: str
    width: float = 1.5


def draw_by_rate(
    rows: list[Row],
    lines: dict[str, Line],
    words: tuple[str, str, str],
    path: Path,
    mark: float | None = None,
) -> None:
    """Draw the time (``ms`` of each row, by method) over the rate (``mb_per_s``; None: no limit).

    Args:
        rows: What was measured.
        lines: Which methods, and how.
        words: Below the axis of rates, beside that of times, and above.
        path: The PNG.
        mark: The rate of a row that gets a dotted line.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    places = range(len(rows))
    labels = [f"{row['mb_per_s']:g}" if row["mb_per_s"] else "no limit" for row in rows]
    for name, (label, style, width) in lines.items():
        times = [row["ms"][name] for row in rows]
        axes.plot(places, times, style, marker="o", linewidth=width, label=label)
    if mark is not None:
        place = [row["mb_per_s"] for row in rows].index(mark)
        axes.axvline(place, color="grey", alpha=0.5, linestyle=":")
    axes.set_yscale("log")
    axes.set_xticks(list(places), labels)
    below, beside, above = words
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    axes.set_title(above)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
