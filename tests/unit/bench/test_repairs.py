"""The benchmark of pages that are written again: its traces, its model of the store, its result."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

from bench.record import RESULTS
from bench.repairs import PROGRAM, RankedStore, agent_requests, served
from bench.workload.traces import Request

RESULT = json.loads((RESULTS / "repairs.json").read_text())


def test_requests_of_sessions_share_pages_by_content(tmp_path: Path) -> None:
    first = {"t": 5.0, "hash_ids": [0, *range(16)]}
    more = {"t": 9.0, "hash_ids": [8, *range(20, 30)]}  # 18 ids: two pages
    session = {"tool": 256, "sys": 256, "requests": [first, {"t": 7.0}, more]}
    path = tmp_path / "traces.xz"
    path.write_bytes(lzma.compress(json.dumps([session, session]).encode()))
    requests = agent_requests(path)
    assert len(requests) == 4
    assert [request.time for request in requests] == sorted(request.time for request in requests)
    pages = {request.pages[0] for request in requests}
    assert len(pages) == 1, "the tools and the system prompt are a page that all share"
    assert len({page for request in requests for page in request.pages}) == 5


def test_ends_of_the_least_recently_used_sequence_go_first() -> None:
    store = RankedStore(8)
    store.put(range(4), range(4), 100)
    store.put(range(10, 14), range(4), 200)
    store.use(range(4), 300)
    store.put(range(20, 22), range(2), 400)
    assert sorted(store.ranks) == [0, 1, 2, 3, 10, 20, 21]


def test_a_page_that_memory_has_and_l3_lost_is_written_again_with_repairs_only() -> None:
    """L3 has room for one of two conversations that memory holds both."""
    talks = (range(10), range(100, 110))
    trace = [Request(float(turn), talks[turn % 2], 10) for turn in range(8)]
    without, repaired = (served(trace, 11, 40, repairs=on) for on in (False, True))
    assert without["found"] == repaired["found"] == 60
    assert (without["again"], repaired["again"] > 0) == (0, True)


def test_the_recorded_result_says_that_repairs_save_nothing() -> None:
    assert {row["quota"] for row in RESULT["rows"]} == {0.05, 0.1, 0.2, 0.4}
    assert not PROGRAM.wrong(RESULT)
