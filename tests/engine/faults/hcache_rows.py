"""Faults of the kernel that moves rows of hidden states to host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def save_fails(active: Callable[[], bool]) -> None:
    """It cannot be compiled."""

    def no_kernel(staged: Any) -> Any:
        raise NotImplementedError("no such kernel")

    _spoil(active, no_kernel)


def wrong_save(active: Callable[[], bool]) -> None:
    """It moves every row to the place of the next one."""
    _spoil(active, lambda staged: staged.roll(1, 1))


def _spoil(active: Callable[[], bool], spoil: Callable[[Any], Any]) -> None:
    from hcache_backend.capture import staging

    save = staging.save_rows

    def faulty(staged: Any, *args: Any) -> None:
        save(spoil(staged) if active() else staged, *args)

    staging.save_rows = faulty
