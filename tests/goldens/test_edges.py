"""Each edge between streams is missed, and what the order checker then reports is what it was.

The record has all findings: an edge that begins to hide another one shows. Lines do not name the
place of the edge, because it may move; ``tests/order/reports.py`` does.
"""

import re
from collections.abc import Iterator

from tests.goldens.golden import compare
from tests.order import edges
from tests.order.checker import Checker
from tests.order.reports import IN_PROCESS, SERVED, UNIT
from tests.order.scenarios import SCENARIOS, run

_MADE = re.compile("(?<=device memory) of [a-z0-9 ]+(?= dies)")
"""Of several tensors that nobody keeps, those die that no other thread happens to have."""


def reported() -> Iterator[str]:
    """For each edge the scenario and all that it reports without the edge."""
    for scenario, missed in UNIT.items():
        for edge in missed:
            checker = Checker()
            with edges.without(edge):
                run(SCENARIOS[scenario], checker)
            found = {_MADE.sub("", finding.what) for finding in checker.findings}
            assert found, f"without {edge} nobody misses it in: {scenario}"
            yield f"{scenario}: {'; '.join(sorted(found))}"


def table() -> Iterator[str]:
    """Sorted, so that edges may be listed in another order."""
    yield "Without one edge, in scenarios of tests/order:"
    yield from sorted(reported())
    yield ""
    yield "Those whose scenarios need SGLang, as tests/order lists them:"
    needs_sglang = (*IN_PROCESS.values(), *SERVED.values())
    yield from sorted(f"{report.scenario}: {report.what}" for report in needs_sglang)


def test_every_edge_is_missed() -> None:
    compare("edges.txt", table())
