"""Where the host waited for the device, of a scheduler under the checker.

python -m tests.order.waits order.json.0
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OURS = "hcache_backend/"
AROUND = "hcache_backend/engine/hooks.py"
"""Stands around functions of SGLang; what they wait for is theirs."""


NOTHING_RUNS = {
    "(_finish_when_idle)": "no forward pass was launched since the last turn",
    "(clear)": "a flush, which HiCache does when no request is there",
}
"""Functions of ours that may wait, and why nothing is late because of them."""


def in_service(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a report about waits of ours on the scheduler thread that hold something up."""

    def is_ours(wait: dict[str, Any]) -> bool:
        frames = wait["where"].split(" < ")
        ours = [f for f in frames if f.startswith(OURS) and not f.startswith(AROUND)]
        harmless = any(f.endswith(name) for f in ours for name in NOTHING_RUNS)
        return bool(ours) and not harmless and wait["thread"] == "MainThread"

    return {**found, "host_waits": [wait for wait in found["host_waits"] if is_ours(wait)]}


def table(found: dict[str, Any]) -> list[tuple[str, str, int, float, float]]:
    """Thread, place, waits, waits per forward pass, waits per written node; the most first.

    A place is ``file:function``: the innermost one of ours, or of SGLang if none of ours is near.

    Args:
        found: A report of ``plugin/hcache_order.py``.
    """
    waits = Counter[tuple[str, str]]()
    for wait in found["host_waits"]:
        frames = wait["where"].split(" < ")
        ours = (f for f in frames if f.startswith(OURS) and not f.startswith(AROUND))
        nearest = next(ours, frames[0])
        file, _, function = nearest.rpartition(" ")
        waits[wait["thread"], f"{file.rpartition(':')[0]}:{function.strip('()')}"] += wait["times"]
    return [
        (*where, times, times / max(1, found["steps"]), times / max(1, found["written_nodes"]))
        for where, times in waits.most_common()
    ]


def main() -> None:
    found = json.loads(Path(sys.argv[1]).read_text())
    print(f"{found['steps']} forward passes, {found['written_nodes']} written nodes")
    print(f"{'waits':>6} {'/ pass':>7} {'/ node':>7}  place (thread)")
    for thread, place, times, per_step, per_node in table(found):
        print(f"{times:6} {per_step:7.2f} {per_node:7.2f}  {place} ({thread})")


if __name__ == "__main__":
    main()
