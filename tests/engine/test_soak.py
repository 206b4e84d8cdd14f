"""Many clients for a long time, in pools that are too small: nothing is wrong and nothing leaks."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness.server import Server
from hcache_backend.config import HCacheConfig
from tests.engine.harness import ours
from tests.engine.harness.clients import Clients

pytestmark = pytest.mark.engine

IO_THREADS = HCacheConfig().io_threads
LONG_S = float(os.environ.get("HCACHE_TEST_SOAK_SECONDS", "300"))
"""How long each of the long forms talks."""
GROWTH = 1.05
"""Memory at the end may be so much of what it was after the warm-up."""
KINDS = ("replied", "aborted", "disconnected", "device", "host", "storage")
PARTITIONS = {
    "hidden": ours.partition(0, 4, 0),
    "all three": ours.partition(1, 2, 1),
    "K and V": ours.partition(0, 0, 4),
}


@pytest.mark.timeout(LONG_S + 1200)
@pytest.mark.parametrize(
    ("name", "seconds", "rounds", "samples"),
    [
        pytest.param("all three", 5.0, 3, 20, marks=pytest.mark.long, id="short"),
        pytest.param("hidden", LONG_S, 10, 200, marks=pytest.mark.long, id="hidden"),
        pytest.param("all three", LONG_S, 10, 200, marks=pytest.mark.long, id="all three"),
        pytest.param("K and V", LONG_S, 10, 200, marks=pytest.mark.long, id="K and V"),
    ],
)
def test_soak(
    name: str,
    seconds: float,
    rounds: int,
    samples: int,
    model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    report = tmp_path / "report"
    options = ours.our_server(
        model,
        tmp_path,
        hcache={"partition": PARTITIONS[name], "quota_bytes": 64 << 20},
        page_size=16,
        max_total_tokens=2048,
        hicache_ratio=1.5,
        extra_env={
            # The core that can be looked into.
            "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
            # What SGLang checks when it is idle it checks between batches too.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            **ours.faulty("report_holdings", report),
        },
    )
    seen = []
    with Server(options) as server:
        clients = Clients(server, 16, aborted=0.2, kept=samples)

        def everything() -> bool:
            """Each kind of end and of hit; a busy machine takes longer."""
            return len(clients.turns) == samples and all(clients.counts[kind] for kind in KINDS)

        for _ in range(rounds):
            clients.talk(seconds / rounds, until=everything)
            # SGLang checks its pools whenever it is idle, and ends itself when one leaks.
            server.wait_backed_up()
            seen.append(ours.holdings(server, report))
        record_property("talked_seconds", seconds)
        record_property("requests_and_tokens", dict(clients.counts))
        record_property("held_after_each_round", seen)
        assert server.generate([1, 2, 3], 2).output_ids
        ours.assert_sound_own_pages(server, "kv" if name == "K and V" else "hidden")
        assert "leak detected" not in server.log_text()
    for told in seen:
        assert told["locked_nodes"] == 0, seen
        assert told["host_tokens"] == told["host_tokens_in_tree"], seen
        # They are started when they are needed: as many as there are requests at once.
        assert told["store_threads"] <= 2 * IO_THREADS, seen
    warm = seen[: max(rounds // 3, 1)]
    threads = [told["threads"] - told["store_threads"] for told in seen]
    assert threads[-1] <= max(threads[: len(warm)]), seen
    assert seen[-1]["descriptors"] <= max(told["descriptors"] for told in warm), seen
    assert seen[-1]["memory_bytes"] <= GROWTH * max(told["memory_bytes"] for told in warm), seen
    ours.assert_no_cache_replies_up_to_ties(model, clients.turns)
    record_property("replies_equal_to_no_cache", samples)
