"""Each edge between streams is missed, and what the order checker then reports is what it was.

``tests/order/reports.py`` has one of the findings. The record has all of them: an edge that begins
to hide another one shows. Lines do not name the place of the edge, because it may move.
"""

import re
from collections.abc import Iterator, Mapping

from tests.goldens.golden import compare
from tests.order import edges
from tests.order.checker import Checker
from tests.order.reports import ENCODED, IN_PROCESS, LATENTS, SERVED, UNIT, Report
from tests.order.scenarios import SCENARIOS, run

_MADE = re.compile("(?<=device memory) of [a-z0-9 ]+(?= dies)")
"""Of several tensors that nobody keeps, those die that no other thread happens to have."""


def reported(known: Mapping[str, Report]) -> Iterator[str]:
    """For each edge the scenario and all that is found without the edge."""
    for edge, report in known.items():
        checker = Checker()
        with edges.without(edge):
            run(SCENARIOS[report.scenario], checker)
        found = sorted({finding.what for finding in checker.findings})
        assert report.what in found, f"without {edge} nobody misses it: {found}"
        yield f"{report.scenario}: {'; '.join(sorted({_MADE.sub('', what) for what in found}))}"


def table() -> Iterator[str]:
    """Sorted, so that edges may be listed in another order."""
    yield "Without one edge, in scenarios of tests/order:"
    yield from sorted((*reported(UNIT), *reported(ENCODED), *reported(LATENTS)))
    yield ""
    yield "Those whose scenarios need SGLang, as tests/order lists them:"
    needs_sglang = (*IN_PROCESS.values(), *SERVED.values())
    yield from sorted(f"{report.scenario}: {report.what}" for report in needs_sglang)


def test_every_edge_is_missed() -> None:
    compare("edges.txt", table())
