"""Events of L3 that wait for SGLang."""

from typing import Any

import pytest
from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored
from sglang.srt.mem_cache.utils import hash_str_to_int64

from hcache_backend.tiers import events

KEYS = [f"{number:02x}" * 32 for number in range(5)]
HASHES = [hash_str_to_int64(key) for key in KEYS]


def stored_runs(taken: list[Any]) -> list[tuple[list[int], int | None, list[int]]]:
    return [(e.block_hashes, e.parent_block_hash, e.token_ids) for e in taken]


def test_pages_that_were_not_stored_have_no_event() -> None:
    told = events.L3Events(2)
    told.stored(KEYS[1:], [True, False, True, True], KEYS[:1], range(8))
    taken = told.take()
    assert {type(event) for event in taken} == {BlockStored}
    assert stored_runs(taken) == [
        ([HASHES[1]], HASHES[0], [0, 1]),
        ([HASHES[3], HASHES[4]], HASHES[2], [4, 5, 6, 7]),
    ]
    told.stored(KEYS[:1], [True], [], range(2))
    assert stored_runs(told.take()) == [([HASHES[0]], None, [0, 1])]
    assert told.take() == []


def test_events_wait_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_PAGES", 3)
    told = events.L3Events(2)
    told.evicted([])
    told.evicted([bytes.fromhex(key) for key in KEYS[:2]])
    told.stored(KEYS[:2], [True, True], [], range(4))
    told.evicted([bytes.fromhex(KEYS[4])])
    taken = told.take()
    assert [type(event) for event in taken] == [BlockRemoved, BlockRemoved]
    assert [event.block_hashes for event in taken] == [HASHES[:2], HASHES[4:]]
    assert {event.medium for event in taken} == {"DISK"}
