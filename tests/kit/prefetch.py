"""A prefetch of HiCache's, its restores, and eager loads of it without a host pool."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hcache_backend.prefetch.estimates import Estimates, L3Progress
from hcache_backend.prefetch.meeting import Meeting
from hcache_backend.prefetch.prefetches import Prefetches


class Operation:
    """HiCache's operation, and what its cache keeps of it. Its pages are the host pages from
    ``first`` on, which are named by their numbers.

    Attributes:
        terminated: Whether it has ended.
    """

    prefix_keys: list[str] | None = None
    request_id = "r"
    completed_tokens = 0
    prefetches = Prefetches()

    def __init__(self, pages: int, size: int, *, first: int = 0, node: Any = 0) -> None:
        self.operation, self.anchor_node_id = self, node
        self.hash_value = [str(page) for page in range(first, first + pages)]
        self.host_indices = torch.arange(first * size, (first + pages) * size, device="cpu")
        self.token_ids = list(range(100, 100 + pages * size))
        self.storage_start = size
        self.terminated = False

    @property
    def meeting(self) -> Any:
        """Where its front and its back meet, if it is read from the back."""
        return self.prefetches.prefetch_of(self).meeting

    @meeting.setter
    def meeting(self, meeting: Meeting | None) -> None:
        prefetch = self.prefetches.prefetch_of(self)
        prefetch.meeting, prefetch.token_ids = meeting, np.array(self.token_ids)

    def is_terminated(self) -> bool:
        return self.terminated


class Restore:
    """A restore that ends when somebody waits for it, and not before."""

    def __init__(
        self,
        pages: Sequence[int] = (),
        reads: Sequence[int] = (),
        behind: Restore | None = None,
    ) -> None:
        self.pages = pages
        self.reads = reads  # device pages from which it recomputes
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


def eager_over(
    pages: Any,
    most: int,
    size: int,
    budget: Any,
    pipeline: dict[str, Any],
    l3: L3Progress | None = None,
    **others: Any,
) -> Any:
    """Eager loads over ``pages``, of at most so many.

    Args:
        pipeline: What starts restores.
        others: What of the ``pool``, its ``arena`` or the ``loads`` is not as it is by default.
    """
    from hcache_backend.prefetch.eager_loads import EagerLoads

    arena = {"physical": lambda host_pages: host_pages} | others.get("arena", {})
    pool: dict[str, Any] = {
        "page_size": size,
        "page_layout": SimpleNamespace(page_bytes=1),
        "on_freed": [],
        "mark_arrived": lambda: None,
        "page_ids": lambda indices: indices[::size].numpy() // size,
        "arena": SimpleNamespace(**arena),
    }
    loads = {"stored_from": 0, "count_finished": lambda: None} | others.get("loads", {})
    parts: list[Any] = [pool | others.get("pool", {}), pipeline, loads]
    into, starts, queue = (SimpleNamespace(**part) for part in parts)
    l3 = l3 or L3Progress(Estimates())
    return EagerLoads(pages, into, starts, queue, most, budget, l3, Operation.prefetches)
