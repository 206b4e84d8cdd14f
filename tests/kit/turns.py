"""Turns of the scheduler, for one part of ours."""

from collections.abc import Callable
from typing import Any

import torch

from hcache_backend.ranks import Turn

Reduce = Callable[[torch.Tensor, Any], object]


def alone(numbers: torch.Tensor, operation: Any) -> None:
    """The agreement of one rank."""


def turn_of_checks(checks: Any, reduce: Reduce = alone) -> None:
    turn = Turn()
    checks.ask(turn)
    turn.agree(reduce)
    checks.hear()


def turn_of(part: Any, cache: Any, reduce: Reduce = alone) -> None:
    """A turn of a controller, or of eager loads."""
    turn = Turn(cache)
    if hasattr(part, "begin_turn"):
        part.begin_turn(turn)
        turn.agree(reduce)
        part.end_turn(turn)
    else:
        part.ask(turn)
        turn.agree(reduce)
        part.hear()


def recompute(eager: Any, reduce: Reduce = alone) -> None:
    turn = Turn()
    eager._offer(turn)
    turn.agree(reduce)
    eager.hear()


def answered(pairs: Any, reduce: Reduce = alone) -> bool:
    """A turn of pairs of nodes: whether the first node waits no more."""
    turn = Turn()
    pairs.look(turn)
    turn.agree(reduce)
    found: bool = pairs.answered()
    return found
