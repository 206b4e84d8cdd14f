"""What a small host tier keeps of agents' prompts, by several orders of eviction.

Sessions of agents (:mod:`bench.workload.agents`) begin within six hours and take turns. The program
counts the pages of each prompt that a tier of some size still has, from the first one on, and the
pages that are written to it. Sizes are shares of all pages of the workload. ``--trace`` adds the
sessions of a file to the generated ones.

- LRU by chains: as HiCache evicts host memory, the ends of the sessions that were used least
  recently go first
- expected return: the session goes first whose pages are least likely to be used soon for the time
  that they would be kept. It is told by how long sessions were idle so far, all of them and this
  one. HiCache's order cannot be changed to it without private hooks
- announced: LRU by chains, and a hint some seconds before each turn brings the session's pages back
  from an L3 that has all
- the page store: our L3 as it evicts, without host memory before it
- best possible: knows all requests, see :mod:`bench.eviction`
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.eviction import FOLDER, WORST_LOSS, best_possible, leading, through_the_store
from bench.harness.program import Advance, Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Column, Picture, Results, Row, Series, Table, by
from bench.workload.agents import Session, agent_sessions, as_requests, generated, prefix_share
from bench.workload.traces import Request

SEED, SPAN_S, PAGE_TOKENS = 1, 6 * 3600.0, 1024
SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)
AHEAD_S = 3.0  # of a hint
SERIES = {
    "lru": "LRU by chains",
    "announced": "announced",
    "returns": "expected return",
    "store": "the page store",
    "best": "best possible",
}
Told = Sequence[tuple[int, Request]]


@dataclass
class Held:
    """Pages of a session, and how many of them, from the first one on, the tier has."""

    pages: Sequence[int] = ()
    there: int = 0
    last: float = 0.0
    pauses: int = 0
    longer: float = 0.0  # sum of the logarithms of its pauses, less their mean


class Returns:
    """How soon sessions come back: pauses so far, by how long they were for the session."""

    _EDGES: npt.NDArray[np.float64] = np.concatenate([[0.0], np.geomspace(1, 20_000, 60)])
    _RENEWED, _PRIOR, _ENDED = 200, 4.0, 0.02  # share of the turns that are the last ones

    def __init__(self) -> None:
        self._counts = np.full(len(self._EDGES), 0.2)
        self._mean, self._seen = math.log(15.0), 0
        self._soon = self._table()

    def paused(self, held: Held, seconds: float) -> None:
        """A session came back after so long."""
        length = math.log(max(1.0, seconds))
        place = int(np.searchsorted(self._EDGES, seconds / self._usual(held)))
        self._counts[min(place, len(self._EDGES) - 1)] += 1
        self._mean += 0.001 * (length - self._mean)
        held.longer, held.pauses = held.longer + length - self._mean, held.pauses + 1
        self._seen += 1
        if self._seen % self._RENEWED == 0:
            self._soon = self._table()

    def soon(self, held: Held, now: float) -> float:
        """Uses per second of keeping the session's pages, at best."""
        usual = self._usual(held)
        return float(np.interp((now - held.last) / usual, self._EDGES, self._soon)) / usual

    def _usual(self, held: Held) -> float:
        """Pauses of a session, relative to all."""
        return math.exp(held.longer / (held.pauses + self._PRIOR))

    def _table(self) -> npt.NDArray[np.float64]:
        """For each time since the last use: the largest chance of a use within some time, for each
        second that pages are kept until the use or that time."""
        edges, counts = self._EDGES, self._counts
        sooner = np.concatenate([[0.0], np.cumsum(counts)[:-1]])
        alive = counts.sum() / (1 - self._ENDED) - sooner
        found = np.zeros(len(edges))
        for place in range(len(edges)):
            chance = counts[place + 1 :] / alive[place]
            used = np.cumsum(chance)
            kept = np.cumsum(np.diff(edges[place:]) * (1 - used + chance / 2))
            found[place] = (used / kept).max(initial=0.0)
        return found


