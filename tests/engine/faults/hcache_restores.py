"""Prefetches and restores that a test holds, and pages of another format."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def other_format() -> None:
    """Pages are of a later format version: nobody else's are found."""
    from hcache_backend.engine import runtime

    runtime.FORMAT_VERSION += 1


def promise_hits() -> None:
    """A decode server says what L3 has, as another L3 would."""
    from hcache_backend.engine import storage

    storage.decodes_for_others = lambda arguments: False


def hold_prefetches(active: Callable[[], bool]) -> None:
    """No prefetch is seen to be finished: requests queue up, and then go on together."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    check = UnifiedRadixCache.check_prefetch_progress

    def held(self: Any, *args: Any) -> bool:
        return not active() and check(self, *args)

    UnifiedRadixCache.check_prefetch_progress = held


def hold_a_layer(active: Callable[[], bool]) -> None:
    """The first projected layer of a restore waits until the trigger is gone.

    A file beside the trigger, its name ending in ``.held``, says that a restore got there.
    """
    from hcache_backend.projection.projector import Projector

    project = Projector.project_to_pool

    def held(self: Any, *args: Any) -> None:
        while active():
            Path(os.environ["HCACHE_TEST_TRIGGER"]).with_suffix(".held").touch()
            time.sleep(0.01)
        project(self, *args)

    Projector.project_to_pool = held  # type: ignore[method-assign]
