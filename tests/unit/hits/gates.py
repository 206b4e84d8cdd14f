"""A gate whose clock a test turns, and what HiCache's threads do to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any

from hcache_backend.prefetch.estimates import Estimates, L3Progress
from hcache_backend.prefetch.gate import _JUDGED, HitGate
from hcache_backend.prefetch.hit import Prefetch, Recomputing
from hcache_backend.prefetch.prefetches import Prefetches

STEP = 128


class Gate(HitGate):
    """One whose clock says ``now``; its threads have waited ``core`` seconds for a core."""

    def __init__(self, machine: Any = None, min_gain: float = 1.0) -> None:
        self.now, self.core = 100.0, 0.0
        l3 = L3Progress(Estimates(machine), lambda: self.now)
        l3.core_wait = lambda thread: self.core
        super().__init__(l3, Prefetches(), "test", min_gain)


def computing_a_thousand_a_second(gate: Gate) -> Gate:
    for _ in range(3):
        gate.batch_ended(1000, 0, 0, 1.0)
    return gate


def slices(pace: float) -> Recomputing:
    """Slices take ``pace`` seconds for a thousand tokens."""
    return lambda tokens, prefix: pace * tokens / 1000


def named(gate: Gate, name: str) -> Prefetch:
    """The prefetch of a request; another one if the gate does not know it."""
    return gate.prefetches.waiting.get(name) or Prefetch(name)


@contextmanager
def reading(gate: Gate, name: str, wanted: int, step: int = STEP) -> Iterator[None]:
    gate.read_begins(named(gate, name), wanted, step)
    yield
    gate.read_ends()


def read(gate: Gate, seconds: float, tokens: int = 1000, times: int = 1) -> None:
    """L3 brought ``tokens`` tokens in ``seconds``, so many times."""
    for _ in range(times):
        with reading(gate, "earlier", tokens):
            gate.l3.part_arrived(tokens)
            gate.now += seconds


def judged(
    gate: Gate,
    name: str,
    tokens: int = 1000,
    rest: int = 0,
    prefix: int = 0,
    recomputing: Recomputing | None = None,
    shared: int = 0,
    *,
    parts: bool = True,
) -> int:
    """A request asks for a hit: the number of its tokens that are read."""
    assert gate.may_ask(name, prefix, recomputing)
    return gate.tokens_to_read(named(gate, name), tokens, tokens + rest, shared, parts=parts)


def takes(gate: Gate, name: str, tokens: int = 1000, **others: Any) -> bool:
    return judged(gate, name, tokens, **others) == tokens


def refused(gate: Gate, name: str) -> bool:
    return gate.prefetches.add_request(name, 0, None).refused


def turn(gate: Gate, *running: Prefetch) -> list[str]:
    """One turn of a single rank; whose prefetches end."""
    for one in {*gate.prefetches.waiting.values()} - {*running}:
        gate.prefetches.mark_over(one)
    *ends, stalled = gate.verdicts_on(running[:_JUDGED])
    ended = [*compress(running, ends), *(running[_JUDGED:] if stalled else ())]
    gate.apply_verdicts(ended, stalled)
    return [one.request_id for one in ended]


def at(
    gate: Gate,
    name: str,
    arrived: int = 0,
    whole: bool = False,
    step: int = STEP,
    lost: int = 0,
    reachable: int | None = None,
) -> Prefetch:
    """A prefetch as it is in a turn."""
    prefetch = named(gate, name)
    prefetch.arrived, prefetch.step, prefetch.all_or_nothing, prefetch.lost = (
        arrived,
        step,
        whole,
        lost,
    )
    if reachable is not None:
        prefetch.reachable = reachable
    return prefetch
