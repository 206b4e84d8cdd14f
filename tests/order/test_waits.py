"""Which waits of the host hold something up."""

from tests.order.waits import AROUND, in_service

OURS = "hcache_backend/capture/ledger.py"
BACKUPS = "hcache_backend/host/node_backups.py"
CONTROLLER = "hcache_backend/sglang/controller.py"


def wait(where: str, *, idle: bool = True, thread: str = "MainThread") -> dict[str, object]:
    how = {"thread": thread, "how": "Event.synchronize", "idle": idle}
    return {**how, "where": where, "times": 1}


def test_waits_that_hold_nothing_up_are_told_apart() -> None:
    idle = f"{OURS}:9 (settle) < {BACKUPS}:7 (settle_when_idle)"
    waits = [
        wait(idle),
        wait(idle, idle=False),  # forward passes are under way after all
        wait(f"{OURS}:9 (settle) < hcache_backend/host/loads.py:3 (settle_when_idle)"),
        wait(f"sglang/srt/a.py:1 (copy) < {CONTROLLER}:3 (write)"),
        wait(f"sglang/srt/a.py:1 (copy) < {AROUND[0]}:2 (run)"),
        wait(f"{OURS}:9 (settle)", thread="Thread-7"),
    ]
    assert in_service({"host_waits": waits}) == [
        [f"{OURS}:settle", f"{BACKUPS}:settle_when_idle"],
        [f"{OURS}:settle", "hcache_backend/host/loads.py:settle_when_idle"],
        [f"{CONTROLLER}:write"],
    ]
