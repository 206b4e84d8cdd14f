"""Launches of the product on its streams and the waits between these are what they were.

The scenarios and modelled streams are those of ``tests/order``: there is no engine, and everything
is in one thread. A line has launches and what orders streams; repeated lines stand once.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.goldens.golden import compare
from tests.goldens.repeats import folded
from tests.order.checker import Checker
from tests.order.scenarios import SCENARIOS, run
from tests.order.stand_ins import CheckedStream


def traced(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a scenario's streams get, in order: the stream and what it gets."""
    checker, lines, streams = Checker(), list[tuple[str, str]](), dict[Any, str]()
    work, record, wait, keep = (
        getattr(CheckedStream, n) for n in ("run", "record", "wait", "keep")
    )

    def of(stream: Any) -> str:
        return checker.clocks.names[stream.actor]

    def told_run(self: Any, *args: Any) -> Any:
        lines.append((of(self), "launch"))
        return work(self, *args)

    def told_record(self: Any, **kwargs: Any) -> Any:
        event = record(self, **kwargs)
        streams[event] = of(self)
        return event

    def told_wait(self: Any, event: Any) -> None:
        lines.append((of(self), f"wait for {streams[event]}"))
        wait(self, event)

    def told_keep(self: Any, tensor: Any) -> None:
        lines.append((of(self), "keep memory"))
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


def by_stream(lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for all that a stream gets before another one gets something."""
    for stream, those in itertools.groupby(lines, lambda line: line[0]):
        parts = []
        for what, same in itertools.groupby(what for _, what in those):
            times = len([*same])
            parts.append(what if times == 1 else f"{times} x {what}")
        yield f"{stream}: {', '.join(parts)}"


def test_launches_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = list[str](), dict[tuple[str, ...], str]()
    for name in SCENARIOS:
        lines = tuple(by_stream(traced(name, monkeypatch)))
        same = seen.setdefault(lines, name)
        found += [f"[{name}]", *(folded(lines) if same == name else [f"  as [{same}]"]), ""]
    compare("streams.txt", found)
