"""What must hold of bookkeeping at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hcache_backend.arena import Arena, _PageState

if TYPE_CHECKING:  # GPU machines may lack what it imports
    from hcache_backend.prefetch.reservations import EagerRestores


def assert_sound_arena(arena: Arena) -> None:
    """No physical page is lost or in two places, and every link has two sides."""
    every = np.sort(np.concatenate((arena._host, arena._shadow)))
    assert np.array_equal(every, np.arange(len(arena.memory))), "a page is lost or doubled"
    for host_page in np.flatnonzero(arena._device_page >= 0).tolist():
        assert arena._host_page[arena._device_page[host_page]] == host_page, (
            "a host page's link is broken"
        )
    for page in np.flatnonzero(arena._host_page >= 0).tolist():
        assert arena._device_page[arena._host_page[page]] == page, "a device page's link is broken"
    assert (arena._generation <= arena._clock).all()
    assert (arena._device_page[arena._awaiting_rows] >= 0).all(), "an orphan waits for rows"
    waits = arena._unsettled | arena._awaiting_rows
    assert (arena._state[waits] == _PageState.HERE).all(), "what does not come is waited for"


def assert_sound_reservations(eager: EagerRestores) -> None:
    """No device page is held twice, or by nobody, and there are not more than allowed."""
    held = [page for one in eager._reservations for page in one.pages if page.is_held]
    assert len(held) == len(eager._reserved) <= eager.limit
    assert all(eager._reserved[page.host_page] is page for page in held)
    numbers = [(page.reservation, range(page.number, page.number + 1)) for page in held]
    slots = [slot for one, number in numbers for slot in eager._slots(one, number).tolist()]
    assert len(set(slots)) == len(slots) == eager._size * len(held)
