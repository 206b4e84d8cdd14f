"""What :mod:`.decode` has its server load for L3: a thread that moves pages of the page store."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from bench.store.decode import move


class Mover(HiCacheStorage):
    """No L3: a thread in the scheduler's process that moves pages when it is asked to."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        folder = Path(storage_config.extra_config["folder"])
        threading.Thread(target=move, args=(folder,), daemon=True).start()

    def get(self, *ignored: Any, **more: Any) -> None:
        return None

    def batch_get(self, keys: list[str], *ignored: Any, **more: Any) -> list[None]:
        return [None] * len(keys)

    def set(self, *ignored: Any, **more: Any) -> bool:
        return False

    batch_set = set

    def exists(self, key: str) -> bool:
        return False
