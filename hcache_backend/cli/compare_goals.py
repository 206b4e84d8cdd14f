"""What is asked of restores, and whether the medians of a comparison meet it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class _Goal(NamedTuple):
    """The time of ``other`` divided by that of ``ours`` is to be ``wanted`` at least.

    Attributes:
        ours: Method, setting and part (``ms``, ``l3_ms`` or ``load_ms``).
        other: The same.
    """

    what: str
    ours: tuple[str, str, str]
    other: tuple[str, str, str]
    wanted: float


_GOALS = (
    _Goal(
        "L3 as it is: automatic is never slower than SGLang's file L3",
        ("hcache", "disk", "ms"),
        ("file", "disk", "ms"),
        1.0,
    ),
    _Goal(
        "L3 as it is: automatic reads faster than SGLang's file L3",
        ("hcache", "disk", "l3_ms"),
        ("file", "disk", "l3_ms"),
        1.3,
    ),
    _Goal(
        "L3 as it is: hidden states are read faster than by SGLang's file L3",
        ("hcache-hidden", "disk", "l3_ms"),
        ("file", "disk", "l3_ms"),
        1.3,
    ),
    _Goal(
        "balanced bus: hidden states load faster than KV pages",
        ("hcache-hidden", "balanced", "load_ms"),
        ("hcache-kv", "balanced", "load_ms"),
        1.7,
    ),
    _Goal(
        "balanced bus: hidden states load faster than recomputation",
        ("hcache-hidden", "balanced", "load_ms"),
        ("recompute", "disk", "ms"),
        5.0,
    ),
)


def goals(methods: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Those whose methods and settings were tried: ``what``, ``wanted``, ``found``, ``met``.

    Args:
        methods: Of ``compare.json``'s part ``restore``.
    """
    reached = []
    for goal in _GOALS:
        times = [_time(methods, where) for where in (goal.ours, goal.other)]
        if None in times:
            continue
        ours, other = times
        assert ours is not None
        assert other is not None
        found = other / ours
        reached.append(
            {
                "what": goal.what,
                "wanted": goal.wanted,
                "found": round(found, 3),
                "met": found >= goal.wanted,
            }
        )
    return reached


def _time(methods: Mapping[str, Mapping[str, Any]], where: Sequence[str]) -> float | None:
    name, setting, part = where
    row = methods[name][setting] if name in methods else None
    return float(row[part]) if row else None
