"""What tiers keep of agents' prompts."""

import pytest

from bench.agents import AHEAD_S, Tier, announced
from bench.eviction import best_possible, lru_by_chains
from bench.workload.agents import as_requests, generated
from bench.workload.traces import Request


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_a_tier_by_lru_keeps_what_lru_by_chains_keeps_and_no_order_beats_the_best_possible(
    share: float,
) -> None:
    told = as_requests(generated(12, 1), 1024, 1, 3600.0)
    trace = [request for _, request in told]
    pages, asked = len({p for r in trace for p in r.pages}), sum(r.prompt for r in trace)
    capacity = int(share * pages)
    found = {}
    for order in ("lru", "returns"):
        tier = Tier(capacity, order)
        for number, request in told:
            tier.serve(number, request)
        found[order] = tier.found
        assert tier.written == asked - tier.found
    assert found["lru"] == pytest.approx(lru_by_chains(trace, capacity), abs=0.01 * asked)
    assert max(found.values()) <= best_possible(trace, capacity)


def test_announced_sessions_are_brought_back_before_their_turns() -> None:
    one, other = (Request(0.0, range(n, n + 6), 6) for n in (0, 10))
    returns = [one._replace(time=20.0), other._replace(time=20.0 + 2 * AHEAD_S)]
    told = [(0, one), (1, other._replace(time=1.0)), (0, returns[0]), (1, returns[1])]
    tier = announced(told, 7)
    assert (tier.found, tier.written, tier.brought) == (12, 12, 10)
