"""Turns of the scheduler, for one part of ours."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from hcache_backend.ranks import Turn
from hcache_backend.sglang.radix_cache import apply_turn, propose_turn
from tests.kit.prefetch import Operation

Reduce = Callable[[torch.Tensor, Any], object]


def alone(numbers: torch.Tensor, operation: Any) -> None:
    """The agreement of one rank."""


def turn_of_checks(checks: Any, reduce: Reduce = alone) -> None:
    turn = Turn()
    checks.propose_checks(turn)
    turn.agree(reduce)
    checks.apply_checks()


def turn_of(part: Any, cache: Any, reduce: Reduce = alone) -> None:
    """A turn of a controller, or of eager loads."""
    turn = Turn(cache)
    if hasattr(cache, "ongoing_prefetch"):
        cache.ongoing_prefetch = Operation.prefetches.watch(cache.ongoing_prefetch)
    if hasattr(part, "node_backups"):
        propose_turn(part, turn)
        turn.agree(reduce)
        apply_turn(part, turn)
    else:
        part.fronts.propose_slices(turn, part.restore_arrived(cache))
        turn.agree(reduce)
        part.fronts.apply_slices()


def answered(pairs: Any, reduce: Reduce = alone) -> bool:
    """A turn of pairs of nodes: whether the first node waits no more."""
    turn = Turn()
    pairs.propose_answer(turn)
    turn.agree(reduce)
    found: bool = pairs.apply_answer()
    return found


def work(of: Callable[[], Any]) -> int:
    """Number of lines that ``of`` runs, each round of a loop anew, and of functions of C that it
    calls."""
    found = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal found
        found += event in ("line", "c_call")
        return count

    sys.setprofile(count)
    sys.settrace(count)
    try:
        of()
    finally:
        sys.settrace(None)
        sys.setprofile(None)
    return found
