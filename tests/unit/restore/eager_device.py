"""A device's free pages, and restores that end when somebody waits for them."""

from __future__ import annotations

import torch

SIZE, DEVICE_PAGES, HOST_PAGES = 2, 12, 24


class Restore:
    """A restore that ends when somebody waits for it, and not before."""

    def __init__(
        self, pages: list[int], reads: list[int] | None = None, behind: Restore | None = None
    ) -> None:
        self.pages = pages
        self.reads = reads or []  # device pages from which it recomputes
        self.behind = behind  # on the same stream
        self.failed: Exception | None = None
        self.is_done = False  # for whoever is behind it on a stream
        self.read_host = False  # for threads

    def wait_for_layer(self, layer: int) -> None:
        self.is_done = True

    @property
    def copied(self) -> Restore:
        return self

    def query(self) -> bool:
        return self.read_host

    def wait(self) -> None:
        for restore in self.with_those_before():
            restore.is_done = True

    def with_those_before(self) -> list[Restore]:
        """Itself and what ends before it, since it was launched earlier on the same stream."""
        return [self, *(self.behind.with_those_before() if self.behind is not None else ())]

    def wait_until_copied(self) -> None:
        self.read_host = True


class Device:
    """Free pages, and what is being written to every page."""

    def __init__(self, cached: int = 0) -> None:
        self.free = list(range(DEVICE_PAGES - cached))
        self.cached = list(range(DEVICE_PAGES - cached, DEVICE_PAGES))
        self.writers: dict[int, list[Restore]] = {}
        self.readers: list[Restore] = []
        self.made: dict[int, tuple[int, int]] = {}  # of which host page, and which content of it
        self.whole: set[int] = set()  # those that lack no layer

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
            self.whole.discard(page)
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
