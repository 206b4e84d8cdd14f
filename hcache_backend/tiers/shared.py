"""The shared tier: pages as values in a backend that several machines use, and that may hang; and
the page store with this tier as one tier.

A value is the page's bytes and a digest of them, the namespace, the key and the share. So any value
that a backend returns for a name is the page, or a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import TypeVar

import numpy as np

from hcache_backend import metrics
from hcache_backend.format.envelope import PROOF_BYTES, PageName, proof
from hcache_backend.format.page import Bytes
from hcache_backend.format.units import Parts
from hcache_backend.prefetch.progress import L3Progress
from hcache_backend.store.stats import ProblemLog
from hcache_backend.tiers.shared_backend import (
    START_SECONDS,
    MadeBackend,
    RowPool,
    Values,
    row_bytes,
)
from hcache_backend.tiers.threads import (
    CLOSE_SECONDS,
    BoundedCalls,
    CopyQueue,
    GivenUp,
    bounded,
)
from hcache_backend.tiers.tier import LocalTier, Pages, Tier

logger = logging.getLogger("hcache")

LOOK_UP_SECONDS = 0.4  # longest look-up
WRITE_SECONDS = 5.0  # longest wait of a batch of pages for room
REST_SECONDS = 10.0  # pause of a backend that failed, or did not answer in time
_LOOK_UP_PAGES = 64
_PART_BYTES = 16 << 20  # largest part of a read or of a write, unless one page is larger

_NOT_USED = "hcache: option 'shared' is not used: "

_Result = TypeVar("_Result")


class SharedTier(Tier):
    """Pages of one host pool in a backend that other machines use, too. Calls never raise.

    Look-ups and parts of reads wait for a bounded time. Writes are copied, and made later. This
    object closes the backend ``made``. ``page_bytes``: of the largest page; ``pieces``: of memory
    in a page. The constructor raises if the backend does not take its memory.
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
        self._values = bounded("hcache-shared-register", register, START_SECONDS)
        self._looking = BoundedCalls("hcache-shared-look-up")
        self._reading = BoundedCalls("hcache-shared-read")
        self._one_read, self._putting, self._noting = (threading.Lock() for _ in range(3))
        self._writes = CopyQueue("hcache-shared-write", self._memory[rows:, :page_bytes])
        # Copies of proven pages are in memory that the backend does not know.
        self._keeps = CopyQueue("hcache-shared-keep", np.empty((rows, page_bytes), np.uint8))
        self._quarantined = False
        self._problems = ProblemLog()
        self._rests_until = 0.0
        self._failing: set[str] = set()
        metrics.SHARED.set(self._name, "answers")

    def exists(self, pages: Pages) -> list[bool]:
        """Pages up to the first one that the backend lacks, or does not report in time. None if it
        fails: a page that will not be read is not promised."""
        names = [name.value for name in pages.names()]
        start, took, found = time.monotonic(), 0.0, 0
        with metrics.timed("shared_exists"):
            while found < len(names):
                part = names[found : found + _LOOK_UP_PAGES]
                began = time.monotonic()
                left = start + LOOK_UP_SECONDS - began
                # Otherwise the next part would perhaps not come in time.
                asks = left >= 2 * took
                look_up = partial(self._values.leading, part)
                here = self._ask(self._looking, look_up, left) if asks else None
                if here is None:
                    metrics.SHARED_PAGES.count("not_asked", len(names) - found)
                    found = 0 if asks else found
                    break
                found, took = found + here, time.monotonic() - began
                metrics.SHARED_PAGES.count("found", here)
                metrics.SHARED_PAGES.count("absent", len(part) - here)
                if here < len(part):
                    break
        return [True] * found + [False] * (len(names) - found)

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        names = pages.names()
        found: list[bool] = []
        with self._one_read, metrics.timed("shared_read"):
            while len(found) < len(names):
                part = slice(len(found), len(found) + self._part)
                here = self._read(names[part], memory[part])
                if here is None:
                    break
                found += here
        asked = len(found)
        metrics.SHARED_PAGES.count("read", sum(found))
        metrics.SHARED_PAGES.count("missed", asked - sum(found))
        metrics.SHARED_PAGES.count("not_asked", len(names) - asked)
        return found + [False] * (len(names) - asked)

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        """Copy pages to be written later, as room comes, up to the first one without room."""
        deadline, given, names = time.monotonic() + WRITE_SECONDS, 0, pages.names()
        while given < len(names) and self._writes.wait_for_room(deadline):
            with self._putting:
                if self._quarantined:
                    break
                part = slice(given, given + self._part)
                given += self._writes.take(memory[part], partial(self._write, names[part]))
        else:
            metrics.SHARED_PAGES.count("dropped_full", len(names) - given)
        return [True] * given + [False] * (len(names) - given)

    @property
    def silent(self) -> bool:
        """True if the backend failed, or did not answer in time, at the last request."""
        return "reads" in self._failing

    def keep(self, pages: Pages, memory: Sequence[Parts], tier: Tier) -> None:
        """Copy the first pages and put them into ``tier`` later; pages without room are dropped."""

        def put(rows: list[int], copies: list[Parts]) -> None:
            stored = sum(tier.put(pages.some(range(len(rows))), copies))
            metrics.SHARED_PAGES.count("kept", stored)
            metrics.SHARED_PAGES.count("not_kept", len(rows) - stored)

        taken = self._keeps.take(memory, put)
        metrics.SHARED_PAGES.count("not_kept", len(memory) - taken)

    def forget_kept(self) -> None:
        metrics.SHARED_PAGES.count("not_kept", self._keeps.forget())

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        """Drop the waiting pages, and log the names to delete."""
        with self._putting:
            self._quarantined = True
            self._writes.forget()
        self.forget_kept()
        logger.error(
            "hcache: pages that this server wrote are still in the shared L3 (%s), and other "
            "machines read and keep them. Delete the values there whose names begin with %s, "
            "then run `hcache clear` on every machine",
            self._name,
            " or ".join(sorted({f"hcache-{namespace.hex()}-" for namespace in namespaces})),
        )
        return 0

    def close(self) -> None:
        """Close the backend once waiting pages are written; a slow call is given up."""
        deadline = time.monotonic() + CLOSE_SECONDS
        threads = (self._looking, self._reading, self._writes, self._keeps)
        ended = [thread.end(deadline) for thread in threads]
        if all(ended):
            self._made.close()
        self._writes.forget()
        self.forget_kept()
        for state in ("answers", "silent"):
            metrics.SHARED.set(self._name, state, value=0)

    def _write(self, names: list[PageName], rows: list[int], copies: list[Parts]) -> None:
        """Write copies that are in ``rows`` of the second half of the memory."""
        rows = [self._rows + row for row in rows]
        for row, name, copy in zip(rows, names, copies, strict=False):
            self._memory[row, -PROOF_BYTES:] = np.frombuffer(proof(name, copy), np.uint8)
        stored, problem = [False] * len(rows), "takes no pages"
        try:
            stored = self._values.set([name.value for name in names[: len(rows)]], rows)
        except Exception as error:
            problem += f": {type(error).__name__}: {error}"
        metrics.SHARED_PAGES.count("written", sum(stored))
        metrics.SHARED_PAGES.count("write_failed", len(stored) - sum(stored))
        self._note("writes", None if any(stored) else problem)

    def _read(self, names: list[PageName], memory: Sequence[Parts]) -> list[bool] | None:
        """Read a part of the pages; None if the backend rests."""
        get = partial(self._values.get, [name.value for name in names], range(len(names)))
        came = self._ask(self._reading, get, self._read_seconds)
        if came is None:
            return None
        return [
            ok and self._take(row, name, page)
            for row, (ok, name, page) in enumerate(zip(came, names, memory, strict=True))
        ]

    def _take(self, row: int, name: PageName, page: Parts) -> bool:
        """Copy a value to the memory of its page. Returns True if its proof is right there."""
        start, value = 0, self._memory[row]
        for part in page:
            end = start + part.nbytes
            np.frombuffer(part, np.uint8)[:] = value[start:end]
            start = end
        if value[-PROOF_BYTES:].tobytes() == proof(name, page):
            return True
        metrics.SHARED_PAGES.count("damaged")
        metrics.PROBLEMS.count("shared_damaged")
        problem = f"page {name.key.hex()[:12]} from {self._name} is damaged: a miss"
        self._problems.report("damaged", problem)
        return False

    def _ask(
        self, calls: BoundedCalls, work: Callable[[], _Result], seconds: float
    ) -> _Result | None:
        """The result of ``work()``; None if the backend failed or was too slow, now or recently."""
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
        metrics.PROBLEMS.count("shared_silent")
        self._note("reads", f"{problem}; not used for {REST_SECONDS:.0f} s")
        return None

    def _note(self, work: str, problem: str | None) -> None:
        """Note the state of ``reads`` or ``writes``: a problem, or None."""
        with self._noting:
            if (work in self._failing) == (problem is not None):
                return
            self._failing ^= {work}
            metrics.SHARED.set(self._name, "answers", value=int(not self._failing))
            metrics.SHARED.set(self._name, "silent", value=int(bool(self._failing)))
        if problem is not None:
            logger.warning("hcache: the shared L3 (%s) %s", self._name, problem)
        elif not self._failing:
            logger.info("hcache: the shared L3 (%s) responds again", self._name)


