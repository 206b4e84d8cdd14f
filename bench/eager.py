"""Restores from L3 while it is still being read, on a real server with a slower and slower L3.

    python -m bench.eager [--rates 10 25 100 ... 0] [--rounds 5]

SGLang serves a random Llama on the CPU, with a prompt whose pages are in L3 and nowhere else. Reads
of page files are slowed down to a rate (MB/s; 0: not at all). Three servers take turns, the others
stopped meanwhile: hidden states restored eagerly, the same pages restored layer by layer after the
prefetch, and plain KV pages. One rate is found by measuring: where reading and projecting the
hidden states take equally long.

What is timed is the restore: from the begin of the prefetch to the last layer in the pool; medians.
At the balanced rate another request generates meanwhile, too: its time between tokens, of as many
tokens whatever restores, from the moment on at which the prompt was sent. So the time in which the
engine computes only the prompt's last token counts wherever it falls.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import requests

from bench.partition import Line, draw_by_rate, running
from hcache_backend.cli.common import progress_bar, screen, table
from hcache_backend.cli.demo_run import launch
from hcache_backend.cli.machine import Machine, find_machine
from hcache_backend.cli.serving import ServerProcess
from hcache_backend.cli.tiny_model import TinyLlama, build
from hcache_backend.trace import Restore, read_trace, restored_from_l3

RESULTS = Path(__file__).parent / "results"
GAPS = 128
"""Tokens of the other request that are timed: they last longer than any of the restores."""
RATES = (10, 25, 100, 200, 400, 0)
SHAPE = TinyLlama(layers=4, hidden=1024, heads=8, kv_heads=8, intermediate=2816)
METHODS = {
    "eager": {"mode": "hidden", "restore": "eager"},
    "layerwise": {"mode": "hidden", "restore": "layerwise"},
    "kv": {"mode": "kv"},
}
LABELS = {
    "eager": "hidden states, eager",
    "layerwise": "hidden states, layer-wise",
    "kv": "plain KV pages",
}
_BYTES_A_TOKEN = SHAPE.layers * SHAPE.hidden * 4
Row = dict[str, Any]


class Runner(NamedTuple):
    """One server, and its trace."""

    server: ServerProcess
    trace: Path
    tokens: int

    def restore(self) -> Restore:
        """Ask for a token after the prompt, which is in L3 only, and forget it again."""
        with running(self.server):
            _, offset = read_trace(self.trace)
            self.server.generate(prompt(self.tokens), 1)
            self.server.flush_cache()
        restored = restored_from_l3(read_trace(self.trace, offset)[0])
        tokens = restored.tokens if restored else 0
        if restored is None or tokens < self.tokens:
            raise SystemExit(f"only {tokens} of {self.tokens} tokens came back from L3")
        return restored

    def token_gaps(self, number: int, *, restore: bool = True) -> list[float]:
        """Milliseconds between tokens of another request, from when the prompt is asked for.

        Args:
            number: Another request for each.
            restore: False: the prompt is not asked for.
        """
        with running(self.server):
            begun, stamps = threading.Event(), []
            body = {
                "input_ids": prompt(64, seed=number),
                "sampling_params": {"max_new_tokens": GAPS + 32, "ignore_eos": True},
                "stream": True,
            }
            url = f"http://127.0.0.1:{self.server.port}/generate"

            def generate() -> None:
                with requests.post(url, json=body, stream=True, timeout=600) as answer:
                    for line in answer.iter_lines():
                        if line.startswith(b"data: {"):
                            stamps.append(time.monotonic())
                            begun.set()

            other = threading.Thread(target=generate)
            other.start()
            begun.wait()
            start = time.monotonic()
            if restore:
                self.server.generate(prompt(self.tokens), 1)
                restored = time.monotonic()
            other.join()
            self.server.flush_cache()
        last = sum(stamp < start for stamp in stamps) - 1
        timed = stamps[last : last + GAPS + 1]
        if len(timed) <= GAPS or (restore and timed[-1] < restored):
            raise SystemExit("the other request ended before the restore")
        return [1e3 * (b - a) for a, b in pairwise(timed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="MB/s; 0: no limit")
    parser.add_argument("--rounds", type=int, default=5, help="restores by each server and rate")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a restore")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = find_machine()
    if machine.device != "cpu":
        raise SystemExit("this slows the CPU engine's L3 down; see bench/gpu/ for GPUs")
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = build(SHAPE, folder / "model")
        link = folder / "l3-rate"
        link.write_text("0")
        start = Starter(machine, model, folder, link, options.tokens)
        runners = {name: stack.enter_context(start(name, how)) for name, how in METHODS.items()}
        alone = statistics.median(runners["layerwise"].restore().load_ms for _ in range(3))
        balanced = round(options.tokens * _BYTES_A_TOKEN / alone / 1e3, 1)
        rates = sorted({*options.rates, balanced}, key=lambda rate: rate or float("inf"))
        rows = []
        with progress_bar(hidden=False) as progress:
            task = progress.add_task("", total=len(rates) + 1)
            for rate in rates:
                progress.update(task, description=f"{rate or 'no limit of'} MB/s")
                link.write_text(str(rate * 1e6))
                rows.append(measure_rate(rate, runners, options.rounds))
                progress.advance(task)
            progress.update(task, description="while another request generates")
            link.write_text(str(balanced * 1e6))
            gaps = measure_gaps(runners, options.rounds)
            progress.advance(task)
    report(rows, balanced, gaps, machine.name, options)


class Starter:
    """Starts servers with the prompt in their L3.

    Args:
        machine: Where.
        model: The model's folder.
        folder: For logs and stores.
        link: File with the rate of L3.
        tokens: Tokens of the prompt, but for its last.
    """

    def __init__(
        self, machine: Machine, model: Path, folder: Path, link: Path, tokens: int
    ) -> None:
        self._machine, self._model, self._folder, self._link = machine, model, folder, link
        self._tokens = tokens

    @contextmanager
    def __call__(self, name: str, hcache: dict[str, Any]) -> Iterator[Runner]:
        """A server with the options ``hcache``, stopped."""
        folder = self._folder / name
        folder.mkdir()
        command, environment = launch("hcache", self._machine, self._model, folder)
        place = command.index("--hicache-storage-backend-extra-config") + 1
        extra = json.loads(command[place])
        command[command.index("--max-total-tokens") + 1] = str(self._tokens * 2)
        extra["hcache"] = {"dirs": [str(folder / "l3")], **hcache}
        command[place] = json.dumps(extra)
        environment["HCACHE_CPU_L3_FILE"] = str(self._link)
        with ServerProcess(command, environment, folder / "server.log") as server:
            runner = Runner(server, folder / "trace.jsonl", self._tokens)
            server.generate(prompt(self._tokens), 1)
            server.flush_cache(timeout_s=300)
            runner.restore()  # what is done once only
            yield runner
            with running(server):
                pass


def prompt(tokens: int, seed: int = 0) -> Sequence[int]:
    """A whole number of pages and one token."""
    chosen = random.Random(seed)
    return [chosen.randrange(SHAPE.vocabulary) for _ in range(tokens + 1)]


def measure_rate(rate: float, runners: dict[str, Runner], rounds: int) -> Row:
    """Rounds of one restore by every server, in changing order."""
    times: dict[str, list[Restore]] = {name: [] for name in runners}
    for number in range(rounds):
        order = list(runners)
        random.Random(number).shuffle(order)
        for name in order:
            times[name].append(runners[name].restore())
    ms = {name: statistics.median(t.ms for t in found) for name, found in times.items()}
    parts = {
        part: statistics.median(getattr(t, f"{part}_ms") for t in times["layerwise"])
        for part in ("l3", "load")
    }
    return {
        "mb_per_s": rate or None,
        "ms": ms,
        "layerwise_parts_ms": parts,
        "eager_vs_layerwise": ms["eager"] / ms["layerwise"],
        "eager_vs_larger_part": ms["eager"] / max(parts.values()),
        "kv_vs_eager": ms["kv"] / ms["eager"],
        "rounds": {name: [round(t.ms, 1) for t in found] for name, found in times.items()},
    }


def measure_gaps(runners: dict[str, Runner], rounds: int) -> Row:
    """Time between tokens of another request while each server restores; ``none``: nothing."""
    found: dict[str, list[list[float]]] = {name: [] for name in (*runners, "none")}
    for number in range(rounds):
        for name, runner in runners.items():
            found[name].append(runner.token_gaps(number + 1))
        found["none"].append(runners["layerwise"].token_gaps(number + 1, restore=False))
    return {
        name: {
            "tokens": GAPS,
            "mean_ms": statistics.median(map(statistics.fmean, gaps)),
            "median_ms": statistics.median(map(statistics.median, gaps)),
            "longest_ms": statistics.median(map(max, gaps)),
            "rounds_mean_ms": [round(statistics.fmean(one), 1) for one in gaps],
        }
        for name, gaps in found.items()
    }


def report(rows: list[Row], balanced: float, gaps: Row, device: str, options: Any) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "cores": os.cpu_count(),
        "model": SHAPE.describe(),
        "tokens": options.tokens,
        "balanced_mb_per_s": balanced,
        "rates": rows,
        "time_between_tokens": gaps,
    }
    (options.results / "eager.json").write_text(json.dumps(result, indent=2) + "\n")
    shown = table(
        "",
        "L3, MB/s#",
        "eager, ms#",
        "layer-wise, ms#",
        "KV, ms#",
        "of layer-wise#",
        "of larger part#",
        "KV / eager#",
    )
    for row in rows:
        rate, ms = row["mb_per_s"], row["ms"]
        shown.add_row(
            (f"{rate:g}" + (" =" if rate == balanced else "")) if rate else "no limit",
            *(f"{ms[name]:,.0f}" for name in METHODS),
            f"{row['eager_vs_layerwise']:.2f}",
            f"{row['eager_vs_larger_part']:.2f}",
            f"{row['kv_vs_eager']:.2f}",
        )
    screen.print(shown)
    for name, found in gaps.items():
        screen.print(
            f"{LABELS.get(name, 'no restore')}: {found['mean_ms']:.1f} ms between {GAPS} tokens of "
            f"another request (median: {found['median_ms']:.1f}, longest: "
            f"{found['longest_ms']:.0f})"
        )
    draw(rows, balanced, device, options.results / "eager.png")


def draw(rows: list[Row], balanced: float, device: str, path: Path) -> None:
    """Restore time by the rate of L3."""
    styles = {"kv": "--", "layerwise": "--", "eager": "-"}
    lines = {name: Line(LABELS[name], style) for name, style in styles.items()}
    words = (
        "L3, MB/s (dotted: reading takes as long as projecting)",
        "prefetch to last layer, ms",
        f"Restores from L3, {device}",
    )
    draw_by_rate(rows, lines, words, path, mark=balanced)


if __name__ == "__main__":
    main()
