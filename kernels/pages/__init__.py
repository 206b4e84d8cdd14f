"""Layer segments of pages in host memory <-> contiguous rows on the device.

Pages are uint8 ``[pages, page_bytes]``. Where the ids are on a GPU the pages must be in pinned
host memory or on that GPU: one kernel reads or writes them over the bus, all pages at once, so that
many small segments cost one launch and no staging. Where the ids are on the CPU torch does it.
"""

from __future__ import annotations

from .copies import gather_pages, scatter_rows

__all__ = ["gather_pages", "scatter_rows"]
