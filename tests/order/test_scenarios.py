"""Parts of the product on modelled streams: no wrong order.

That each edge is missed is tested by ``tests/goldens/test_edges.py``, which also records by what.
"""

from functools import partial

import pytest

from hcache_backend.prefetch import reservations
from hcache_backend.restore.pipeline import RestorePipeline
from tests.order import edges
from tests.order.checker import Checker
from tests.order.clocks import Query
from tests.order.reports import IN_PROCESS, SERVED, UNIT
from tests.order.scenario_loads import sends
from tests.order.scenarios import SCENARIOS, run


@pytest.mark.parametrize("query", [Query.LAZY, Query.RANDOM], ids=lambda query: query.value)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_is_there(name: str, query: Query) -> None:
    checker = Checker(query)
    run(SCENARIOS[name], checker)
    assert not checker.findings, checker.report()


def test_of_every_edge_it_is_known_what_is_reported_without_it() -> None:
    known = {edge for missed in UNIT.values() for edge in missed}
    assert sorted(map(str, edges.all_edges())) == sorted((*known, *IN_PROCESS, *SERVED))


@pytest.mark.parametrize(
    ("scenario", "what"),
    [
        ("eager", "host writes what hcache copy reads"),
        ("eager, from the back", "host writes what hcache saves writes"),
    ],
)
def test_a_freed_host_page_is_not_written_before_the_device_is_done_with_it(
    scenario: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "_wait_until_copied", lambda restore: None)
    checker = Checker()
    run(SCENARIOS[scenario], checker)
    assert what in {finding.what for finding in checker.findings}


def test_pages_are_not_recomputed_before_those_restored_ahead_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RestorePipeline, "mark_handed_out", lambda pipeline: None)
    checker = Checker()
    run(SCENARIOS["eager, behind what was restored ahead"], checker)
    assert "forward reads what hcache copy writes" in {f.what for f in checker.findings}


def test_what_is_being_loaded_is_not_sent() -> None:
    checker = Checker()
    run(partial(sends, at_once=True), checker)
    assert "transfer reads what hcache compute writes" in {f.what for f in checker.findings}
