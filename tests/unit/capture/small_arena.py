"""An arena of a few small pages."""

from collections.abc import Callable

import numpy as np

from hcache_backend.arena import Arena
from hcache_backend.format.page import PageLayout, hidden_layer

SIZE = 4
LAYOUT = PageLayout(SIZE, (hidden_layer(SIZE, 8, 8),) * 2)
HOST_PAGES, DEVICE_PAGES = 6, 5


def arena(namespace: Callable[[], bytes] = lambda: b"n" * 16) -> Arena:
    memory = np.full((HOST_PAGES + DEVICE_PAGES, LAYOUT.stride), 0xEE, np.uint8)
    return Arena(memory, LAYOUT, HOST_PAGES, DEVICE_PAGES, namespace)


def slots_of(pages: list[int]) -> np.ndarray:
    return (np.array(pages, np.int64)[:, None] * SIZE + np.arange(SIZE)).ravel()


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int64)
