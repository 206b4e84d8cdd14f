"""One prefetch: a request's hit in L3, from the question to its end.

A prefetch begins as ``asked`` when SGLang asks L3. The gate judges its hit: ``refused``, or it is
read, as soon as host memory has room: ``reading`` in order, or ``meeting`` from the back while its
front is recomputed. Then it is ``done``, or the ranks have ``ended`` it before. A request keeps
``refused`` and ``ended``, also if SGLang asks again, and what host memory has of its prompt is
``Held`` while it waits.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from hcache_backend.arena import Ids

_REMEMBERED = 4096  # refused requests
_PAGES = 1 << 16  # of prefetches that are read, or were, whose keys are known

# seconds to recompute tokens behind a prefix (numbers); infinite if unknown. Any thread
Recomputing = Callable[[int, int], float]


class Hit(NamedTuple):
    """Consecutive tokens of a prompt that L3 has."""

    tokens: int  # number of them
    prefix: int  # tokens before them, which are neither computed nor read
    rest: int  # tokens after them, which are computed in any case
    shared: int = 0  # tokens at their end that come from the shared tier
    recomputing: Recomputing | None = None  # time in slices, meanwhile; None: read only
    reachable: float = math.inf  # tokens at their front that slices can reach

    def without(self, tokens: int) -> Hit:
        """The hit without its first ``tokens``, which have arrived."""
        left = self.tokens - tokens
        shared = min(self.shared, left)
        return self._replace(tokens=left, prefix=self.prefix + tokens, shared=shared)

    def cut(self, tokens: int) -> Hit:
        """Its first ``tokens``; the others are computed."""
        cut_off = self.tokens - tokens
        shared = max(0, self.shared - cut_off)
        return self._replace(tokens=tokens, rest=self.rest + cut_off, shared=shared)


class Meeting:
    """The two ends of one prefetch. A thread reads pages from the last one on; the scheduler has
    pages recomputed whole from the first one on, until they meet. No page is taken by both.
    Tensor-parallel ranks read on their own and recompute in step: the front takes only pages that
    no rank reads, and pages of the back count once all ranks have them."""

    def __init__(self) -> None:
        self.front = 0  # pages whose recomputation was launched; the scheduler's
        self.here = range(0)  # pages that were read and proven on all ranks; the scheduler's
        # First page that recomputation cannot reach, as of the last turn. None, before the first
        # turn, counts as all reachable: otherwise the reader would claim the front's pages.
        self.reachable: int | None = None
        self._lock = threading.Condition()
        self._taken = 0  # by the front
        self._offered = 0  # to the front behind them, while the ranks agree
        self._unread: int | None = None  # the reader takes pages before this one

    def set_pages(self, pages: int) -> None:
        """The prefetch has ``pages`` pages. Both sides call it, in any order."""
        with self._lock:
            if self._unread is None:
                self._unread = pages

    # ---- the thread that reads ----

    def next_batch(self, most: int) -> range:
        """The next pages to read, at most ``most`` (at least 1); empty if the ends have met. Waits
        for the ranks only if all others are offered to the front."""
        with self._lock:
            self._lock.wait_for(lambda: not self._offered or self._offered < self.unread)
            assert self._unread is not None
            first = max(self._taken + self._offered, self._unread - most)
            stop, self._unread = self._unread, first
            return range(first, stop)

    @property
    def spared(self) -> int:
        """Pages that need not be read. Any thread."""
        return self._taken

    # ---- the scheduler ----

    @property
    def unread(self) -> int:
        """Pages that are neither taken nor being read."""
        assert self._unread is not None
        return self._unread - self._taken

    @property
    def recomputable(self) -> float:
        """Share of the unread pages that recomputation can reach. Any thread."""
        unread, reachable = self.unread, self.reachable
        if reachable is None or not unread:
            return 1.0
        return min(1.0, max(0, reachable - self._taken) / unread)

    @property
    def due(self) -> range:
        """Pages that the front may take next, as far as all ranks know."""
        stop = self.reachable or 0
        return range(self.front, min(stop, self.here.start) if self.here else stop)

    def offer(self, most: int) -> int:
        """Number of pages that the front may take next: unread ones, at most ``most``. The reader
        leaves them alone until :meth:`take_offered`, and reads others while the ranks agree."""
        with self._lock:
            # Pages taken but not launched have failed: there is no way past them.
            self._offered = min(most, self.unread) if self._taken == self.front else 0
            return self._offered

    def take_offered(self, pages: int) -> range:
        """The front takes ``pages`` of the pages that were offered; the others may be read."""
        with self._lock:
            first, self._taken, self._offered = self._taken, self._taken + pages, 0
            self._lock.notify_all()
            return range(first, self._taken)

    def launched(self, pages: range) -> None:
        """The recomputation of the front's next ``pages`` was launched."""
        assert pages.start == self.front
        self.front = pages.stop

    def arrived(self, start: int, end: int) -> None:
        """All ranks have read pages ``start`` to ``end``."""
        self.here = range(start, max(start, end))

    @property
    def pages(self) -> int:
        """Number of pages that count, from the first one on: recomputed or read."""
        met = bool(self.here) and self.front >= self.here.start
        return max(self.front, self.here.stop) if met else self.front


