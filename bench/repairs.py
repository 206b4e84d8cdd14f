"""Would it pay to write pages again that L3 evicted while host memory still had them?

Traces of coding agents (those of callanjfox/kv-cache-tester as JSON, compressed by xz) go through a
model of the page store and of the host memory above it. A session is ``{"tool", "sys",
"requests"}``: tokens of tools and of the system prompt, and its requests. Each has the second ``t``
and ``hash_ids``, one for 64 tokens: the number that it shares with the request before, and the
others. Sessions begin at random within a day. Pages have 512 tokens. A page is written once, when
it is computed. The store ranks and evicts as ``hcache_backend/store/eviction.py`` does: ranks fall
along a sequence, uses in host memory count, young uses are not entered, and 2% of the quota goes at
once. The other variant also writes every page of a prompt again that host memory has and the store
lacks.

Counted are the tokens of prompts that need not be computed: pages in host memory from the first one
on, and then pages in the store. "After a restart" host memory counts as empty at every request.
Ends with status 1 if repairs save more than 1%.
"""

from __future__ import annotations

import heapq
import json
import lzma
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.eviction import Chains, leading
from bench.harness.program import Program, Run, Setting
from bench.harness.report import Results, Table
from bench.workload.traces import Request

SEED = 1
QUOTAS = (0.05, 0.1, 0.2, 0.4)
FRONTS = (0.02, 0.1)
"""Host memory, of all pages of the trace."""
DAY_S = 86400.0
IDS_PER_PAGE, ID_TOKENS = 8, 64
LOW_WATER, YOUNG = 0.98, 16
WORTH = 0.01
"""Share of the tokens of prompts from which on repairs would be worth their code."""
Row = dict[str, Any]


def agent_requests(path: Path, sessions: int | None = None) -> list[Request]:
    """Requests of the first ``sessions`` sessions, in the order of time. Sessions with the same
    tools and system prompt share its pages."""
    rng, numbers = random.Random(SEED), dict[tuple[Any, ...], int]()
    requests = []
    with lzma.open(path) as file:
        traces = json.load(file)[:sessions]
    for session, trace in enumerate(traces):
        start, ids = rng.uniform(0, DAY_S), list[int]()
        common, shared = (trace["tool"], trace["sys"]), sum((trace["tool"], trace["sys"]))
        for request in trace["requests"]:
            if "hash_ids" not in request:
                continue
            kept, *new = request["hash_ids"]
            ids = [*ids[:kept], *new]
            pages = [
                (common if (at + IDS_PER_PAGE) * ID_TOKENS <= shared else session, at, ids[at + 7])
                for at in range(0, len(ids) - IDS_PER_PAGE + 1, IDS_PER_PAGE)
            ]
            known = [numbers.setdefault(page, len(numbers)) for page in pages]
            requests.append(Request(start + request["t"], known, len(known)))
    return sorted(requests, key=lambda request: request.time)


class RankedStore:
    """The pages of a store with room for ``capacity``, each with its eviction rank (ns)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.ranks: dict[int, int] = {}
        self._oldest: list[tuple[int, int]] = []  # also of pages that have other ranks now

    def use(self, pages: Sequence[int], now: int) -> list[int]:
        """The ``pages`` of a sequence are used; returns the places of those that are missing."""
        young, epoch, missing = self._young(now), now, []
        for place, page in enumerate(pages):
            rank = self.ranks.get(page)
            if rank is None:
                missing.append(place)
            elif rank + place >= young:
                epoch = min(epoch, rank + place)
            else:
                self._rank(page, max(rank, epoch - place))
        return missing

    def put(self, pages: Sequence[int], places: Sequence[int], now: int) -> None:
        """Store the pages at ``places`` of a sequence that is used."""
        for place in places:
            self._rank(pages[place], now - place)
        if len(self.ranks) > self._capacity:
            while len(self.ranks) > LOW_WATER * self._capacity:
                rank, page = heapq.heappop(self._oldest)
                if self.ranks.get(page) == rank:
                    del self.ranks[page]

    def _rank(self, page: int, rank: int) -> None:
        self.ranks[page] = rank
        heapq.heappush(self._oldest, (rank, page))

    def _young(self, now: int) -> int:
        while self._oldest and self.ranks.get(self._oldest[0][1]) != self._oldest[0][0]:
            heapq.heappop(self._oldest)
        return now - (now - self._oldest[0][0]) // YOUNG if self._oldest else now


def served(trace: Sequence[Request], quota: int, front: int, *, repairs: bool) -> Row:
    """Pages of prompts that are found, in memory or L3, and in L3 alone; pages written again."""
    store, memory = RankedStore(quota), Chains(front)
    found, alone, again = 0, 0, 0
    for request in trace:
        now, pages = int(request.time * 1e9), request.pages
        alone += leading(store.ranks, pages)
        known = memory.found(pages)
        missing = store.use(pages[:known], now)
        if repairs and missing:
            store.put(pages, missing, now)
            again += len(missing)
        here = known + leading(store.ranks, pages[known:])
        store.use(pages[known:here], now - known)
        store.put(pages, range(here, len(pages)), now)
        memory.use(pages)
        found += here
    return {"found": found, "alone": alone, "again": again}


def measure(run: Run) -> Results:
    """Every size of host memory with every quota."""
    trace = agent_requests(run.given.traces, run.given.sessions)
    pages = len({page for request in trace for page in request.pages})
    asked = sum(len(request.pages) for request in trace)
    rows: list[Row] = []
    for front in FRONTS:
        for quota in QUOTAS:
            start, sizes = time.perf_counter(), (int(quota * pages), int(front * pages))
            without, repaired = (served(trace, *sizes, repairs=on) for on in (False, True))
            rows.append(
                {"front": front, "quota": quota, "written_again": repaired["again"] / pages}
            )
            for name in ("found", "alone"):
                rows[-1][name] = without[name] / asked
                rows[-1][f"saved_{name}"] = (repaired[name] - without[name]) / asked
            print(f"{rows[-1]} ({time.perf_counter() - start:.0f} s)", flush=True)
    return {"requests": len(trace), "pages": pages, "pages_asked": asked, "rows": rows}


PROGRAM = Program(
    name="repairs",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(
        Setting("traces", Path, None, "the traces, as xz"),
        Setting("--sessions", int, None, "only the first sessions"),
    ),
    tables={
        "table": (
            Table(
                "rows",
                "host memory, of all tokens = front :.0% | L3, of all tokens = quota :.0% | "
                "found = found :.3f | more with repairs = saved_found :.2% | "
                "found after a restart = alone :.3f | more with repairs = saved_alone :.2%",
            ),
        )
    },
    wrong=lambda results: [
        f"L3 of {row['quota']:.0%}: repairs save {row['saved_found']:.1%} of the tokens of prompts"
        for row in results["rows"]
        if row["saved_found"] > WORTH
    ],
)

if __name__ == "__main__":
    PROGRAM.run()
