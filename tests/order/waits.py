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
AROUND = tuple(
    f"{OURS}sglang/{name}.py"
    for name in ("hook_registry", "model_runner", "radix_cache", "scheduler", "storage_threads")
)
"""They stand around functions of SGLang; what these wait for is theirs."""


NOTHING_RUNS = {
    f"{OURS}sglang/controller.py:_finish_when_idle": (
        "no forward pass was launched since the last turn"
    ),
    f"{OURS}sglang/host_pool.py:clear": "a flush, which HiCache does when no request is there",
}
"""Functions of ours that may wait where no forward pass is under way, and why none is."""


def in_service(found: dict[str, Any]) -> dict[str, Any]:
    """The part of a report about waits of ours on the scheduler thread that hold something up."""

    def is_ours(wait: dict[str, Any]) -> bool:
        ours = [_place(f) for f in wait["where"].split(" < ") if _is_ours(f)]
        harmless = wait["idle"] and not NOTHING_RUNS.keys().isdisjoint(ours)
        return bool(ours) and not harmless and wait["thread"] == "MainThread"

    return {**found, "host_waits": [wait for wait in found["host_waits"] if is_ours(wait)]}


def _is_ours(frame: str) -> bool:
    return frame.startswith(OURS) and not frame.startswith(AROUND)


def _place(frame: str) -> str:
    """``file:function`` of ``file:line (function)``."""
    file, _, function = frame.rpartition(" ")
    return f"{file.rpartition(':')[0]}:{function.strip('()')}"


def table(found: dict[str, Any]) -> list[tuple[str, str, int, float, float]]:
    """Thread, place, waits, waits per forward pass, waits per written node; the most first.

    A place is ``file:function``: the innermost one of ours, or of SGLang if none of ours is near.

    Args:
        found: A report of ``plugin/hcache_order.py``.
    """
    waits = Counter[tuple[str, str]]()
    for wait in found["host_waits"]:
        frames = wait["where"].split(" < ")
        nearest = next(filter(_is_ours, frames), frames[0])
        waits[wait["thread"], _place(nearest)] += wait["times"]
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
