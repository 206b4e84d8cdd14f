"""What goes on in the background: syncing, coming back, adopting files; and saving of uses."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Sequence

from hcache_backend.config import HCacheConfig
from hcache_backend.store.check import find_unknown_files
from hcache_backend.store.recency import Recency
from hcache_backend.store.volume import Volume

logger = logging.getLogger("hcache.store")

_LONGEST_PAUSE = 1.0
_RECENCY_SECONDS = 5.0


def start(
    volumes: Sequence[Volume], recency: Recency, config: HCacheConfig, stopping: threading.Event
) -> list[threading.Thread]:
    """Threads that look after ``volumes`` and the ``recency`` of all until ``stopping`` is set."""
    threads = [
        threading.Thread(target=_take_care, args=(volume, recency, config, stopping), daemon=True)
        for volume in volumes
    ]
    for thread in threads:
        thread.start()
    return threads


def _take_care(
    volume: Volume, recency: Recency, config: HCacheConfig, stopping: threading.Event
) -> None:
    pause = min(config.sync_seconds, _LONGEST_PAUSE)
    next_sync = next_save = time.monotonic()
    while not stopping.wait(pause):
        try:
            now = time.monotonic()
            volume.look_after()
            syncs = config.durability == "batch" and volume.dirty
            if syncs and now >= next_sync:
                volume.flush()
                next_sync = now + config.sync_seconds - pause
            if now >= next_save:
                recency.save()
                next_save = now + _RECENCY_SECONDS
            _complete_index(volume, stopping)
        except Exception:
            logger.exception("hcache: maintenance of %s failed", volume.path)


def _complete_index(volume: Volume, stopping: threading.Event) -> None:
    try:
        with volume.use() as folder:
            if not folder.index_is_partial:
                return
            found = find_unknown_files(folder, adopt=True, stop=stopping.is_set)
            if not stopping.is_set():
                folder.mark_index_complete()
    except (OSError, sqlite3.Error):
        return  # the folder is offline or failing; the next round tries again
    logger.info(
        "hcache: %s: the index was completed: %d pages found, %d files not usable",
        volume.path,
        len(found.pages),
        len(found.damaged),
    )
