"""Faults of the kernel that moves rows of hidden states to host memory; rows without a code."""

from collections.abc import Callable
from typing import Any

import torch

from tests.kit.scheduler import around


def save_fails(active: Callable[[], bool]) -> None:
    """It cannot be compiled."""

    def no_kernel(staged: Any) -> Any:
        raise NotImplementedError("no such kernel")

    _spoil(active, no_kernel)


def wrong_save(active: Callable[[], bool]) -> None:
    """It moves every row to the place of the next one."""
    _spoil(active, lambda staged: staged.roll(1, 1))


def _spoil(active: Callable[[], bool], spoil: Callable[[Any], Any]) -> None:
    from hcache_backend.capture import staging

    def faulty(save: Any, staged: Any, *args: Any) -> None:
        save(spoil(staged) if active() else staged, *args)

    around(staging, "save_rows", faulty)


def encoded_wrongly() -> None:
    """What pages hold of every encoded row is something else than its code."""
    from hcache_backend.capture import staging

    def wrong(stored_rows: Any, codec: Any, *rows: Any) -> Any:
        for *which, stored in stored_rows(codec, *rows):
            yield *which, stored if codec.is_view else stored ^ 1

    around(staging, "stored_rows", wrong)


def do_not_fit(one_in: int) -> None:
    """One in so many rows of a layer cannot be encoded, as if the model had written such values;
    its bytes are no code, either."""
    from hcache_backend.capture import hooks, staging
    from hcache_kernels.staging import WRONG_STEP

    stored_rows = staging.stored_rows

    def unfit(codec: Any, rows: Any, marks: Any, *to: Any) -> Any:
        for part, some, stored in stored_rows(codec, rows, marks, *to):
            if not codec.is_view:
                # By what the row holds: computed again, it does not fit either.
                chosen = (stored[..., :4].to(int) << torch.arange(0, 32, 8)).sum(-1) % one_in == 0
                stored[chosen] = 0xA5
                marks[part, some].masked_fill_(chosen, WRONG_STEP)
            yield part, some, stored

    staging.stored_rows = hooks.stored_rows = unfit
