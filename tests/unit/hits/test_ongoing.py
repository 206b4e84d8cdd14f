"""No verb of a mapping passes by: a turn learns of every prefetch that comes or goes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.prefetch.prefetches import Ongoing

A, B = (SimpleNamespace(operation=name, anchor_node_id=0) for name in "ab")
COMES, GOES = False, True


@pytest.fixture
def told() -> list[tuple[Any, bool]]:
    return []


@pytest.fixture
def ongoing(told: list[tuple[Any, bool]]) -> Ongoing:
    """It has A and B, of which it has told."""
    ongoing = Ongoing(lambda record, over: told.append((record, over)))
    ongoing["a"], ongoing["b"] = A, B
    assert told == [(A, COMES), (B, COMES)]
    told.clear()
    return ongoing


@pytest.mark.parametrize(
    ("verb", "wanted"),
    [
        (lambda it: it.__setitem__("c", A), [(A, COMES)]),
        (lambda it: it.update(c=A, d=B), [(A, COMES), (B, COMES)]),
        (lambda it: it.setdefault("c", B), [(B, COMES)]),
        (lambda it: it.__delitem__("a"), [(A, GOES)]),
        (lambda it: it.pop("b"), [(B, GOES)]),
        (lambda it: it.popitem(), [(A, GOES)]),
        (lambda it: it.clear(), [(A, GOES), (B, GOES)]),
        (lambda it: it.pop("none", None), []),
    ],
    ids=["set", "update", "setdefault", "del", "pop", "popitem", "clear", "pop of none"],
)
def test_every_verb_tells(
    ongoing: Ongoing,
    told: list[tuple[Any, bool]],
    verb: Callable[[Ongoing], object],
    wanted: list[tuple[Any, bool]],
) -> None:
    verb(ongoing)
    assert told == wanted


@pytest.mark.parametrize("verb", [lambda it: it.pop("none"), lambda it: it.__delitem__("none")])
def test_a_request_that_has_none_is_an_error(
    ongoing: Ongoing, told: list[tuple[Any, bool]], verb: Callable[[Ongoing], object]
) -> None:
    with pytest.raises(KeyError, match="none"):
        verb(ongoing)
    assert told == []
