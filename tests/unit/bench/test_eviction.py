"""What the benchmark of eviction compares the store with, and what it says of it."""

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

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


def random_trace(seed: int) -> list[Request]:
    """Nine requests for sequences of a small tree, by a minute."""
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


@pytest.mark.parametrize("seed", range(10))
def test_the_best_possible_is_what_trying_everything_finds(seed: int) -> None:
    trace = random_trace(seed)
    for capacity in (1, 2, 4):
        best = best_of_all(trace, capacity)
        assert best_possible(trace, capacity) == best
        assert lru_by_chains(trace, capacity) <= best


@pytest.mark.long
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


def test_the_recorded_results_reach_the_goals() -> None:
    assert missed_goals(json.loads((RESULTS / "eviction.json").read_text())) == []
