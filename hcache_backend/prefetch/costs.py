"""What an L3 hit costs and what it saves, in seconds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hcache_backend.plan.costs import side_by_side, until_there
from hcache_backend.plan.restore import Restore
from hcache_backend.prefetch.estimates import Estimate

SHOWN_TOKENS = 4096
"""Rates are shown for operations of this size."""
Recomputing = Callable[[int, int], float]
"""Seconds that recomputing so many tokens behind so many takes; infinite: nobody knows, or it is
not done now. Any thread."""


class Hit(NamedTuple):
    """Consecutive tokens of a prompt that L3 has.

    Attributes:
        tokens: How many.
        prefix: Tokens before them; nobody computes or reads these.
        rest: Tokens after them, which are computed either way.
        behind: How many of them, at their end, come from behind the page store.
        recomputing: How long their recomputation takes in slices while they are read from the last
            one on, given tokens and those before; None: they are read only.
        reachable: How many of them, at their front, slices can reach.
    """

    tokens: int
    prefix: int
    rest: int
    behind: int = 0
    recomputing: Recomputing | None = None
    reachable: float = math.inf

    def without(self, tokens: int) -> Hit:
        """What is left of it when its first ``tokens`` have arrived."""
        left = self.tokens - tokens
        behind = min(self.behind, left)
        return self._replace(tokens=left, prefix=self.prefix + tokens, behind=behind)

    def cut(self, tokens: int) -> Hit:
        """Its first ``tokens``, the others being computed."""
        cut_off = self.tokens - tokens
        behind = max(0, self.behind - cut_off)
        return self._replace(tokens=tokens, rest=self.rest + cut_off, behind=behind)

    def until_there(self, read: float, *, begun: bool = False) -> float:
        """Seconds until it is there if L3 alone takes ``read`` seconds.

        What L3 has no worthwhile part in is not recomputed in slices, but by a prefill. Once it has
        ``begun`` any part is worthwhile: what was read and recomputed is not to be thrown away
        because estimates have moved a little.
        """
        if self.recomputing is None or not self.tokens:
            return read
        recomputing = self.recomputing(self.tokens, self.prefix)
        share = min(self.reachable, self.tokens) / self.tokens
        return (side_by_side if begun else until_there)(read, recomputing, share)


class Costs:
    """Estimates of everything that a decision about a hit needs; they learn.

    Args:
        machine: None: nobody measured it, and only what happens in service is known.

    Attributes:
        prefill: Computing tokens.
        read: Reading them from L3 to host memory.
        behind: Reading them from behind the page store.
        load: What a batch waits for their load to the device.
    """

    def __init__(self, machine: Restore | None) -> None:
        known = machine is not None
        self.prefill = Estimate(machine.prefill if machine else _linear, known=known)
        self.load = Estimate(machine.load if machine else _linear, known=known)
        l3 = machine.profile.l3 if machine and machine.profile else None
        reads = machine.read if machine and l3 is not None else None
        self.read = Estimate(reads or _linear, known=reads is not None)
        self.behind = Estimate(_linear, known=False)

    def reading(self, tokens: int, behind: int) -> float | None:
        """Seconds to read ``tokens``, so many of them from behind; None: nothing is known yet."""
        near, far = self.read.seconds(tokens - behind), self.behind.seconds(behind)
        return None if near is None or far is None else near + far

    def least_reading(self, tokens: int, behind: int) -> float:
        """Seconds to read ``tokens``; what nobody knows yet counts as nothing."""
        near, far = self.read.seconds(tokens - behind), self.behind.seconds(behind)
        return (near or 0.0) + (far or 0.0)

    def last_read(self, hit: Hit) -> Estimate:
        """What reads the end of a hit."""
        return self.behind if hit.behind else self.read

    def saved(self, hit: Hit) -> float | None:
        """Seconds of computing that a hit saves; None: nothing is known yet."""
        whole = self.prefill.seconds(hit.tokens + hit.rest, hit.prefix)
        rest = self.prefill.seconds(hit.rest, hit.prefix + hit.tokens)
        return None if whole is None or rest is None else max(0.0, whole - rest)

    def loaded(self, tokens: int) -> float:
        """Seconds that a batch waits for the load of a hit; 0 as long as nobody knows."""
        return self.load.seconds(tokens) or 0.0

    def rates(self) -> dict[str, float]:
        """Tokens per second of operations on :data:`SHOWN_TOKENS` tokens, as far as known."""
        estimates = {
            "l3_read": self.read,
            "behind_read": self.behind,
            "load": self.load,
            "prefill": self.prefill,
        }
        taken = {name: known.seconds(SHOWN_TOKENS) for name, known in estimates.items()}
        return {name: SHOWN_TOKENS / seconds for name, seconds in taken.items() if seconds}


def _linear(tokens: int, prefix: float) -> float:
    return float(tokens)
