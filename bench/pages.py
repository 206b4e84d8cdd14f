"""What own pages of K and V cost beside SGLang's plain pages, on a real server.

SGLang serves a random Llama with grouped-query attention on the CPU. Two servers, alike but for
option ``pages``, take turns in changing order, the other one stopped meanwhile. In a turn a server

- computes two histories: ``backup`` is the time to copy their K and V to host memory, both together
- goes back to the first one, which the second drove off the device: ``load``, from host memory
- flushes its caches and goes back to it once more: ``restore``, from the start of the prefetch
  (L3, its page cache empty) to the last layer in the pool

Every turn is compared with the other server's turn of the same round. The table has medians, the
median of the differences, and an interval that holds the true one with 95%.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import comb
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import PAGE_SIZE, Method, server_options
from bench.harness.models import TinyLlama
from bench.harness.program import at_least, failing, parser, stamp
from bench.harness.report import COLOURS, OUT, markdown, picture, write
from bench.harness.restorer import Restorer, restorer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = TinyLlama(layers=8, hidden=1024, heads=8, kv_heads=4, intermediate=1024)
"""In float32 K and V of a page have as many bytes as those of Llama-3-8B in bfloat16."""
METHODS = {
    kind: Method(f"{kind} pages", storage="dynamic", hcache={"mode": "kv", "pages": kind})
    for kind in ("plain", "own")
}
LEAST_ROUNDS = 6
"""Fewer have no interval."""


class Turn(NamedTuple):
    """What one server took in one round, in milliseconds."""

    backup: float
    load: float
    restore: float


def measure(machine: Machine, tokens: int, rounds: int) -> dict[str, list[Turn]]:
    """The turns of each server, round by round.

    Args:
        tokens: Of a history; whole pages.

    Raises:
        ServerError: A server did not start, or a history did not come back.
    """
    found: dict[str, list[Turn]] = {kind: [] for kind in METHODS}
    with tempfile.TemporaryDirectory(prefix="hcache-bench-") as scratch, ExitStack() as stack:
        model = SHAPE.build(Path(scratch))
        servers = {
            kind: stack.enter_context(_started(machine, model, kind, tokens)) for kind in METHODS
        }
        for number in range(rounds + 1):
            order = list(servers)
            random.Random(number).shuffle(order)
            for kind in order:
                with servers[kind].turn():
                    found[kind].append(_turn(servers[kind], tokens, number))
            print(f"{number} of {rounds} rounds", flush=True)
    return {kind: turns[1:] for kind, turns in found.items()}  # the first does more


@contextmanager
def _started(machine: Machine, model: Path, kind: str, tokens: int) -> Iterator[Restorer]:
    """A server with pages of a kind, stopped but for its turns."""
    options = server_options(
        METHODS[kind],
        machine,
        model,
        model.parent / kind,
        pool_tokens=tokens + tokens // 2,  # one history, not two
        hicache_ratio=3.0,
        extra_args=("--mem-fraction-static", "0.5"),  # the other's weights count as used
    )
    with restorer(options, model.parent / kind / "l3") as server:
        with server.turn():
            pass
        yield server


def _turn(restored: Restorer, tokens: int, number: int) -> Turn:
    server, source = restored.server, random.Random(number)
    first, second = ([source.randrange(SHAPE.vocabulary) for _ in range(tokens)] for _ in range(2))
    restored.skip_trace()
    for history in (first, second):
        server.generate(history, 1)
    server.wait_backed_up()
    backup = _time(restored, "backup", 2 * tokens)
    server.generate([*first, 0], 1)
    load = _time(restored, "load", tokens)
    server.flush_cache()
    return Turn(backup, load, restored.restore(first).ms)


def _time(restored: Restorer, stage: str, tokens: int) -> float:
    """Milliseconds of the events of a stage since the last look, which must have had ``tokens``."""
    events = [event for event in restored.events() if event.stage == stage]
    had = sum(event.tokens for event in events)
    if had != tokens:
        raise restored.server.error(f"{stage} of {had} tokens; it was to be of {tokens}")
    return sum(event.ms for event in events)


def compared(turns: Mapping[str, Sequence[Turn]]) -> dict[str, dict[str, Any]]:
    """For each part of a turn: medians, and the difference of own from plain pages."""
    found = {}
    for part in Turn._fields:
        plain, own = ([getattr(one, part) for one in turns[kind]] for kind in ("plain", "own"))
        differences = [b - a for a, b in zip(plain, own, strict=True)]
        usual = median(plain)
        found[part] = {
            "plain_ms": usual,
            "own_ms": median(own),
            "difference_ms": median(differences),
            "interval_ms": median_interval(differences),
            "own_of_plain": 1 + median(differences) / usual,
            "interval": [1 + end / usual for end in median_interval(differences)],
        }
    return found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Ends of an interval that holds the true median with 95%, however values are distributed.

    Args:
        values: At least six, independent of each other.
    """
    ordered, total, outside = sorted(values), 2 ** len(values), 0.0
    for rank in range(len(ordered)):
        outside += 2 * comb(len(ordered), rank) / total
        if outside > 0.05:
            break
    assert rank, "there are too few values"
    return ordered[rank - 1], ordered[-rank]


