"""Launches of the product on its streams and the waits between these are what they were.

The scenarios and modelled streams are those of ``tests/order``: there is no engine, and everything
is in one thread. A line is a launch or what orders streams; repeated lines stand once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.goldens.golden import compare
from tests.order.checker import Checker
from tests.order.product import CheckedStream
from tests.order.scenarios import SCENARIOS, run

LONGEST = 250
"""Repetitions of more lines than these are not recognised."""


def traced(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a scenario's streams get, in order."""
    checker, lines, streams = Checker(), list[str](), dict[Any, str]()
    work, record, wait, keep = (
        getattr(CheckedStream, n) for n in ("run", "record", "wait", "keep")
    )

    def of(stream: Any) -> str:
        return checker.clocks.names[stream.actor]

    def told_run(self: Any, *args: Any) -> Any:
        lines.append(f"{of(self)}: launch")
        return work(self, *args)

    def told_record(self: Any, **kwargs: Any) -> Any:
        event = record(self, **kwargs)
        streams[event] = of(self)
        return event

    def told_wait(self: Any, event: Any) -> None:
        lines.append(f"{of(self)}: wait for {streams[event]}")
        wait(self, event)

    def told_keep(self: Any, tensor: Any) -> None:
        lines.append(f"{of(self)}: keep memory")
        keep(self, tensor)

    for method, told in (
        ("run", told_run),
        ("record", told_record),
        ("wait", told_wait),
        ("keep", told_keep),
    ):
        monkeypatch.setattr(CheckedStream, method, told)
    run(SCENARIOS[name], checker)
    monkeypatch.undo()
    return lines


def folded(lines: list[str], indent: str = "  ") -> Iterator[str]:
    """Lines that follow each other again and again stand once, with how often."""
    start = 0
    while start < len(lines):
        length, times = max(
            ((length, repetitions(lines, start, length)) for length in range(1, LONGEST + 1)),
            key=lambda found: (found[0] * (found[1] - 1), -found[0]),
        )
        block = lines[start : start + length]
        if times == 1:
            yield f"{indent}{lines[start]}"
        elif length == 1:
            yield f"{indent}{times} x {lines[start]}"
        else:
            yield f"{indent}{times} times:"
            yield from folded(block, f"{indent}  ")
        start += length * times if times > 1 else 1


def repetitions(lines: list[str], start: int, length: int) -> int:
    """How often the ``length`` lines from ``start`` on follow each other."""
    times, block = 1, lines[start : start + length]
    while len(block) == length and lines[start + times * length :][:length] == block:
        times += 1
    return times


def test_launches_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in SCENARIOS:
        found += [f"[{name}]", *folded(traced(name, monkeypatch)), ""]
    compare("streams.txt", found)
