"""The pages of each prompt that a full page store still has, beside LRU and the best possible.

Frozen traces (:mod:`bench.workload.traces`) go through the store itself: its index, its ranks, its
eviction. Pages hold four bytes, and the clock is the trace's. Device and host memory (L1, L2) come
first and have room for 2% of the trace's pages. As in a server, the store is only told which pages
they serve, and a page is written once, when it is computed. Uses are saved every 5 seconds. The
program counts the pages of each prompt that the store has, from the first one on, whether L1 and L2
have them or not: a restart would find these. Quotas are shares of all pages of the trace.

- LRU by chains: every use counts at once for the whole sequence, and of pages that were last used
  by the same request the last one goes first
- best possible: knows all requests. A page is found if it was kept since its last use. If too many
  pages are kept, the one whose next use comes last is given up, which keeps as many as possible. A
  use of a page is a use of the pages before it, so ends of sequences go first, and all that is kept
  is found. No other order of eviction finds more pages

Ends with status 1 if the store misses a goal.
"""

import hashlib
import heapq
import mmap
import tempfile
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

from bench.harness.program import Program, Run, Setting, scratch
from bench.harness.report import Column, Columns, Picture, Results, Series, Table
from bench.workload.traces import TRACES, Request
from hcache_backend.config import parse_config
from hcache_backend.store import PageStore

SEED = 1
QUOTAS = (0.05, 0.1, 0.2, 0.4)
FRONT = 0.02  # pages of L1 and L2 together, of all pages of the trace
SAVE_S = 5.0  # seconds between two savings of uses, as in service
NAMESPACE, WRITER = b"bench-----------", b"bench---"
FILE_BYTES = 8192  # of a page of four bytes: a block of header, a block of payload
WORST_LOSS, LEAST_MEAN, LEAST_AT_5 = 0.01, 0.90, 0.84
SERIES = {"store": "the store", "lru": "LRU by chains", "best": "best possible"}
Row = dict[str, Any]


def leading(there: Container[int], pages: Sequence[int]) -> int:
    """How many of ``pages`` are there, from the first one on."""
    return next((place for place, page in enumerate(pages) if page not in there), len(pages))


class Chains:
    """The ``capacity`` pages that were used last; of one request's pages the last ones go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._pages: OrderedDict[int, None] = OrderedDict()

    def found(self, pages: Sequence[int]) -> int:
        return leading(self._pages, pages)

    def use(self, pages: Sequence[int]) -> None:
        """All ``pages`` of a sequence, from its first one on, are there now, and just used."""
        for page in reversed(pages):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)


def lru_by_chains(trace: Iterable[Request], capacity: int) -> int:
    """Pages of prompts that LRU by chains finds among ``capacity`` pages."""
    held, found = Chains(capacity), 0
    for request in trace:
        found += held.found(request.pages[: request.prompt])
        held.use(request.pages)
    return found


def best_possible(trace: Sequence[Request], capacity: int) -> int:
    """The most pages of prompts that anything can find among ``capacity`` pages."""
    following: dict[int, int] = {}  # number of the request that looks a page up next
    next_uses = []
    for number, request in reversed([*enumerate(trace)]):
        next_uses.append([following.get(page) for page in request.pages])
        following |= dict.fromkeys(request.pages[: request.prompt], number)
    held: dict[int, int] = {}  # page -> the request that it is kept for
    last: list[tuple[int, int]] = []  # the latest first; of pages that are kept, and others
    found = 0
    for request in trace:
        found += sum(held.pop(page, None) is not None for page in request.pages[: request.prompt])
        for page, needed in zip(request.pages, next_uses.pop(), strict=True):
            if needed is not None:
                held[page] = needed
                heapq.heappush(last, (-needed, page))
        while len(held) > capacity:
            needed, page = heapq.heappop(last)
            if held.get(page) == -needed:
                del held[page]
    return found


class StoreUnderTrace:
    """The store, told what an engine tells it, behind L1 and L2 of ``front`` pages."""

    def __init__(self, store: PageStore, front: int) -> None:
        self._store = store
        self._memory = Chains(front)
        self._page = memoryview(mmap.mmap(-1, mmap.PAGESIZE))[:4]
        self._saved = 0.0

    def serve(self, request: Request) -> int:
        """Look the prompt up and store the new pages; returns how many pages L3 had of it."""
        keys = [_key(page) for page in request.pages]
        prompt = keys[: request.prompt]
        found = [*self._store.exists(NAMESPACE, prompt), False].index(False)

        # SGLang asks for the pages behind those that L1 and L2 have.
        known = self._memory.found(request.pages[: request.prompt])
        self._store.use(NAMESPACE, keys[:known])
        known += [*self._store.exists(NAMESPACE, prompt[known:]), False].index(False)
        self._store.use(NAMESPACE, keys[:known])
        memory = [[self._page]] * (len(keys) - known)
        self._store.put(NAMESPACE, keys[known:], memory, prefix=keys[:known])
        self._memory.use(request.pages)
        if request.time >= self._saved + SAVE_S:
            self._store.flush()
            self._saved = request.time
        return found


@cache
def _key(page: int) -> bytes:
    return hashlib.sha256(page.to_bytes(8, "big")).digest()


@contextmanager
def clock_of(trace: Iterable[Request]) -> Iterator[Iterator[Request]]:
    """The requests one by one, with the process's clock (ns since 1970) at the time of each."""
    now = 0

    def requests() -> Iterator[Request]:
        nonlocal now
        for request in trace:
            now = 10**18 + int(request.time * 1e9)
            yield request

    with mock.patch("time.time_ns", lambda: now):
        yield requests()


