"""The table of the host's waits."""

from __future__ import annotations

from tests.order.waits import AROUND, in_service, table

OURS = "hcache_backend/capture/ledger.py"


def wait(where: str, times: int, *, idle: bool = True) -> dict[str, object]:
    how = {"thread": "MainThread", "how": "Event.synchronize", "idle": idle}
    return {**how, "where": where, "times": times}


def test_waits_are_told_by_the_innermost_function_of_ours() -> None:
    found = {
        "steps": 10,
        "written_nodes": 2,
        "host_waits": [
            wait(f"{OURS}:125 (settle) < hcache_backend/sglang/controller.py:237 (write)", 3),
            wait(f"sglang/srt/a.py:1 (copy) < {OURS}:120 (settle)", 2),
            wait(f"sglang/srt/a.py:1 (copy) < {AROUND}:2 (run)", 1),
        ],
    }
    assert table(found) == [
        ("MainThread", f"{OURS}:settle", 5, 0.5, 2.5),
        ("MainThread", "sglang/srt/a.py:copy", 1, 0.1, 0.5),
    ]


def test_waits_that_hold_nothing_up_are_told_apart() -> None:
    idle = f"{OURS}:9 (settle) < hcache_backend/sglang/controller.py:7 (_finish_when_idle)"
    other = wait(f"{OURS}:9 (settle)", 1) | {"thread": "Thread-7"}
    waits = [
        wait(idle, 4),
        wait(idle, 8, idle=False),  # forward passes are under way after all
        wait(f"{OURS}:9 (settle) < hcache_backend/sglang/controller.py:3 (write)", 2),
        wait(f"{OURS}:9 (settle) < hcache_backend/host/loads.py:3 (_finish_when_idle)", 1),
        wait(f"sglang/srt/a.py:1 (copy) < {AROUND}:2 (run)", 1),
        other,
    ]
    found = in_service({"steps": 1, "written_nodes": 1, "host_waits": waits})
    assert [row[1:3] for row in table(found)] == [(f"{OURS}:settle", 11)]
