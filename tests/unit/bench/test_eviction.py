"""What the benchmark of eviction compares the store with, and what it says of it."""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.eviction import (
    FILE_BYTES,
    SEED,
    best_possible,
    leading,
    lru_by_chains,
    missed_goals,
    through_the_store,
)
from bench.record import RESULTS
from bench.workload.traces import TRACES, Request

RESULT = json.loads((RESULTS / "eviction.json").read_text())


def random_trace(seed: int) -> list[Request]:
    """Up to nine requests for sequences of a small tree, by a minute."""
    chance = np.random.default_rng(seed)
    sequences: list[tuple[int, ...]] = []
    for page in range(6):
        before = sequences[chance.integers(page)] if page and chance.random() < 0.7 else ()
        sequences.append((*before, page))
    asked = [sequences[place] for place in chance.integers(6, size=9)]
    return [
        Request(60.0 * number, pages, int(chance.integers(1, len(pages) + 1)))
        for number, pages in enumerate(asked)
    ]


def subsets(pages: Sequence[int], most: int) -> Iterator[frozenset[int]]:
    for size in range(most + 1):
        yield from map(frozenset, combinations(pages, size))


def best_of_all(trace: Sequence[Request], capacity: int) -> int:
    """The most pages that are found, whatever is kept after each request: all ways are tried."""
    ways: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace:
        after: dict[frozenset[int], int] = {}
        for held, found in ways.items():
            total = found + leading(held, request.pages[: request.prompt])
            for kept in subsets(sorted(held.union(request.pages)), capacity):
                after[kept] = max(total, after.get(kept, 0))
        ways = after
    return max(ways.values())


@pytest.mark.parametrize("seed", range(30))
def test_the_best_possible_is_what_trying_everything_finds(seed: int) -> None:
    trace = random_trace(seed)
    for capacity in (1, 2, 4):
        best = best_of_all(trace, capacity)
        assert best_possible(trace, capacity) == best
        assert lru_by_chains(trace, capacity) <= best


def test_lru_by_chains_gives_up_the_end_of_the_least_recently_used() -> None:
    pages = [(1, 2, 3), (4, 5), (1, 2, 3), (4, 5)]
    trace = [Request(float(number), each, len(each)) for number, each in enumerate(pages)]
    assert lru_by_chains(trace, 5) == 5
    assert lru_by_chains(trace, 4) == 2 + 1, "page 3 goes for page 5, then 5 for 3"
    assert lru_by_chains(trace, 2) == 0


@pytest.mark.parametrize("name", TRACES)
def test_the_recorded_results_are_of_these_traces(name: str) -> None:
    trace = TRACES[name](SEED)
    [row] = [row for row in RESULT if row["trace"] == name]
    assert row["requests"] == len(trace)
    assert row["pages"] == len({page for request in trace for page in request.pages})
    assert row["pages_asked"] == sum(request.prompt for request in trace)
    before: dict[int, int] = {}  # sequences are a tree: a page has one before it
    for request in trace:
        for parent, page in zip((-1, *request.pages), request.pages, strict=False):
            assert before.setdefault(page, parent) == parent


def test_the_store_under_a_trace_keeps_what_lru_by_chains_keeps(tmp_path: Path) -> None:
    trace = TRACES["documents"](SEED)[:80]
    pages = len({page for request in trace for page in request.pages})
    asked = sum(request.prompt for request in trace)
    capacity = pages // 5
    found = through_the_store(trace, capacity, pages // 50, tmp_path / "l3")
    files = list((tmp_path / "l3").glob("pages/??/*.page"))
    assert {path.stat().st_size for path in files} == {FILE_BYTES}
    assert 0.9 * capacity <= len(files) <= capacity
    assert lru_by_chains(trace, capacity) - 0.02 * asked <= found <= best_possible(trace, capacity)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"store": 0.5, "lru": 0.52, "best": 0.5}, "chat, 5%: 0.500 found, LRU by chains 0.520"),
        ({"store": 0.3, "lru": 0.3, "best": 0.9}, "at 5%: .* of the best possible, not 0.84"),
    ],
)
def test_the_recorded_results_reach_the_goals_and_a_missed_one_is_named(
    changed: dict[str, float], missed: str
) -> None:
    assert missed_goals(RESULT) == []
    rows: list[dict[str, Any]] = copy.deepcopy(RESULT)
    rows[0]["found"]["5%"] = changed
    [line] = missed_goals(rows)
    assert re.fullmatch(missed, line)
