"""The table of the host's waits."""

from __future__ import annotations

from tests.order.waits import AROUND, table

OURS = "hcache_backend/capture/ledger.py"


def wait(where: str, times: int) -> dict[str, object]:
    return {"thread": "MainThread", "how": "Event.synchronize", "where": where, "times": times}


def test_waits_are_told_by_the_innermost_function_of_ours() -> None:
    found = {
        "steps": 10,
        "written_nodes": 2,
        "host_waits": [
            wait(f"{OURS}:125 (settle) < hcache_backend/engine/controller.py:237 (write)", 3),
            wait(f"sglang/srt/a.py:1 (copy) < {OURS}:120 (settle)", 2),
            wait(f"sglang/srt/a.py:1 (copy) < {AROUND}:2 (run)", 1),
        ],
    }
    assert table(found) == [
        ("MainThread", f"{OURS}:settle", 5, 0.5, 2.5),
        ("MainThread", "sglang/srt/a.py:copy", 1, 0.1, 0.5),
    ]