@dataclass
class Tier:
    """``capacity`` pages, of which :meth:`serve` finds those of prompts. ``order``: by :meth:`lru`
    or :meth:`returns`. ``written`` pages were computed, ``brought`` ones came from L3."""

    capacity: int
    order: str
    found: int = 0
    written: int = 0
    brought: int = 0
    _sessions: dict[int, Held] = field(default_factory=dict)
    _returns: Returns = field(default_factory=Returns)
    _filled: int = 0

    def serve(self, number: int, request: Request) -> None:
        held = self._sessions.setdefault(number, Held())
        if held.pages:
            self._returns.paused(held, request.time - held.last)
        there = leading(set(held.pages[: held.there]), request.pages)
        self.found += there
        self.written += len(request.pages) - there
        self._filled += len(request.pages) - held.there
        held.pages = request.pages
        self._keep(held, request.time)

    def announce(self, number: int, now: float) -> None:
        """A session comes back soon: L3 brings what the tier lacks."""
        held = self._sessions[number]
        missing = len(held.pages) - held.there
        if missing:
            self.brought, self._filled = self.brought + missing, self._filled + missing
            self._keep(held, now)

    def _keep(self, held: Held, now: float) -> None:
        held.there, held.last = len(held.pages), now
        if self._filled > self.capacity:
            for one in getattr(self, self.order)(now):
                gone = min(one.there, self._filled - self.capacity)
                one.there, self._filled = one.there - gone, self._filled - gone

    def lru(self, now: float) -> list[Held]:
        """Sessions, the first to be evicted first."""
        return sorted(self._there(), key=lambda one: one.last)

    def returns(self, now: float) -> list[Held]:
        return sorted(self._there(), key=lambda one: self._returns.soon(one, now))

    def _there(self) -> list[Held]:
        return [one for one in self._sessions.values() if one.there]


