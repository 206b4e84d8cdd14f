"""What goes on in the background for one folder: syncing, recency, coming back, adopting files."""

from __future__ import annotations

import logging
import threading
import time

import lmdb

from hcache_backend.config import HCacheConfig
from hcache_backend.store.rebuild import adopt_unknown_files
from hcache_backend.store.volume import Volume

logger = logging.getLogger("hcache.store")

_LONGEST_PAUSE = 1.0
_RECENCY_SECONDS = 5.0


class Caretaker:
    """A thread that looks after ``volume`` until :meth:`stop`."""

    def __init__(self, volume: Volume, config: HCacheConfig) -> None:
        self._volume = volume
        self._syncs = config.durability == "batch"
        self._pause = min(config.sync_seconds, _LONGEST_PAUSE)
        self._sync_seconds = config.sync_seconds
        self._stopping = threading.Event()
        name = f"hcache-care-{volume.path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread; waits for what it is doing at most ``seconds``."""
        self._stopping.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        next_sync = next_save = time.monotonic()
        while not self._stopping.wait(self._pause):
            try:
                now = time.monotonic()
                self._volume.look_after()
                if self._syncs and self._volume.dirty and now >= next_sync:
                    self._volume.flush()
                    next_sync = now + self._sync_seconds - self._pause
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
                adopted = adopt_unknown_files(folder, self._volume.io, stop=self._stopping.is_set)
                if not self._stopping.is_set():
                    folder.mark_index_complete()
        except (OSError, lmdb.Error):
            return  # the folder is offline or failing; the next round tries again
        logger.info(
            "hcache: %s: the index was completed: %d pages found, %d files not usable",
            self._volume.path,
            adopted.pages,
            len(adopted.damaged),
        )
