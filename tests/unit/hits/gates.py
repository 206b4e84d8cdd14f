"""A gate whose clock a test turns, and what HiCache's threads do to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hcache_backend.prefetch.estimates import Estimates, L3Progress
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.prefetch import Prefetch, Prefetches, Recomputing

STEP = 128


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def new_gate(clock: Any, machine: Any = None, min_gain: float = 1.0) -> HitGate:
    return HitGate(L3Progress(Estimates(machine), clock), Prefetches(), "test", min_gain)


def named(gate: HitGate, name: str) -> Prefetch:
    """The prefetch of a request; another one if the gate does not know it."""
    return gate.prefetches.waiting.get(name) or Prefetch(name)


@contextmanager
def reading(gate: HitGate, name: str, wanted: int, step: int = STEP) -> Iterator[None]:
    gate.read_begins(named(gate, name), wanted, step)
    yield
    gate.read_ends()


def read(gate: HitGate, clock: Clock, seconds: float, tokens: int = 1000) -> None:
    """L3 brought ``tokens`` tokens in ``seconds``."""
    with reading(gate, "earlier", tokens):
        gate.l3.arrived(tokens)
        clock.now += seconds


def judged(
    gate: HitGate,
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
    return gate.takes(named(gate, name), tokens, tokens + rest, shared, parts=parts)


def takes(gate: HitGate, name: str, tokens: int = 1000, **others: Any) -> bool:
    return judged(gate, name, tokens, **others) == tokens


def refused(gate: HitGate, name: str) -> bool:
    """Whether the request is refused if SGLang asks for it again."""
    return gate.prefetches.ask(name, 0, None).refused


def turn(gate: HitGate, *running: Prefetch) -> list[str]:
    """One turn of a single rank; whose prefetches end."""
    *ends, stalled = gate.to_end(running)
    ended = [one for one, end in zip(running, ends, strict=True) if end]
    gate.agreed(ended, stalled)
    return [one.request_id for one in ended]


def at(
    gate: HitGate,
    name: str,
    arrived: int = 0,
    whole: bool = False,
    step: int = STEP,
    lost: int = 0,
    reachable: int | None = None,
) -> Prefetch:
    """A prefetch as it is in a turn."""
    prefetch = named(gate, name)
    prefetch.arrived, prefetch.step, prefetch.whole, prefetch.lost = arrived, step, whole, lost
    if reachable is not None:
        prefetch.reachable = reachable
    return prefetch