def announced(told: Told, capacity: int) -> Tier:
    """A tier that hears of each turn some seconds before, but not before the one before it."""
    tier, events, last = Tier(capacity, "lru"), list[tuple[float, int]](), dict[int, float]()
    for place, (number, request) in enumerate(told):
        if number in last:
            events.append((max(last[number], request.time - AHEAD_S), 2 * place - 1))
        events.append((request.time, 2 * place))
        last[number] = request.time
    for time, event in sorted(events):
        number, request = told[(event + 1) // 2]
        if event % 2:
            tier.announce(number, time)
        else:
            tier.serve(number, request)
    return tier


def under(name: str, sessions: Sequence[Session], advance: Advance) -> list[Row]:
    told = as_requests(sessions, PAGE_TOKENS, SEED, SPAN_S)
    trace = [request for _, request in told]
    uses = Counter(page for request in trace for page in request.pages)
    pages, asked = len(uses), sum(request.prompt for request in trace)
    once = sum(number == 1 for number in uses.values()) / pages
    facts = {"workload": name, "requests": len(trace), "pages": pages, "pages_asked": asked}
    facts |= {"prefix_share": prefix_share(sessions), "used_once": once}
    return [{**facts, **_at(share, told, pages, asked, advance, name)} for share in SHARES]


def _at(
    share: float, told: Told, pages: int, asked: int, advance: Advance, name: str
) -> dict[str, Any]:
    capacity, trace = int(share * pages), [request for _, request in told]
    advance(f"{name}, {share:.0%}")
    tiers = {order: Tier(capacity, order) for order in ("lru", "returns")}
    for tier in tiers.values():
        for number, request in told:
            tier.serve(number, request)
    tiers["announced"] = announced(told, capacity)
    with scratch(FOLDER) as folder:
        stored = through_the_store(trace, capacity, 0, Path(folder) / "l3")
    found = {order: tier.found for order, tier in tiers.items()}
    found |= {"store": stored, "best": best_possible(trace, capacity)}
    return {
        "share": f"{share:.0%}",
        "found": {by: number / asked for by, number in found.items()},
        "of_best": {by: number / found["best"] for by, number in found.items()},
        "written": {order: tier.written / pages for order, tier in tiers.items()},
        "brought": tiers["announced"].brought / pages,
    }


def measure(run: Run) -> Results:
    given, rows = run.given, list[Row]()
    workloads: dict[str, Callable[[], Sequence[Session]]] = {
        "generated": partial(generated, given.sessions, SEED)
    }
    if given.trace is not None:
        workloads["trace"] = partial(_drawn, given.trace, given.sessions)
    with steps(len(workloads) * len(SHARES)) as advance:
        for name, sessions in workloads.items():
            rows += under(name, sessions(), advance)
    return {"rows": rows}


def sessions_of(given: Any) -> Sequence[Session]:
    """Those of the trace if there is one, otherwise generated ones."""
    if given.trace is not None:
        return _drawn(given.trace, given.sessions)
    return generated(given.sessions, SEED)


def session_settings(sessions: int) -> tuple[Setting, ...]:
    """Settings of programs with sessions, so many by default."""
    return (
        Setting("--sessions", at_least(1), sessions, "sessions, generated or of the trace"),
        Setting("--trace", Path, None, "a file of sessions, see bench/workload/agents.py"),
    )


def _drawn(path: Path, count: int) -> list[Session]:
    """So many sessions of a trace, or all."""
    sessions = [session for session in agent_sessions(path) if session]
    chosen = np.random.default_rng(SEED).permutation(len(sessions))[:count]
    return [sessions[place] for place in chosen]


def missed_goals(results: Results) -> list[str]:
    """Sizes at which expected return finds fewer pages than LRU by chains, one line each."""
    return [
        f"{row['workload']}, {row['share']}: {row['found']['returns']:.3f} found, LRU by chains "
        f"{row['found']['lru']:.3f}"
        for row in results["rows"]
        if row["found"]["returns"] < row["found"]["lru"] - WORST_LOSS
    ]


def finding(results: Results) -> str:
    small = [row for row in results["rows"] if row["share"] == f"{SHARES[0]:.0%}"]
    lru, order, told = (
        min(row["of_best"][by] for row in small) for by in ("lru", "returns", "announced")
    )
    return (
        f"A tier of {SHARES[0]:.0%} finds {lru:.2f} of what the best order finds, by expected "
        f"return {order:.2f}, and {told:.2f} if hints bring sessions back {AHEAD_S:g} s before"
    )


PROGRAM = Program(
    name="agents",
    doc=__doc__,
    measure=measure,
    serves=False,
    settings=session_settings(152),
    tables=Table(
        "rows",
        [
            "workload",
            Column("size", "share"),
            *(f"{title} = found.{by} :.3f" for by, title in SERIES.items()),
            "LRU, of best = of_best.lru :.3f",
            "expected return, of best = of_best.returns :.3f",
            "announced, of best = of_best.announced :.3f",
            "written, LRU = written.lru :.1f",
            "by expected return = written.returns :.1f",
            "announced = written.announced :.1f",
            "read from L3, announced = brought :.1f",
        ],
    ),
    draw=Picture(
        title=finding,
        panels=by("workload", itemgetter("rows")),
        x="share",
        x_label="size, of all pages",
        y_label="pages of prompts found, of all",
        series=(
            Series(SERIES["lru"], "found.lru", "file", "s-"),
            Series(SERIES["returns"], "found.returns", "ours", ".--"),
            Series(SERIES["announced"], "found.announced", "exp4", "o-"),
            Series(SERIES["best"], "found.best", "limit", ":"),
        ),
        top=1,
    ),
    wrong=missed_goals,
)

if __name__ == "__main__":
    PROGRAM.run()
