"""Where the scheduler's thread waited for the device, of a server under the checker."""

from typing import Any

OURS = "hcache_backend/"
AROUND = tuple(
    f"{OURS}sglang/{name}.py"
    for name in ("hook_registry", "model_runner", "radix_cache", "scheduler", "storage_threads")
)
"""They stand around functions of SGLang; what these wait for is theirs."""

NOTHING_RUNS = {
    f"{OURS}host/node_backups.py:settle_when_idle": (
        "no forward pass was launched since the last turn"
    ),
    f"{OURS}sglang/host_pool.py:clear": "a flush, which HiCache does when no request is there",
}
"""Functions of ours that may wait where no forward pass is under way, and why none is."""


def in_service(found: dict[str, Any]) -> list[list[str]]:
    """Waits of ours that hold up the scheduler's thread, in a report of ``plugin/hcache_order.py``:
    for each the functions of ours that it is in, the innermost first, as ``file:function``."""
    waits = []
    for wait in found["host_waits"]:
        frames = wait["where"].split(" < ")
        ours = [_place(f) for f in frames if f.startswith(OURS) and not f.startswith(AROUND)]
        harmless = wait["idle"] and not NOTHING_RUNS.keys().isdisjoint(ours)
        if ours and not harmless and wait["thread"] == "MainThread":
            waits.append(ours)
    return waits


def _place(frame: str) -> str:
    """``file:function`` of ``file:line (function)``."""
    file, _, function = frame.rpartition(" ")
    return f"{file.rpartition(':')[0]}:{function.strip('()')}"
