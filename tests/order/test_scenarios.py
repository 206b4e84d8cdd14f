"""Parts of the product on modelled streams: no wrong order, and none without its edges."""

from __future__ import annotations

import pytest

from tests.order.checker import Checker
from tests.order.clocks import Query
from tests.order.scenarios import SCENARIOS, run


@pytest.mark.parametrize("query", [Query.LAZY, Query.RANDOM], ids=lambda query: query.value)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_is_there(name: str, query: Query) -> None:
    checker = Checker(query)
    run(name, checker)
    assert not checker.findings, checker.report()