def through_the_store(trace: Sequence[Request], capacity: int, front: int, folder: Path) -> int:
    """Pages of prompts that a store in ``folder`` finds with a quota of ``capacity`` pages."""
    options = {"quota_bytes": capacity * FILE_BYTES, "min_free_bytes": 0, "durability": "none"}
    config = parse_config({"dirs": [str(folder)], "io_threads": 1, **options}, "bench")
    with clock_of(trace) as requests, closing(PageStore(config, WRITER, background=False)) as store:
        server = StoreUnderTrace(store, front)
        return sum(map(server.serve, requests))


def under_trace(name: str, trace: Sequence[Request], folder: Path) -> Row:
    pages = len({page for request in trace for page in request.pages})
    asked = sum(request.prompt for request in trace)
    found = {}
    for quota in QUOTAS:
        start, capacity = time.perf_counter(), int(quota * pages)
        with scratch(folder) as root:
            stored = through_the_store(trace, capacity, int(FRONT * pages), Path(root) / "l3")
        counts = {
            "store": stored,
            "lru": lru_by_chains(trace, capacity),
            "best": best_possible(trace, capacity),
        }
        shares = found[f"{quota:.0%}"] = {by: count / asked for by, count in counts.items()}
        told = ", ".join(f"{label} {shares[by]:.3f}" for by, label in SERIES.items())
        print(f"{name}, {quota:.0%}: {told} ({time.perf_counter() - start:.0f} s)", flush=True)
    sizes = {"requests": len(trace), "pages": pages, "pages_asked": asked}
    return {"trace": name, **sizes, "found": found}


def of_the_best(rows: Sequence[Row], quota: str) -> float:
    """Share of the best possible that the store finds: the mean over the traces."""
    return mean(row["found"][quota]["store"] / row["found"][quota]["best"] for row in rows)


def missed_goals(rows: Sequence[Row]) -> list[str]:
    """Goals that the store does not reach, one line each."""
    missed = [
        f"{row['trace']}, {quota}: {found['store']:.3f} found, LRU by chains {found['lru']:.3f}"
        for row in rows
        for quota, found in row["found"].items()
        if found["store"] < found["lru"] - WORST_LOSS
    ]
    shares = {quota: of_the_best(rows, quota) for quota in rows[0]["found"]}
    for name, share, least in (
        ("at 5%", shares["5%"], LEAST_AT_5),
        ("mean of all quotas", mean(shares.values()), LEAST_MEAN),
    ):
        if share < least:
            missed.append(f"{name}: {share:.3f} of the best possible, not {least}")
    return missed


def table_rows(rows: Sequence[Row]) -> list[Row]:
    """Shares that are found of each trace; the last row has the means of the store's."""
    lines = [
        {
            quota: " / ".join(f"{shares[by]:.2f}" for by in SERIES)
            for quota, shares in row["found"].items()
        }
        | {"trace": row["trace"]}
        for row in rows
    ]
    means = {quota: of_the_best(rows, quota) for quota in rows[0]["found"]}
    return [*lines, {"trace": "the store, of the best possible", **means}]


def columns(rows: Sequence[Row]) -> Columns:
    return [Column(" / ".join(SERIES.values()), "trace"), *rows[0]["found"]]


def panels(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        row["trace"]: [{"quota": quota, **shares} for quota, shares in row["found"].items()]
        for row in rows
    }


def finding(rows: Sequence[Row]) -> str:
    shares = [of_the_best(rows, quota) for quota in rows[0]["found"]]
    return (
        f"On average over the traces a full store finds {min(shares):.2f} to {max(shares):.2f} of "
        "the pages that the best possible order finds"
    )


def measure(run: Run) -> Results:
    return [under_trace(name, make(SEED), run.given.dir) for name, make in TRACES.items()]


_SHARED = Path("/dev/shm")
FOLDER = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
PROGRAM = Program(
    name="eviction",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=(Setting("--dir", Path, FOLDER, "for the store, which is removed; best in memory"),),
    tables=Table(table_rows, columns),
    draw=Picture(
        title=finding,
        panels=panels,
        x="quota",
        x_label="quota, of all pages",
        y_label="pages of prompts found, of all",
        series=(
            Series(SERIES["lru"], "lru", "file", "s-"),
            Series(SERIES["store"], "store", "ours", ".--"),
            Series(SERIES["best"], "best", "limit", ":"),
        ),
        top=1,
    ),
    wrong=missed_goals,
)

if __name__ == "__main__":
    PROGRAM.run()
