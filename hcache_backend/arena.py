"""The arena: our pages in one piece of pinned host memory, by the numbers that HiCache gives them.

Bookkeeping on the CPU. Any thread may use what is here for pages that it owns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hcache_backend.page import PageLayout

Ids = npt.NDArray[np.int64]


class Arena:
    """Host pages, and which of them are lost.

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
        self._lost_pages = np.zeros(pages, np.bool_)  # by physical page

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

    def lost(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Of which pages no segment is there, bool ``[pages]``; of the others all are there."""
        return self._lost_pages[self.physical(host_pages)]

    def complete(self, host_pages: Ids) -> None:
        """All segments of the pages are there, or on their way."""
        self._lost_pages[self.physical(host_pages)] = False

    def lose(self, host_pages: Ids) -> None:
        """No segment of the pages is there, and none is on its way."""
        self._lost_pages[self.physical(host_pages)] = True

    def expect(self, host_pages: Ids) -> None:
        """The pages are about to be read from L3."""
        self.host_access(self.physical(host_pages), write=True)
        self.complete(host_pages)
