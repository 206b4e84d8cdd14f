"""A request's hit in L3, and its prefetch, from the question to its end.

A prefetch begins as ``asked`` when SGLang asks L3. The gate judges its hit: ``refused``, or it is
read, as soon as host memory has room: ``reading`` in order, or ``meeting`` from the back while its
front is recomputed. Then it is ``done``, or the ranks have ``ended`` it before. A request keeps
``refused`` and ``ended``, also if SGLang asks again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from hcache_backend.arena import Ids
from hcache_backend.prefetch.meeting import Meeting

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

    def without_first(self, tokens: int) -> Hit:
        """The hit without its first ``tokens``, which have arrived."""
        remaining = self.tokens - tokens
        shared = min(self.shared, remaining)
        return self._replace(tokens=remaining, prefix=self.prefix + tokens, shared=shared)

    def cut_to(self, tokens: int) -> Hit:
        """The hit of its first ``tokens``; the others are computed."""
        cut_off = self.tokens - tokens
        shared = max(0, self.shared - cut_off)
        return self._replace(tokens=tokens, rest=self.rest + cut_off, shared=shared)


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
    trial: Hit | None = None  # the whole hit, if it is read to measure the present speed of L3
    meeting: Meeting | None = None  # None: it is read in order
    info: Record | None = None  # None: it is over, or SGLang has not begun it
    anchor: Any = None  # SGLang's node before it
    token_ids: Ids | None = None  # from the hit on; None: it is read in order
    arrived: int = 0  # of the hit, on all ranks
    step: int = 1  # arrivals are multiples of this
    all_or_nothing: bool = False  # a part of it is worth nothing without the rest
    lost: int = 0  # arrived, but worth nothing without the rest
    reachable: float = math.inf  # not yet arrived, and slices can still reach them
    ask_number: int = 0  # SGLang's questions to L3 are counted from 1 on
    ended_after_ask: int = 0  # number of the last question when it ended with pages; 0: it did not

    def set_arrived(self, completed: int, page_size: int) -> None:
        """Update ``arrived``, ``lost`` and ``reachable``: ``completed`` tokens count on all ranks.
        Called in a turn of the scheduler."""
        meeting, self.lost = self.meeting, 0
        if meeting is not None:
            if meeting.counted_pages == meeting.front:
                self.lost = len(meeting.back) * page_size
            if meeting.reachable is not None:
                self.reachable = max(0, meeting.reachable - meeting.front) * page_size
        self.arrived = completed + self.lost

    @property
    def remaining(self) -> int:
        """Tokens that have not arrived."""
        return 0 if self.refused or self.hit is None else self.hit.tokens - self.arrived

    @property
    def rest(self) -> Hit | None:
        """The part of the hit that has not arrived; None if there is none."""
        if not self.remaining or self.hit is None:
            return None
        return self.hit.without_first(self.arrived)._replace(reachable=self.reachable)

    @property
    def refused(self) -> bool:
        """True if its hit was refused, or its read ended: that is final."""
        return self.state in (State.REFUSED, State.ENDED)
