"""An arena of a few small pages."""

import numpy as np

from hcache_backend.arena import Arena
from hcache_backend.format.page import PageLayout, hidden_layer

SIZE = 4
LAYOUT = PageLayout(SIZE, (hidden_layer(SIZE, 8, 8),) * 2)
HOST_PAGES, DEVICE_PAGES = 6, 5
NAMESPACE, WRITER = b"n" * 16, b"w" * 8


def arena(host_pages: int = HOST_PAGES, device_pages: int = DEVICE_PAGES) -> Arena:
    memory = np.full((host_pages + device_pages, LAYOUT.stride), 0xEE, np.uint8)
    return Arena(
        memory,
        LAYOUT,
        host_pages,
        device_pages,
        lambda page: LAYOUT.stamp(page, NAMESPACE, WRITER),
    )


def slots_of(pages: list[int]) -> np.ndarray:
    return (np.array(pages, np.int64)[:, None] * SIZE + np.arange(SIZE)).ravel()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)