def table_lines(results: Mapping[str, Any]) -> str:
    """A row for each part of a turn."""
    names = {
        "backup": "backup to host memory",
        "load": "load from host memory",
        "restore": "restore from L3",
    }
    heads = ("", "plain pages, ms", "own pages, ms", "difference, ms", "own / plain", "95%")
    rows = [
        (
            names[part],
            f"{row['plain_ms']:.1f}",
            f"{row['own_ms']:.1f}",
            f"{row['difference_ms']:+.1f}",
            row["own_of_plain"],
            tuple(row["interval"]),
        )
        for part, row in results["compared"].items()
    ]
    return markdown(heads, rows)


def draw(results: Mapping[str, Any]) -> Figure:
    """Each round's difference, as a share of plain pages' median."""
    said = [f"{part} {row['own_of_plain']:.2f}" for part, row in results["compared"].items()]
    figure = picture(f"Own pages take, of the time of plain pages: {', '.join(said)}", 3.5)
    axes = figure.subplots()
    plain, own = (results["turns_ms"][kind] for kind in ("plain", "own"))
    for place, row in enumerate(results["compared"].values()):
        usual = row["plain_ms"]
        pairs = zip(plain, own, strict=True)
        shares = [100 * (b[place] - a[place]) / usual for a, b in pairs]
        axes.scatter(shares, [place] * len(shares), alpha=0.4, color=COLOURS["ours"])
        ends = [100 * (end - 1) for end in row["interval"]]
        axes.plot(ends, [place + 0.25] * 2, color=COLOURS["limit"], linewidth=2)
        middle = 100 * (row["own_of_plain"] - 1)
        axes.plot(middle, place + 0.25, "|", color=COLOURS["limit"], markersize=12)
    axes.axvline(0, color=COLOURS["file"])
    axes.set_yticks(range(len(Turn._fields)), Turn._fields, fontsize=10)
    axes.invert_yaxis()
    axes.set_xlabel(
        "\N{LEFTWARDS ARROW} faster    own pages against plain pages, %    slower "
        "\N{RIGHTWARDS ARROW}\ndots: rounds; black: median and its 95% interval",
        fontsize=10,
    )
    return figure


def main() -> None:
    parsed = parser("bench.pages", __doc__)
    parsed.add_argument(
        "--rounds", type=at_least(LEAST_ROUNDS), default=15, help="turns of each server"
    )
    parsed.add_argument(
        "--tokens", type=at_least(PAGE_SIZE), default=1024, help="of a history; whole pages of 64"
    )
    parsed.add_argument("--out", type=Path, default=OUT, help="folder for pages.json, pages.png")
    options = parsed.parse_args()
    tokens = options.tokens // PAGE_SIZE * PAGE_SIZE
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("this compares copies on the CPU engine; see bench/gpu/ for GPUs")
        turns = measure(machine, tokens, options.rounds)
    results = {
        **stamp(machine),
        "cores": os.cpu_count(),
        "model": SHAPE.describe(),
        "tokens": tokens,
        "turns_ms": turns,
        "compared": compared(turns),
    }
    print(table_lines(results))
    write(options.out, "pages", results, draw)


if __name__ == "__main__":
    main()
