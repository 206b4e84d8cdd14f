"""The same workload over methods and loads: TTFT, time between tokens, where hits were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.part import Part
from bench.harness import program
from bench.harness.methods import METHODS, PAGE_SIZE
from bench.harness.options import ADMIN_KEY
from bench.harness.restorer import l3_bytes
from bench.harness.server import Server
from bench.multiturn.driver import Pace
from bench.multiturn.run import Plan, Target, measure
from bench.workload.base import Workload

_SUMMARY = (
    *("total_requests", "failed_requests", "request_rate", "throughput"),
    *("average_ttft", "median_ttft", "p90_ttft", "p99_ttft"),
    *("average_itl", "median_itl", "p90_itl", "p99_itl", "average_tbt", "median_tbt", "p90_tbt"),
    *("cache_hit_rate", "device_hit_rate", "host_hit_rate", "storage_hit_rate"),
)


@dataclass(frozen=True, kw_only=True)
class LoadPlan(Part):
    """What every method is asked.

    Attributes:
        methods: Of :data:`~bench.harness.methods.SERVED`.
        rates: Requests or sessions a second, one run each.
        pool_tokens: Tokens of the device's pool; None: an eighth of all histories, so that most of
            them have to leave it, and more than the longest. The ideal method has room for all.
        host_ratio: Host memory, as a multiple of the pool.
    """

    methods: Sequence[str]
    workload: Workload
    rates: Sequence[float]
    pace: Pace
    pool_tokens: int | None
    host_ratio: float

    def pool_of(self, method: str) -> int:
        """Tokens of the device's pool of a server of ``method``."""
        histories = sum(map(self.workload.history, self.workload.sessions))
        longest = self.workload.longest + PAGE_SIZE
        if method == "ideal":
            return _pages(max(histories + longest, 2 * longest))
        if self.pool_tokens is not None:
            return _pages(self.pool_tokens)
        return _pages(max(histories / 8, 1.25 * longest))


def run(plan: LoadPlan) -> dict[str, Any]:
    """Run the workload with each method; what ``compare.json`` says of it.

    Raises:
        ServerError: A server did not start.
        UnusableServer: A server takes no request that long, could not be flushed, or
            refused a document that is prefilled.
    """
    found: dict[str, Any] = {}
    asked = Plan(plan.workload, plan.rates, plan.pace, plan.vocabulary)
    with program.steps(len(plan.methods)) as (bar, advance):
        for name in plan.methods:
            advance(f"{METHODS[name].title}: load")
            pool = plan.pool_of(name)
            options = plan.server(name, name, pool, hicache_ratio=plan.host_ratio, metrics=True)
            with Server(options) as server:
                measured = measure(Target(server.url, ADMIN_KEY), asked, bar)
            found[name] = {
                "title": METHODS[name].title,
                "pool_tokens": pool,
                "l3_bytes": l3_bytes(plan.folder / name / "l3"),
                "runs": [
                    {
                        **{key: run.parts["summary"][key] for key in _SUMMARY},
                        "l3": run.parts["l3"],
                        "errors": run.parts["errors"],
                    }
                    for run in measured
                ],
            }
    return {"workload": plan.workload.describe(), "methods": found}


def _pages(tokens: float) -> int:
    return math.ceil(tokens / PAGE_SIZE) * PAGE_SIZE
