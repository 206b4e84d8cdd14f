"""Units of K and V that cannot be encoded, as if the model had written such values; wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def do_not_fit(one_in: int = 3) -> None:
    """In every other layer one page in so many does not fit; its bytes are no codes, either."""
    from hcache_backend.engine.kv_pages.segments import KVSegments
    from hcache_backend.engine.startup import strategy

    encode = KVSegments._encoded

    def unfit(self: Any, layer: int, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = encode(self, layer, *args)
        # By what the page holds: encoded once more, it does not fit either.
        chosen = (encoded[:, 0] % one_in == 0) & (layer % 2 == 1)
        encoded[chosen] = 0xA5
        return encoded, fits & ~chosen

    check = strategy.check_copies

    def as_always(plan: Any) -> None:
        KVSegments._encoded = encode  # type: ignore[method-assign]
        try:
            check(plan)
        finally:
            KVSegments._encoded = unfit  # type: ignore[method-assign]

    strategy.check_copies = as_always  # the start would refuse the codec
    KVSegments._encoded = unfit  # type: ignore[method-assign]


def copy_wrongly(active: Callable[[], bool]) -> None:
    """Backups leave a wrong byte in K of the last layer."""
    from hcache_backend.engine.kv_pages.segments import KVSegments

    save = KVSegments.save

    def faulty(self: Any, layout: Any, memory: Any, pages: Any, slots: Any) -> Any:
        fits = save(self, layout, memory, pages, slots)
        if active():
            last = layout.segment(len(layout.segment_bytes) - 1)
            memory[pages, last.start] += 1
        return fits

    KVSegments.save = faulty  # type: ignore[method-assign]
