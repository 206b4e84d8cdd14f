"""Text that repeats itself is written once."""

from collections.abc import Iterator, Sequence

LONGEST = 60
"""Repetitions of more lines than these are not recognised."""


def folded(lines: Sequence[str], indent: str = "  ") -> Iterator[str]:
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


def repetitions(lines: Sequence[object], start: int, length: int) -> int:
    """How often the ``length`` lines from ``start`` on follow each other."""
    times, block = 1, lines[start : start + length]
    while len(block) == length and lines[start + times * length :][:length] == block:
        times += 1
    return times


def turns_once(trace: Sequence[str]) -> Iterator[str]:
    """Turns that are alike and follow each other stand once: ``7 x`` is there instead of ``*``."""
    turns: list[list[str]] = []
    for line in trace:
        if turns and line.startswith("  "):
            turns[-1].append(line)
        else:
            turns.append([line])
    start = 0
    while start < len(turns):
        first, times = turns[start], repetitions(turns, start, 1)
        yield first[0] if times == 1 else f"{times} x {first[0].removeprefix('* ')}"
        yield from first[1:]
        start += times
