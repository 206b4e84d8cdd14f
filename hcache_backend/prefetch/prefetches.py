"""The prefetches of a process, and the prompts of its waiting requests: host memory keeps its part
of a prompt, which is ``HeldPrompt``, while the request waits."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from hcache_backend.prefetch.hit import Prefetch, Recomputing, Record, State

_REMEMBERED = 4096  # refused requests
_PAGES = 1 << 16  # of prefetches that are read, or were, whose keys are known


@dataclass(eq=False)
class HeldPrompt:
    """The prompt of a waiting request. Scheduler thread only."""

    request: Any  # SGLang's
    operation: Any = None  # SGLang's, of its prefetch; None: there is none, or it is over
    node: Hashable = None  # SGLang's, up to which it is held
    tokens: int = 0  # of the prompt that host memory has, and does not evict
    read: int = 0  # tokens that L3 was read for, and that no batch has used
    computed: int = 0  # tokens at the front of its prefetch that were recomputed
    unlock: Callable[[], object] | None = None  # allows their eviction; None: they are not held
    counted: tuple[bool, bool] = False, False  # as one that holds tokens; and is releasable


class Ongoing(UserDict[Hashable, Record]):
    """SGLang's prefetches by request, in the place of its cache's ``dict``. It tells which ones
    come, begin to be read and go, by ``tell(record, over)``: no turn has to look at all."""

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
        self.held: dict[str, HeldPrompt] = {}  # by request, in the order in which they came
        self.early: dict[str, HeldPrompt] = {}  # those that wait for their decode servers
        self.fetching: dict[str, HeldPrompt] = {}  # the others whose prefetches are not over
        self.held_tokens = 0  # those of a node count once: one of its requests may hold none
        self.releasable = 0  # of these, of requests that wait for the GPU only
        self.releasable_nodes = 0  # nodes with such requests
        # By node: its requests that hold tokens, the releasable ones of them, most tokens of one.
        self._holds: dict[Hashable, tuple[int, int, int]] = {}
        # SGLang's requests that waited in the last turn; behind None for their decode servers.
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
        self._asks = 0  # of SGLang to L3
        self.changed: dict[Any, Prefetch] = {}  # what came, went or got on since the last turn
        self.ongoing = Ongoing(self._note_change)
        # SGLang's operations that a thread still processes on some rank; the same on every rank.
        self.unfinished: set[Hashable] = set()
        # By SGLang's operation.
        self._by_operation: weakref.WeakKeyDictionary[Any, Prefetch] = weakref.WeakKeyDictionary()
        self._final: OrderedDict[str, State] = OrderedDict()  # of requests

    def prefetch_of(self, operation: Any) -> Prefetch:
        """The prefetch of SGLang's ``operation``, at first the waiting request's. Any thread."""
        with self.lock:
            if operation not in self._by_operation:
                name = operation.request_id
                new = Prefetch(name, state=self._final.get(name, State.ASKED))
                self._by_operation[operation] = self.waiting.get(name, new)
            return self._by_operation[operation]

    def add_request(
        self, request_id: str, prefix: int, recomputing: Recomputing | None
    ) -> Prefetch:
        """L3 is asked for tokens of a request behind ``prefix`` others. A request whose earlier
        prefetch was refused or ended keeps that state."""
        with self.lock:
            state = self._final.get(request_id, State.ASKED)
            prefetch = self.waiting[request_id] = Prefetch(request_id, prefix, recomputing, state)
            return prefetch

    def watch(self, ongoing: Mapping[Hashable, Record]) -> Ongoing:
        """Learn from now on which of SGLang's prefetches come and go. Returns the mapping that the
        caller puts in the place of ``ongoing``, SGLang's."""
        if ongoing is not self.ongoing:  # it is new, or a flush has made it so
            for record in self.ongoing.values():
                self._note_change(record, True)
            self.ongoing = Ongoing(self._note_change)
            self.ongoing.update(ongoing)
        return self.ongoing

    def _note_change(self, record: Record, over: bool) -> None:
        """SGLang has begun a prefetch, found room for it (to read it) or ended it (``over``)."""
        operation = record.operation
        prefetch = self.changed[operation] = self.prefetch_of(operation)
        prefetch.info = None if over else record
        if over:
            if operation in self.reading:
                self.reading_tokens -= self.reading.pop(operation)
                prefetch.ended_after_ask = self._asks if operation.completed_tokens else 0
                prefetch.token_ids = None  # ``brought`` keeps the rest for a while
            self.mark_over(prefetch)
        elif operation.host_indices is None:  # it has begun: L3 is asked
            self._asks = prefetch.ask_number = self._asks + 1
        elif operation not in self.reading:
            self.reading[operation] = len(operation.host_indices)
            self.reading_tokens += self.reading[operation]
            self.brought.update(dict.fromkeys(operation.hash_value, prefetch))
            while len(self.brought) > _PAGES:
                self.brought.popitem(last=False)
        prompt = self.held.get(prefetch.request_id)
        if prompt is not None and prompt.operation is operation:
            if over:
                self.fetching.pop(prefetch.request_id, None)
            self.count_tokens(prompt)

    def mark_over(self, prefetch: Prefetch) -> None:
        """No request waits for ``prefetch`` any more. A read that has begun stays in ``hits``."""
        with self.lock:
            if self.waiting.get(prefetch.request_id) is prefetch:
                del self.waiting[prefetch.request_id]
            if prefetch.state is State.ASKED:
                prefetch.state = State.DONE
                self.hits.pop(prefetch, None)

    def waits_for_gpu(self) -> bool:
        """True if requests wait for the GPU only; those that wait for L3 could not run."""
        return len(self.scheduler.waiting_queue) > len(self.fetching)

    def mark_queued(self, request_id: str) -> None:
        """A request that waited for its decode server waits for the GPU, or for L3, now."""
        prompt = self.early.pop(request_id)
        if prompt.operation is not None and self.prefetch_of(prompt.operation).info is not None:
            self.fetching[request_id] = prompt
        self.count_tokens(prompt)

    def count_tokens(self, prompt: HeldPrompt) -> None:
        """Count the tokens of ``prompt`` that host memory holds, after any change of it. Those of a
        node of SGLang's tree count once for all its requests; as releasable if one of these waits
        for neither L3 nor a decode server: batches alone will free them."""
        holds, (held_before, free_before) = prompt.unlock is not None, prompt.counted
        awaits_no_answer = prompt.operation is None or prompt.operation in self.reading
        free = holds and awaits_no_answer and prompt.request.rid not in self.early
        prompt.counted = holds, free
        requests, free_ones, most = self._holds.pop(prompt.node, (0, 0, 0))  # most: tokens
        self.held_tokens -= most
        self.releasable -= most if free_ones else 0
        self.releasable_nodes -= free_ones > 0
        requests, free_ones = requests + holds - held_before, free_ones + free - free_before
        if requests:
            most = max(most, prompt.tokens)
            self._holds[prompt.node] = requests, free_ones, most
            self.held_tokens += most
            self.releasable += most if free_ones else 0
            self.releasable_nodes += free_ones > 0

    def forget_request(self, request_id: str) -> None:
        """A new request comes; a refused one may have had its id."""
        with self.lock:
            self._final.pop(request_id, None)

    def refuse(self, prefetch: Prefetch, state: State) -> None:
        """End or refuse a prefetch, as ``state`` says; later ones of its request, too."""
        with self.lock:
            prefetch.state = self._final[prefetch.request_id] = state
            self.hits.pop(prefetch, None)
            if len(self._final) > _REMEMBERED:
                self._final.popitem(last=False)
