"""Costs and savings of an L3 hit, in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hcache_backend.plan.costs import side_by_side, until_there
from hcache_backend.plan.restore import Restore
from hcache_backend.prefetch.estimates import Estimate

SHOWN_TOKENS = 4096  # rates are shown for operations of this size
# Seconds to recompute tokens behind a prefix (arguments: numbers of tokens); infinite if unknown,
# or put off. Any thread.
Recomputing = Callable[[int, int], float]


class Hit(NamedTuple):
    """Consecutive tokens of a prompt that L3 has."""

    tokens: int  # number of them
    prefix: int  # tokens before them, which are neither computed nor read
    rest: int  # tokens after them, which are computed in any case
    behind: int = 0  # tokens at their end that come from the shared tier
    # time in slices, while they are read from the last one on; None: read only
    recomputing: Recomputing | None = None
    reachable: float = math.inf  # tokens at their front that slices can reach

    def without(self, tokens: int) -> Hit:
        """The hit without its first ``tokens``, which have arrived."""
        left = self.tokens - tokens
        behind = min(self.behind, left)
        return self._replace(tokens=left, prefix=self.prefix + tokens, behind=behind)

    def cut(self, tokens: int) -> Hit:
        """Its first ``tokens``; the others are computed."""
        cut_off = self.tokens - tokens
        behind = max(0, self.behind - cut_off)
        return self._replace(tokens=tokens, rest=self.rest + cut_off, behind=behind)

    def until_there(self, read: float, *, begun: bool = False) -> float:
        """Completion time of the hit if L3 alone takes ``read`` seconds. A hit is recomputed in
        slices only if L3 has a worthwhile part in it; otherwise by a prefill. Once it has
        ``begun``, any part is worthwhile: a small change of the estimates must not throw away what
        was read and recomputed."""
        if self.recomputing is None or not self.tokens:
            return read
        recomputing = self.recomputing(self.tokens, self.prefix)
        share = min(self.reachable, self.tokens) / self.tokens
        return (side_by_side if begun else until_there)(read, recomputing, share)


class Costs:
    """Estimates of all that a decision about a hit needs; they learn. ``machine``: None if it was
    not measured, so that only times in service are known."""

    def __init__(self, machine: Restore | None) -> None:
        known = machine is not None
        # computing tokens
        self.prefill = Estimate(machine.prefill if machine else _linear, known=known)
        # wait of a batch for the load to the device
        self.load = Estimate(machine.load if machine else _linear, known=known)
        l3 = machine.profile.l3 if machine and machine.profile else None
        reads = machine.read if machine and l3 is not None else None
        self.read = Estimate(reads or _linear, known=reads is not None)  # from L3 to host memory
        self.behind = Estimate(_linear, known=False)  # from the shared tier

    def reading(self, tokens: int, behind: int) -> float | None:
        """Seconds to read ``tokens``, ``behind`` of them from the shared tier; None if unknown."""
        near, far = self.read.seconds(tokens - behind), self.behind.seconds(behind)
        return None if near is None or far is None else near + far

    def least_reading(self, tokens: int, behind: int) -> float:
        """As :meth:`reading`, but an unknown part counts as 0."""
        near, far = self.read.seconds(tokens - behind), self.behind.seconds(behind)
        return (near or 0.0) + (far or 0.0)

    def last_read(self, hit: Hit) -> Estimate:
        """Estimate of the tier that has the end of a hit."""
        return self.behind if hit.behind else self.read

    def saved(self, hit: Hit) -> float | None:
        """Seconds of computing that a hit saves; None if unknown."""
        whole = self.prefill.seconds(hit.tokens + hit.rest, hit.prefix)
        rest = self.prefill.seconds(hit.rest, hit.prefix + hit.tokens)
        return None if whole is None or rest is None else max(0.0, whole - rest)

    def loaded(self, tokens: int) -> float:
        """Seconds that a batch waits for the load of a hit; 0 if unknown."""
        return self.load.seconds(tokens) or 0.0

    def rates(self) -> dict[str, float]:
        """Known rates, in tokens per second, of operations on :data:`SHOWN_TOKENS` tokens."""
        estimates = {
            "l3_read": self.read,
            "shared_read": self.behind,
            "load": self.load,
            "prefill": self.prefill,
        }
        taken = {name: known.seconds(SHOWN_TOKENS) for name, known in estimates.items()}
        return {name: SHOWN_TOKENS / seconds for name, seconds in taken.items() if seconds}


def _linear(tokens: int, prefix: float) -> float:
    return float(tokens)
