"""Parts of the product on modelled streams: no wrong order, and none without its edges."""

from __future__ import annotations

from functools import partial

import pytest

from tests.order import edges
from tests.order.checker import Checker
from tests.order.clocks import Query
from tests.order.scenarios import SCENARIOS, run, step_that_cannot_begin


@pytest.mark.parametrize("query", [Query.LAZY, Query.RANDOM], ids=lambda query: query.value)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_order_is_there(name: str, query: Query) -> None:
    checker = Checker(query)
    run(SCENARIOS[name], checker)
    assert not checker.findings, checker.report()


def test_a_replay_whose_step_could_not_begin_overwrites_what_a_transfer_reads() -> None:
    checker = Checker()
    run(partial(step_that_cannot_begin, guarded=False), checker)
    missing = {finding.missing for finding in checker.findings}
    assert missing == {"forward does not wait for hcache transfer"}


CAPTURE = [edge for edge in edges.all_edges() if edge.file.startswith("capture/")]


@pytest.mark.parametrize("edge", CAPTURE, ids=str)
def test_every_edge_of_capture_is_missed(edge: edges.Edge) -> None:
    for name in ("capture", "capture, decode graphs"):
        checker = Checker()
        with edges.without(edge):
            run(SCENARIOS[name], checker)
        if checker.findings:
            return
    pytest.fail(f"nothing is reported without {edge}: it is needless, or not looked at")


PIPELINE = [
    edge
    for edge in edges.all_edges()
    if edge.file in ("restore/pipeline.py", "restore/ring.py") or "self.layers[layer]" in edge.what
]
IMPLIED = {
    "self._copy.wait(self._compute.record())": "layer-wise loads wait for the restore before them; "
    "eager ones do not",
    "self._compute.wait(done)": "what is projected and what is recomputed are different layers: it "
    "is there for the device's time, and for collectives",
    "self._copy.wait(done)": "ranks share pages on a GPU only",
    "now.keep(slots)": "the slots of eager reservations: test_engine.py",
}
"""Edges of the pipeline that no scenario here misses, and why."""


@pytest.mark.parametrize("edge", PIPELINE, ids=str)
def test_every_edge_of_the_pipeline_is_missed(edge: edges.Edge) -> None:
    missed = False
    for name in (name for name in SCENARIOS if name.startswith("restore")):
        checker = Checker()
        with edges.without(edge):
            run(SCENARIOS[name], checker)
        missed = missed or bool(checker.findings)
    assert missed is (edge.what not in IMPLIED), edge
