"""The time to the first token when L3 is slower or faster than computing.

SGLang serves random models on the CPU. A history is in L3 and nowhere else, and a question behind
it is asked, over an L3 that brings the history 0.1 to 4 times as fast as it is computed: without
L3 (HiCache in host memory, which has nothing of it), with ours reading every hit, with ours and its
default options, and with SGLang's `file` and `nixl` backends. The servers take turns, the others
stopped meanwhile, and are compared round by round: the table has medians, and the median of the
differences between default options and the better one of the first two, with an interval that
holds the true one with 95%.

L3 also stops while a history is being read, for five seconds and for good.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.program import at_least, failing, names, parser, stamp, steps
from bench.harness.report import OUT, write
from bench.harness.turns import Turns
from bench.hits.cases import ALWAYS, MODELS, OURS, WITH_FLAGS
from bench.hits.measure import at_speed, stalled
from bench.hits.report import draw, table_lines


def main() -> int:
    """Returns 1 if a reply differs from that of another server."""
    parsed = parser("bench.hits", __doc__)
    add = parsed.add_argument
    kinds = names([*MODELS, *WITH_FLAGS])
    add("--models", type=kinds, default=list(MODELS), help="kinds of models")
    add("--tokens", type=at_least(128), nargs="+", default=[1024, 4096], help="histories")
    speeds = [4.0, 2.0, 1.0, 0.5, 0.25, 0.1]
    add("--speeds", type=float, nargs="+", default=speeds, help="of L3; 1: as fast as computing")
    add("--rounds", type=at_least(1), default=9, help="requests to each server and speed")
    add("--out", type=Path, default=OUT, help="folder for hits.json and hits.png")
    given = parsed.parse_args()
    with failing():
        machine = find_machine()
        if machine.device != "cpu":
            raise MachineError("this slows the CPU engine down; see bench/gpu/ for GPUs")
        torch.set_num_threads(1)
        results = {**stamp(machine), "cores": os.cpu_count(), "cases": measure(machine, given)}
    print(table_lines(results))
    write(given.out, "hits", results, draw)
    points = [point for case in results["cases"] for point in case["points"]]
    return min(1, sum(point["differing_replies"] for point in points))


def measure(machine: Machine, given: Any) -> list[dict[str, Any]]:
    """All models and histories."""
    found = []
    total = len(given.models) * len(given.tokens) * (2 + len(given.speeds) * given.rounds)
    with (
        steps(total) as (_, advance),
        tempfile.TemporaryDirectory(prefix="hcache-bench-") as folder,
    ):
        for kind in given.models:
            for tokens in given.tokens:
                advance(f"{kind}, {tokens:,} tokens: starting servers")
                model = (MODELS | WITH_FLAGS)[kind]
                with model.turns(machine, Path(folder), tokens, **model.methods()) as turns:
                    case = _case(turns, given.speeds, given.rounds, advance)
                stored = {"pages": model.pages, "codec": model.codec, "dtype": model.dtype}
                found.append({"model": kind, **stored, "tokens": tokens, **case})
    return found


def _case(
    turns: Turns, speeds: Sequence[float], rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """What is measured with one model and one history."""
    advance("L3 stops")
    stalls = {
        "5 s, every hit read": stalled(turns, ALWAYS, 5.0),
        "5 s, default options": stalled(turns, OURS, 5.0),
        "for good, default options": stalled(turns, OURS, None),
    }
    # The fastest first: that L3 became slower is noticed by the next reads, faster only in time.
    points = [at_speed(turns, speed, rounds, advance) for speed in sorted(speeds, reverse=True)]
    return {
        "computing_ms": 1e3 * turns.computing,
        "bytes_per_token": {
            name: size / turns.tokens for name, size in turns.bytes.items() if size
        },
        "points": points,
        "stalled_ms": {name: 1e3 * seconds for name, seconds in stalls.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
