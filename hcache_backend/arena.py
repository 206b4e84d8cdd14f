"""The arena: our pages in one piece of pinned host memory, by the numbers that HiCache gives them.

Bookkeeping on the CPU. Any thread may use what is here for pages that it owns.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hcache_backend.page import PageLayout

Ids = npt.NDArray[np.int64]

_NONE = np.empty(0, np.int64)


class Arena:
    """Host pages, and which of their segments are there.

    Args:
        memory: uint8 ``[pages, page_bytes]``; only headers are written here.

    Raises:
        ValueError: The memory has another shape.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], layout: PageLayout, pages: int) -> None:
        wanted = (pages, layout.page_bytes)
        if memory.shape != wanted or pages < 1:
            raise ValueError(f"memory is {memory.shape}, the arena needs {wanted}")
        self.memory = memory
        self.layout = layout
        self._first_layer = np.zeros(pages, np.uint16)  # by physical page

    def physical(self, host_pages: Ids) -> Ids:
        """Pages of the memory that hold ``host_pages``, int64 of the same shape."""
        return host_pages

    def pages(self, host_pages: Ids, *, header: bool = False) -> list[npt.NDArray[np.uint8]]:
        """Views of ``host_pages`` (int64 ``[pages]``), uint8 ``[page_bytes]`` each.

        With ``header`` the caller reads nothing but their headers.
        """
        physical = self.physical(host_pages)
        self.host_access(physical, write=False, header=header)
        return [self.memory[page] for page in physical.tolist()]

    def host_access(self, pages: Ids, *, write: bool, header: bool = False) -> None:
        """The CPU is about to read or write physical ``pages``, or only their headers.

        Does nothing. NumPy's accesses show in no stream: this is where tests/order sees them.
        """

    def first_layers(self, host_pages: Ids) -> npt.NDArray[np.uint16]:
        """The first (stored) layer whose segment is there, for each host page."""
        return self._first_layer[self.physical(host_pages)]

    def expect(self, host_pages: Ids, first_layer: int) -> None:
        """The pages are about to be read from L3, without the segments of earlier layers."""
        physical = self.physical(host_pages)
        self.host_access(physical, write=True)
        self._first_layer[physical] = first_layer


class Overflow:
    """Which layers of host pages are kept apart, because the page cannot hold what they encode to.

    Args:
        rows: Rows of memory, each with room for K and V of one layer of one page.

    Attributes:
        lost: Host pages with a layer that neither fits nor found a row. They cannot be loaded.
    """

    def __init__(self, rows: int) -> None:
        self.lost: set[int] = set()
        self._all = range(rows)
        self._rows: dict[int, dict[int, int]] = {}  # by host page, by layer
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._free = list(self._all)
        self._rows.clear()
        self.lost.clear()

    def take(self, host_page: int, layers: Iterable[int]) -> dict[int, int]:
        """A row for each of ``layers`` of a page, or none at all, and the page is lost."""
        layers = list(layers)
        if len(layers) > len(self._free):
            self.lose([host_page])
            return {}
        self._rows[host_page] = {layer: self._free.pop() for layer in layers}
        return self._rows[host_page]

    def lose(self, host_pages: Iterable[int]) -> None:
        """What was to be kept of ``host_pages`` is not there."""
        self.forget(host_pages)
        self.lost.update(host_pages)

    def forget(self, host_pages: Iterable[int]) -> None:
        """HiCache has freed ``host_pages``."""
        for page in host_pages:
            self._free.extend(self._rows.pop(page, {}).values())
            self.lost.discard(page)

    def __contains__(self, host_page: int) -> bool:
        """Whether a layer of ``host_page`` did not fit. Any thread."""
        return host_page in self._rows or host_page in self.lost

    def rows_of(self, host_page: int) -> dict[int, int]:
        """The rows of ``host_page``, by layer."""
        return self._rows.get(host_page, {})

    def rows(self, host_pages: Ids, layer: int) -> tuple[Ids, Ids]:
        """Which of ``host_pages`` (their places, int64 ``[n]``) have ``layer`` here, in which
        rows."""
        if not self._rows:
            return _NONE, _NONE
        kept = [self._rows.get(page, {}).get(layer, -1) for page in host_pages.tolist()]
        rows = np.array(kept, np.int64)
        places = np.flatnonzero(rows >= 0)
        return places, rows[places]