class Record(Protocol):
    """What SGLang's cache keeps of a prefetch."""

    @property
    def operation(self) -> Any: ...
    @property
    def anchor_node_id(self) -> Any: ...


class State(Enum):
    """Where a prefetch is in its life, see the module's text."""

    ASKED = "asked"
    READING = "reading"
    MEETING = "meeting"
    DONE = "done"
    REFUSED = "refused"
    ENDED = "ended"


@dataclass(eq=False)
class Prefetch:
    """Numbers are of tokens. The scheduler writes how far it is, once it has got on."""

    request_id: str
    prefix: int = 0  # before the hit
    recomputing: Recomputing | None = None  # as in Hit
    state: State = State.ASKED
    hit: Hit | None = None  # is being read, or will be
    probed: Hit | None = None  # the whole hit, if it is read to measure the present speed of L3
    meeting: Meeting | None = None  # None: it is read in order
    info: Record | None = None  # None: it is over, or SGLang has not begun it
    anchor: Any = None  # SGLang's node before it
    token_ids: Ids | None = None  # from the hit on; None: it is read in order
    arrived: int = 0  # of the hit, on all ranks
    step: int = 1  # arrivals are multiples of this
    whole: bool = False  # a part of it is worth nothing without the rest
    lost: int = 0  # arrived, but worth nothing without the rest
    reachable: float = math.inf  # not yet arrived, and slices can still reach them
    asked: int = 0  # its place among all that SGLang asked for
    came_behind: int = 0  # the last one that was asked before its pages came; 0: none came

    def came(self, completed: int, page_size: int) -> None:
        """``completed`` tokens count on all ranks. Called in a turn of the scheduler."""
        meeting, self.lost = self.meeting, 0
        if meeting is not None:
            if meeting.pages == meeting.front:
                self.lost = len(meeting.here) * page_size
            if meeting.reachable is not None:
                self.reachable = max(0, meeting.reachable - meeting.front) * page_size
        self.arrived = completed + self.lost

    @property
    def left(self) -> int:
        """Tokens that have not arrived."""
        return 0 if self.refused or self.hit is None else self.hit.tokens - self.arrived

    @property
    def rest(self) -> Hit | None:
        """The part of the hit that has not arrived; None if there is none."""
        if not self.left or self.hit is None:
            return None
        return self.hit.without(self.arrived)._replace(reachable=self.reachable)

    @property
    def refused(self) -> bool:
        """True if its hit was refused, or its read ended: that is final."""
        return self.state in (State.REFUSED, State.ENDED)


@dataclass(eq=False)
class Held:
    """The prompt of a waiting request. Scheduler thread only."""

    request: Any  # SGLang's
    operation: Any = None  # SGLang's, of its prefetch; None: there is none, or it is over
    node: Hashable = None  # SGLang's, up to which it is held
    tokens: int = 0  # of the prompt that host memory has, and does not evict
    read: int = 0  # tokens that L3 was read for, and that no batch has used
    computed: int = 0  # tokens at the front of its prefetch that were recomputed
    let_go: Callable[[], object] | None = None  # allows their eviction; None: they are not held
    counts: tuple[bool, bool] = False, False  # among those that hold, and that batches let go


class Ongoing(UserDict[Hashable, Record]):
    """SGLang's prefetches by request, in the place of its cache's ``dict``. It tells which ones
    come, begin to be read and go (``tell(record, over)``): no turn has to look at all."""

    def __init__(self, tell: Callable[[Record, bool], None]) -> None:
        super().__init__()
        self._tell = tell

    def __setitem__(self, request: Hashable, record: Record) -> None:
        super().__setitem__(request, record)
        self._tell(record, False)

    def __delitem__(self, request: Hashable) -> None:
        self._tell(self.data.pop(request), True)