class Tiered(Tier):
    """The page store, and a shared tier that is asked for the pages that it lacks; these are put
    into the page store later. ``made``: the backend of the shared tier, or None. ``l3()``: the
    progress of reads, or None, which is told about the shared tier."""

    def __init__(
        self,
        local: LocalTier,
        made: MadeBackend | None,
        l3: L3Progress,
    ) -> None:
        self.local = local
        self._unused = made  # until the size of a page is known
        self._shared: SharedTier | None = None
        self._l3 = l3
        self._found_shared = 0

    def use_shared(self, page_bytes: int, pieces: int) -> None:
        """Begin to use the shared tier, once; see :class:`SharedTier`. It is not used if that
        raises."""
        made, self._unused = self._unused, None
        if made is None:
            return
        try:
            self._shared = SharedTier(made, page_bytes, pieces)
        except Exception as error:  # raised on one rank, it would leave the others waiting
            problem = f"{made.option.backend} did not register the buffers"
            logger.warning("%s%s: %s: %s", _NOT_USED, problem, type(error).__name__, error)
            if not isinstance(error, GivenUp):  # the call may still run
                made.close()

    def leave_shared(self, problem: str | None = None) -> None:
        """Close the shared tier; the page store goes on."""
        shared = self._shared or self._unused
        self._shared = self._unused = None
        if shared is not None:
            if problem is not None:
                logger.warning("%s%s", _NOT_USED, problem)
            shared.close()

    def exists(self, pages: Pages) -> list[bool]:
        """Pages of the shared tier count only up to the first page that no tier has."""
        here = self.local.exists(pages)
        if self._shared is None:
            return here
        self._l3.may_take_longer(LOOK_UP_SECONDS)
        absent = [number for number, found in enumerate(here) if not found]
        count = sum(self._shared.exists(pages.some(absent))) if absent else 0
        for number in absent[:count]:
            here[number] = True
        if pages.part == 0:  # each page counts once
            end = absent[count] if count < len(absent) else len(here)
            start = 0 if self._found_shared else absent[0] if count else end
            self._found_shared += end - start
        return here

    def take_found_shared(self) -> int:
        """Pages that look-ups (one thread) found since the last call, from the first one on that
        only the shared tier has."""
        found, self._found_shared = self._found_shared, 0
        return found

    def get(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        found, start = self.local.get(pages, memory), time.monotonic()
        missing = [number for number, here in enumerate(found) if not here]
        if self._shared is None or not missing:
            return found
        came = self._shared.get(pages.some(missing), [memory[number] for number in missing])
        proven = list(compress(missing, came))
        for number in proven:
            found[number] = True
        end = found.index(False) if False in found else len(found)
        count = sum(number < end for number in proven) if pages.part == 0 else 0
        tokens = count * pages.pool.host_pool.page_size
        seconds = time.monotonic() - start
        self._l3.came_from_shared(tokens, seconds, gave_up=self._shared.silent)
        if proven:
            kept = pages.some(proven)._replace(prefix=[*pages.prefix, *pages.keys[: proven[0]]])
            self._shared.keep(kept, [memory[number] for number in proven], self.local)
        return found

    def put(self, pages: Pages, memory: Sequence[Parts]) -> list[bool]:
        stored = self.local.put(pages, memory)
        if self._shared is not None:
            self._shared.put(pages, memory)
        return stored

    def drop(self, namespaces: Sequence[bytes]) -> int:
        """Delete pages from the page store; returns the number of files."""
        if self._shared is not None:
            self._shared.forget_kept()
        return sum(self.local.store.drop(namespace) for namespace in namespaces)

    def quarantine(self, namespaces: Sequence[bytes]) -> int:
        if self._shared is not None:
            self._shared.quarantine(namespaces)
        return self.local.quarantine(namespaces)

    def close(self) -> None:
        self.leave_shared()
        self.local.close()
