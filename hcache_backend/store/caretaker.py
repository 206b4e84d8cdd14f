"""What goes on in the background for one folder: syncing, recency, coming back, adopting files."""

from __future__ import annotations

import logging
import threading
import time

import lmdb

from hcache_backend.config import HCacheConfig
from hcache_backend.store.check import find_unknown_files
from hcache_backend.store.volume import Volume

logger = logging.getLogger("hcache.store")

_LONGEST_PAUSE = 1.0
_RECENCY_SECONDS = 5.0


class Caretaker(threading.Thread):
    """Looks after ``volume`` until :meth:`stop`."""

    def __init__(self, volume: Volume, config: HCacheConfig) -> None:
        super().__init__(name=f"hcache-care-{volume.path.name}", daemon=True)
        self._volume = volume
        self._config = config
        self._stopping = threading.Event()
        self.start()

    def stop(self, seconds: float) -> None:
        """End the thread; waits for what it is doing at most ``seconds``."""
        self._stopping.set()
        self.join(seconds)

    def run(self) -> None:
        seconds = self._config.sync_seconds
        pause = min(seconds, _LONGEST_PAUSE)
        next_sync = next_save = time.monotonic()
        while not self._stopping.wait(pause):
            try:
                now = time.monotonic()
                self._volume.look_after()
                syncs = self._config.durability == "batch" and self._volume.dirty
                if syncs and now >= next_sync:
                    self._volume.flush()
                    next_sync = now + seconds - pause
                elif now >= next_save:
                    self._volume.save_recency()
                    next_save = now + _RECENCY_SECONDS
                self._complete_index()
            except Exception:
                logger.exception("hcache: looking after %s failed", self._volume.path)

    def _complete_index(self) -> None:
        try:
            with self._volume.use() as folder:
                if not folder.index_is_partial:
                    return
                stop = self._stopping.is_set
                found = find_unknown_files(folder, self._volume.io, adopt=True, stop=stop)
                if not stop():
                    folder.mark_index_complete()
        except (OSError, lmdb.Error):
            return  # the folder is offline or failing; the next round tries again
        logger.info(
            "hcache: %s: the index was completed: %d pages found, %d files not usable",
            self._volume.path,
            len(found.pages),
            len(found.damaged),
        )
