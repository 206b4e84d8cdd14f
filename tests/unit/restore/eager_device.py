"""A device's free pages, and what restores write to them."""

from __future__ import annotations

import torch

from tests.kit.prefetch import Restore

SIZE, DEVICE_PAGES, HOST_PAGES = 2, 12, 24


class Device:
    """Free pages, and what is being written to every page."""

    def __init__(self, cached: int = 0) -> None:
        self.free = list(range(DEVICE_PAGES - cached))
        self.cached = list(range(DEVICE_PAGES - cached, DEVICE_PAGES))
        self.writers: dict[int, list[Restore]] = {}
        self.readers: list[Restore] = []
        self.made: dict[int, tuple[int, int]] = {}  # of which host page, and which content of it

    def count(self) -> int:
        return len(self.free)

    def make_room(self, pages: int) -> None:
        while self.cached and len(self.free) < pages:
            self.free.append(self.cached.pop())

    def take(self, pages: int) -> torch.Tensor:
        assert 0 < pages <= len(self.free)
        taken, self.free = self.free[:pages], self.free[pages:]
        return slots_of(taken)

    def give(self, slots: torch.Tensor) -> None:
        pages = pages_of(slots)
        assert not set(pages) & set(self.free)
        for page in pages:
            assert self.is_written(page), "still written"
            self.writers.pop(page, None)
            self.made.pop(page, None)
        assert not set(pages) & self.being_read(), "still read"
        self.free += pages

    def writes(self, restore: Restore) -> None:
        for page in restore.pages:
            self.writers.setdefault(page, []).append(restore)

    def is_written(self, page: int) -> bool:
        return all(restore.is_done for restore in self.writers.get(page, ()))

    def being_read(self) -> set[int]:
        return {page for reader in self.readers if not reader.is_done for page in reader.reads}


def slots_of(pages: list[int]) -> torch.Tensor:
    slots = [SIZE * page + i for page in pages for i in range(SIZE)]
    return torch.tensor(slots, dtype=torch.int64)


def pages_of(slots: torch.Tensor) -> list[int]:
    pages = [int(slot) // SIZE for slot in slots[::SIZE]]
    assert torch.equal(slots, slots_of(pages)), "slots are not whole pages"
    return pages
