"""A gate whose clock a test turns, and what HiCache's threads do to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hcache_backend.prefetch.costs import Recomputing
from hcache_backend.prefetch.gate import HitGate, Running

STEP = 128


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def reading(gate: HitGate, name: str, wanted: int, step: int = STEP) -> Iterator[None]:
    gate.read_begins(name, wanted, step)
    yield
    gate.read_ends()


def read(gate: HitGate, clock: Clock, seconds: float, tokens: int = 1000) -> None:
    """L3 brought ``tokens`` tokens in ``seconds``."""
    with reading(gate, "earlier", tokens):
        gate.l3.arrived(tokens)
        clock.now += seconds


def takes(
    gate: HitGate,
    name: str,
    tokens: int = 1000,
    rest: int = 0,
    prefix: int = 0,
    recomputing: Recomputing | None = None,
) -> bool:
    assert gate.may_ask(name, prefix, recomputing)
    return gate.takes(name, tokens, tokens + rest) == tokens


def tries(gate: HitGate, name: str, tokens: int = 1000, behind: int = 0) -> int:
    """A hit is too slow, and a trial reads a small part of it: so many tokens."""
    assert gate.may_ask(name, 0)
    part = gate.takes(name, tokens, tokens, behind)
    assert 0 < part <= tokens // 10
    return part


def turn(gate: HitGate, *running: Running) -> list[str]:
    """One turn of a single rank; whose prefetches end."""
    *ends, overdue = gate.to_end(running)
    ended = [one.request_id for one, end in zip(running, ends, strict=True) if end]
    gate.agreed(ended, overdue)
    return ended


def at(
    name: str,
    arrived: int = 0,
    whole: bool = False,
    step: int = STEP,
    lost: int = 0,
    reachable: int | None = None,
) -> Running:
    return Running(name, arrived, step, whole, lost, reachable)
