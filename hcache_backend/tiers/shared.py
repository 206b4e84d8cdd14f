"""The store behind the page store: pages as values in a backend that may hang.

A value is the page's bytes and, at its end, a digest over them, the namespace, the key and the
share: whatever a backend returns for a name, it is the page, or it is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from hcache_backend import metrics
from hcache_backend.format.envelope import PROOF_BYTES, PageName, proof
from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts, Share
from hcache_backend.store.stats import ProblemLog
from hcache_backend.tiers.shared_backend import (
    CLOSE_SECONDS,
    START_SECONDS,
    MadeBackend,
    RowPool,
    Values,
    row_bytes,
)
from hcache_backend.tiers.threads import BoundedCalls, CopyQueue, GivenUp, bounded

logger = logging.getLogger("hcache")

LOOK_UP_SECONDS = 0.4
"""Longest look-up."""
_LOOK_UP_PAGES = 64
REST_SECONDS = 10.0
"""A backend that failed, or did not answer in time, is left alone for so long."""
_PART_BYTES = 16 << 20
"""Largest part of a read or of a write, unless one page is larger."""

_Result = TypeVar("_Result")


class StoreBehind:
    """Pages of one host pool in a backend that other machines use, too. Any thread; never raises.

    Look-ups and parts of reads wait for a bounded time. What is written is copied, and written
    later.

    Args:
        made: The backend, which this object closes.
        page_bytes: Those of the largest page.
        pieces: As how many pieces of memory the backend wants to see a page.

    Raises:
        Exception: The backend does not take the memory that it is to work with.
    """

    def __init__(self, made: MadeBackend, page_bytes: int, pieces: int) -> None:
        option = made.option
        self._made = made
        self._name = option.backend
        self._read_seconds = option.read_seconds
        length = row_bytes(page_bytes + PROOF_BYTES, pieces)
        self._rows = rows = max(1, option.buffer_bytes // 3 // length)
        pool = RowPool(2 * rows, length, pieces)
        self._part = max(1, min(rows, _PART_BYTES // length))
        self._memory: Bytes = pool.kv_buffer.numpy()
        register = partial(Values, made.backend, pool)
        self._values = bounded("hcache-behind-register", register, START_SECONDS)
        self._looking = BoundedCalls("hcache-behind-look-up")
        self._reading = BoundedCalls("hcache-behind-read")
        self._one_read, self._noting = threading.Lock(), threading.Lock()
        self._writes = CopyQueue("hcache-behind-write", self._memory[rows:, :page_bytes])
        # Pages that were proven are kept from memory that the backend does not know.
        self._keeps = CopyQueue("hcache-behind-keep", np.empty((rows, page_bytes), np.uint8))
        self._problems = ProblemLog()
        self._rests_until = 0.0
        self._failing: set[str] = set()
        metrics.BEHIND.set(self._name, "answers")

    def complete(
        self, namespace: bytes, share: Share, keys: Sequence[bytes], here: list[bool]
    ) -> range:
        """Note in ``here`` which of the pages that the page store lacks are here.

        Returns the pages from the first of them on to the first one that no store has.
        """
        absent = [number for number, found in enumerate(here) if not found]
        count = self.leading(namespace, share, [keys[n] for n in absent]) if absent else 0
        for number in absent[:count]:
            here[number] = True
        end = absent[count] if count < len(absent) else len(here)
        return range(absent[0] if count else end, end)

    def leading(self, namespace: bytes, share: Share, keys: Sequence[bytes]) -> int:
        """How many of the pages ``keys``, from the first one on, the backend says to have.

        As many as it says in time; none if it fails: what will not be read is not promised.
        """
        start_time, took, found = time.monotonic(), 0.0, 0
        for start in range(0, len(keys), _LOOK_UP_PAGES):
            names = [
                PageName(namespace, key, share).value
                for key in keys[start : start + _LOOK_UP_PAGES]
            ]
            began = time.monotonic()
            left = start_time + LOOK_UP_SECONDS - began
            if left < 2 * took:  # the next part would perhaps not come in time
                metrics.BEHIND_PAGES.count("not_asked", len(keys) - start)
                break
            look_up = partial(self._values.leading, names)
            here = self._ask(self._looking, look_up, left)
            if here is None:
                metrics.BEHIND_PAGES.count("not_asked", len(keys) - start)
                return 0
            found, took = found + here, time.monotonic() - began
            metrics.BEHIND_PAGES.count("found", here)
            metrics.BEHIND_PAGES.count("absent", len(names) - here)
            if here < len(names):
                break
        return found

    def read(
        self, namespace: bytes, share: Share, keys: Sequence[bytes], pages: Sequence[Parts]
    ) -> list[bool]:
        """Read pages into memory; False is a miss, and the memory of that page holds anything."""
        found: list[bool] = []
        with self._one_read:
            while len(found) < len(keys):
                part = slice(len(found), len(found) + self._part)
                here = self._read_part(namespace, share, keys[part], pages[part])
                if here is None:
                    break
                found += here
        asked = len(found)
        metrics.BEHIND_PAGES.count("read", sum(found))
        metrics.BEHIND_PAGES.count("missed", asked - sum(found))
        metrics.BEHIND_PAGES.count("not_asked", len(keys) - asked)
        return found + [False] * (len(keys) - asked)

    def wait_for_room(self, deadline: float) -> bool:
        """Whether :meth:`write` can take a page, by ``deadline`` (monotonic seconds).

        After a wait in vain there is no further one until the backend has taken something.
        """
        return self._writes.wait_for_room(deadline)

    def write(
        self, namespace: bytes, share: Share, keys: Sequence[bytes], pages: Sequence[Parts]
    ) -> int:
        """Write the first of the pages, later; their memory may change when this returns.

        Returns how many: at most a part, and as many as there is room for.
        """

        def write(rows: list[int], copies: list[Parts]) -> None:
            for row, key, copy in zip(rows, keys, copies, strict=False):
                end = np.frombuffer(proof(PageName(namespace, key, share), copy), np.uint8)
                self._memory[self._rows + row, -PROOF_BYTES:] = end
            names = [PageName(namespace, key, share).value for key in keys[: len(rows)]]
            stored, problem = [False] * len(names), "takes no pages"
            try:
                stored = self._values.set(names, [self._rows + row for row in rows])
            except Exception as error:
                problem += f": {type(error).__name__}: {error}"
            metrics.BEHIND_PAGES.count("written", sum(stored))
            metrics.BEHIND_PAGES.count("write_failed", len(stored) - sum(stored))
            self._note("writes", None if any(stored) else problem)

        return self._writes.take(pages[: self._part], write)

    def put_locally(self, pages: Sequence[Parts], put: Callable[[list[Parts]], bool]) -> None:
        """Have ``put`` store pages that were read, later; it gets copies of the first of them.

        What there is no room for is put when the server has nothing else to do.
        """

        def keep(rows: list[int], copies: list[Parts]) -> None:
            event = "kept" if put(copies) else "not_kept"
            metrics.BEHIND_PAGES.count(event, len(copies))

        taken = self._keeps.take(pages, keep)
        metrics.BEHIND_PAGES.count("not_kept", len(pages) - taken)

    @property
    def silent(self) -> bool:
        """Whether it failed, or did not answer in time, when it was asked last."""
        return "reads" in self._failing

    def forget_kept(self) -> None:
        """What waits to be kept is not."""
        metrics.BEHIND_PAGES.count("not_kept", self._keeps.forget())

    def forget(self) -> None:
        """What waits to be written, or to be kept, is not."""
        self._writes.forget()
        self.forget_kept()

    def distrust(self, namespaces: Sequence[bytes]) -> None:
        """What this server wrote may be wrong: forget the rest, and say what has to be deleted."""
        self.forget()
        logger.error(
            "hcache: pages that this server wrote are still in the shared L3 (%s), and other "
            "machines read and keep them. Delete the values there whose names begin with %s, "
            "then run `hcache clear` on every machine",
            self._name,
            " or ".join(sorted({f"hcache-{namespace.hex()}-" for namespace in namespaces})),
        )

    def close(self) -> None:
        """Let go of the backend, once what waits is written; what takes too long is given up."""
        deadline = time.monotonic() + CLOSE_SECONDS
        threads = (self._looking, self._reading, self._writes, self._keeps)
        ended = [thread.end(deadline) for thread in threads]
        if all(ended):
            self._made.close()
        self.forget()
        for state in ("answers", "silent"):
            metrics.BEHIND.set(self._name, state, value=0)

    def _read_part(
        self, namespace: bytes, share: Share, keys: Sequence[bytes], pages: Sequence[Parts]
    ) -> list[bool] | None:
        """Read a part of the pages; None: the backend is left alone."""
        names = [PageName(namespace, key, share).value for key in keys]
        get = partial(self._values.get, names, range(len(names)))
        came = self._ask(self._reading, get, self._read_seconds)
        if came is None:
            return None
        return [
            ok and self._take(row, namespace, key, share, page)
            for row, (ok, key, page) in enumerate(zip(came, keys, pages, strict=True))
        ]

    def _take(self, row: int, namespace: bytes, key: bytes, share: Share, page: Parts) -> bool:
        """Copy a value to the memory of its page, and see there whether it is that page."""
        start, value = 0, self._memory[row]
        for part in page:
            end = start + part.nbytes
            np.frombuffer(part, np.uint8)[:] = value[start:end]
            start = end
        if value[-PROOF_BYTES:].tobytes() == proof(PageName(namespace, key, share), page):
            return True
        metrics.BEHIND_PAGES.count("damaged")
        metrics.PROBLEMS.count("behind_damaged")
        what = f"page {key.hex()[:12]} from {self._name} is damaged: a miss"
        self._problems.report("damaged", what)
        return False

    def _ask(
        self, calls: BoundedCalls, work: Callable[[], _Result], seconds: float
    ) -> _Result | None:
        """What ``work()`` returns; None: it failed or took too long, now or a while ago."""
        if time.monotonic() < self._rests_until or self._looking.hangs or self._reading.hangs:
            return None
        try:
            found = calls.call(work, seconds)
        except GivenUp as error:
            problem = str(error)
        except Exception as error:
            problem = f"failed: {type(error).__name__}: {error}"
        else:
            self._note("reads", None)
            return found
        self._rests_until = time.monotonic() + REST_SECONDS
        metrics.PROBLEMS.count("behind_silent")
        problem += f"; not used for {REST_SECONDS:.0f} s"
        self._note("reads", problem)
        return None

    def _note(self, what: str, problem: str | None) -> None:
        """Whether ``reads`` or ``writes`` go well at the moment; None: they do."""
        with self._noting:
            if (what in self._failing) == (problem is not None):
                return
            self._failing ^= {what}
            metrics.BEHIND.set(self._name, "answers", value=int(not self._failing))
            metrics.BEHIND.set(self._name, "silent", value=int(bool(self._failing)))
        if problem is not None:
            logger.warning("hcache: the shared L3 (%s) %s", self._name, problem)
        elif not self._failing:
            logger.info("hcache: the shared L3 (%s) responds again", self._name)
