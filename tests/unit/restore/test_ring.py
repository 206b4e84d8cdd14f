"""The ring: a part is taken when nothing uses its memory any more, and no later."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hcache_backend.restore.ring import Ring
from hcache_backend.streams import Event, Stream, Work

SIZE = 24


class Use(Event):
    """The end of a projection that uses some bytes."""

    def __init__(self, part: torch.Tensor) -> None:
        self.bytes = set(range(part.storage_offset(), part.storage_offset() + len(part)))


class Copies(Stream):
    """Notes what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Event] = []

    def run(self, work: Work) -> None:
        raise AssertionError("nothing is to be run")

    def record(self, *, timed: bool = False) -> Event:
        raise AssertionError("nothing is to be recorded")

    def wait(self, event: Event) -> None:
        self.waited.append(event)


RESTORES = st.lists(
    st.tuples(st.integers(1, SIZE), st.lists(st.booleans(), max_size=12), st.booleans()),
    max_size=8,
)
"""Bytes of a part; for each step whether a part is taken or one is given to a projection; whether
the last part taken stays without one."""


@given(RESTORES)
def test_who_takes_a_part_waits_for_those_that_use_its_memory_and_nobody_else(
    restores: list[tuple[int, list[bool], bool]],
) -> None:
    ring, copies = Ring(torch.zeros(SIZE, dtype=torch.uint8)), Copies()
    users: dict[int, Use] = {}  # of each byte, the last one
    for part_bytes, steps, passes in restores:
        parts = ring.begin(part_bytes)
        assert parts == SIZE // part_bytes
        held: list[torch.Tensor] = []
        for takes in steps:
            if takes and len(held) < parts:
                copies.waited.clear()
                part = ring.next(copies)
                assert len(part) == part_bytes
                use = Use(part)
                assert not any(use.bytes & Use(other).bytes for other in held), "still held"
                due = {id(users[byte]) for byte in use.bytes if byte in users}
                assert {id(event) for event in copies.waited} == due
                for byte in use.bytes:  # whoever comes next is behind this copy
                    users.pop(byte, None)
                held.append(part)
            elif held and not takes:
                use = Use(held.pop(0))
                ring.used(use)
                users.update(dict.fromkeys(use.bytes, use))
        while held and not passes:
            use = Use(held.pop(0))
            ring.used(use)
            users.update(dict.fromkeys(use.bytes, use))


def test_parts_go_round_from_where_the_restore_before_ended() -> None:
    ring, copies = Ring(torch.zeros(SIZE, dtype=torch.uint8)), Copies()
    starts = []
    for part_bytes, taken in ((6, 1), (6, 2), (12, 1), (5, 5)):
        ring.begin(part_bytes)
        starts.append([ring.next(copies).storage_offset() for _ in range(taken)])
    assert starts == [[0], [6, 12], [0], [15, 0, 5, 10, 15]]
