"""The trace of restores: its file, and the times that follow from its events."""

import time
from pathlib import Path

from bench.harness.restorer import Restore, recomputed, restored_from_l3
from bench.harness.trace import TraceEvent, read_trace
from bench.harness.tracing.hcache_trace import Trace


def test_restore_lasts_from_the_start_of_the_prefetch_to_the_last_layer() -> None:
    events = [
        TraceEvent("l3", 1984, 100.0, 13.0),
        TraceEvent("load", 1984, 120.0, 70.0),
        TraceEvent("prefill", 16, 191.0, 150.0),
    ]
    assert restored_from_l3(events) == Restore(tokens=1984, ms=90.0, l3_ms=13.0, load_ms=70.0)


def test_a_request_without_load_restored_nothing() -> None:
    assert restored_from_l3([TraceEvent("prefill", 16, 0.0, 1.0)]) is None
    assert restored_from_l3([TraceEvent("l3", 64, 0.0, 1.0)]) is None


def test_chunks_of_a_recomputation_add_up() -> None:
    events = [TraceEvent("prefill", 2048, 0.0, 300.0), TraceEvent("prefill", 952, 310.0, 200.0)]
    assert recomputed(events) == Restore(tokens=3000, ms=500.0)
    assert recomputed([]) is None


def test_what_is_written_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert read_trace(path) == ([], 0)
    writer = Trace(path)
    before = time.monotonic()
    writer.add("l3", 64, before)
    (event,), offset = read_trace(path)
    assert event[:3] == ("l3", 64, 1e3 * before)
    assert 0 <= event.ms <= 1e3 * (time.monotonic() - before)
    assert read_trace(path, offset) == ([], offset)
    writer.add("load", 64, before)
    assert [event.stage for event in read_trace(path, offset)[0]] == ["load"]