class Prefetches:
    """The prefetches of a process. ``lock`` guards what several threads change."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.held: dict[str, Held] = {}  # by request, in the order in which they came
        self.early: dict[str, Held] = {}  # those that wait for their decode servers
        self.fetching: dict[str, Held] = {}  # the others whose prefetches are not over
        self.held_tokens = 0  # those of a node count once: one of its requests may hold none
        self.releasable = 0  # of these, that batches alone let go: they wait for no answer
        # By node: requests, those of them that batches let go, most tokens.
        self._holds: dict[Hashable, tuple[int, int, int]] = {}
        # SGLang's requests that wait, as far as is known; behind None for their decode servers.
        self.line: list[Any] = [None]
        self.answers: list[Any] = []  # SGLang's operations that wait for room in host memory
        self.scheduler: Any = None  # SGLang's; None until the first request comes
        self.plain = False  # token ids are all input of the request that is being received
        self.short_of_room = False  # hits wait for room in host memory, on all ranks
        self.waiting: dict[str, Prefetch] = {}  # of requests that the gate knows, in order
        self.hits: dict[Prefetch, None] = {}  # those that are read, or will be, in order
        self.reading: dict[Any, int] = {}  # SGLang's operations that have room, in order: tokens
        self.reading_tokens = 0
        self.brought: OrderedDict[str, Prefetch] = OrderedDict()  # last ones with a page, by key
        self._asked = 0
        self.changed: dict[Any, Prefetch] = {}  # what came, went or got on since the last turn
        self.ongoing = Ongoing(self._tell)
        # SGLang's operations that a thread still processes on some rank; the same on every rank.
        self.unfinished: set[Hashable] = set()
        self._of: weakref.WeakKeyDictionary[Any, Prefetch] = weakref.WeakKeyDictionary()
        self._final: OrderedDict[str, State] = OrderedDict()  # of requests

    def of(self, operation: Any) -> Prefetch:
        """The prefetch of SGLang's ``operation``. Any thread."""
        with self.lock:
            if operation not in self._of:
                name = operation.request_id
                new = Prefetch(name, state=self._final.get(name, State.ASKED))
                self._of[operation] = self.waiting.get(name, new)
            return self._of[operation]

    def add_request(
        self, request_id: str, prefix: int, recomputing: Recomputing | None
    ) -> Prefetch:
        """L3 is asked for tokens of a request behind ``prefix``."""
        with self.lock:
            state = self._final.get(request_id, State.ASKED)
            asked = self.waiting[request_id] = Prefetch(request_id, prefix, recomputing, state)
            return asked

    def follow(self, ongoing: Mapping[Hashable, Record]) -> Ongoing:
        """Learn from now on which of SGLang's prefetches come and go. Replaces ``ongoing``."""
        if ongoing is not self.ongoing:  # it is new, or a flush has made it so
            for record in self.ongoing.values():
                self._tell(record, True)
            self.ongoing = Ongoing(self._tell)
            self.ongoing.update(ongoing)
        return self.ongoing

    def _tell(self, record: Record, over: bool) -> None:
        operation = record.operation
        prefetch = self.changed[operation] = self.of(operation)
        prefetch.info = None if over else record
        if over:
            if operation in self.reading:
                self.reading_tokens -= self.reading.pop(operation)
                prefetch.came_behind = self._asked if operation.completed_tokens else 0
                prefetch.token_ids = None  # ``brought`` keeps the rest for a while
            self.over(prefetch)
        elif operation.host_indices is None:
            self._asked = prefetch.asked = self._asked + 1
        elif operation not in self.reading:
            self.reading[operation] = len(operation.host_indices)
            self.reading_tokens += self.reading[operation]
            self.brought.update(dict.fromkeys(operation.hash_value, prefetch))
            while len(self.brought) > _PAGES:
                self.brought.popitem(last=False)
        held = self.held.get(prefetch.request_id)
        if held is not None and held.operation is operation:
            if over:
                self.fetching.pop(prefetch.request_id, None)
            self.weigh(held)

    def over(self, prefetch: Prefetch) -> None:
        """No request waits for it any more. A thread may read it yet: that counts."""
        with self.lock:
            if self.waiting.get(prefetch.request_id) is prefetch:
                del self.waiting[prefetch.request_id]
            if prefetch.state is State.ASKED:
                prefetch.state = State.DONE
                self.hits.pop(prefetch, None)

    def waits_for_gpu(self) -> bool:
        """True if requests wait for the GPU only; those that wait for L3 could not run."""
        return len(self.scheduler.waiting_queue) > len(self.fetching)

    def queued(self, request_id: str) -> None:
        """A request does not wait for its decode server any more."""
        held = self.early.pop(request_id)
        if held.operation is not None and self.of(held.operation).info is not None:
            self.fetching[request_id] = held
        self.weigh(held)

    def weigh(self, held: Held) -> None:
        """Count the tokens that a request holds, after any change of it."""
        holds, (held_before, free_before) = held.let_go is not None, held.counts
        no_answer = held.operation is None or held.operation in self.reading
        free = holds and no_answer and held.request.rid not in self.early
        held.counts = holds, free
        requests, freeing, most = self._holds.pop(held.node, (0, 0, 0))
        self.held_tokens -= most
        self.releasable -= most if freeing else 0
        requests, freeing = requests + holds - held_before, freeing + free - free_before
        if requests:
            most = max(most, held.tokens)
            self._holds[held.node] = requests, freeing, most
            self.held_tokens += most
            self.releasable += most if freeing else 0

    def forget_request(self, request_id: str) -> None:
        """A new request comes; a refused one may have had its id."""
        with self.lock:
            self._final.pop(request_id, None)

    def refuse(self, prefetch: Prefetch, state: State) -> None:
        """``state``: refused or ended."""
        with self.lock:
            prefetch.state = self._final[prefetch.request_id] = state
            self.hits.pop(prefetch, None)
            if len(self._final) > _REMEMBERED:
                self._final.popitem(last=False)
