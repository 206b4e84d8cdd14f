"""Units of K and V that cannot be encoded, as if the model had written such values; wrong ones."""

from collections.abc import Callable
from typing import Any

import torch

from tests.kit.scheduler import around


def do_not_fit(one_in: int = 3, by_number: bool = False) -> None:
    """In every other layer one page in so many does not fit; its bytes are no codes, either.
    ``by_number``: every CPU chooses the same pages, whose bytes differ with its order of sums."""
    from hcache_backend.host.segments import KVSegments
    from hcache_backend.start import build

    save = KVSegments._save_layer

    def unfit(
        self: Any, layer: int, held: Any, memory: Any, pages: torch.Tensor, offset: int
    ) -> torch.Tensor:
        fits = save(self, layer, held, memory, pages, offset)
        # By what the page holds: encoded once more, it does not fit either.
        name = pages if by_number else memory[pages, offset]
        chosen = (name % one_in == 0) & (layer % 2 == 1)
        part = slice(offset, offset + self._encoder.segment_bytes)
        # No index by a mask: the host would wait for the device.
        memory[pages, part] = torch.where(chosen[:, None], 0xA5, memory[pages, part])
        return fits & ~chosen

    check = build.check_copies

    def as_always(*tried: Any) -> None:
        KVSegments._save_layer = save  # type: ignore[method-assign]
        try:
            check(*tried)
        finally:
            KVSegments._save_layer = unfit  # type: ignore[method-assign]

    build.check_copies = as_always  # the start would refuse the codec
    KVSegments._save_layer = unfit  # type: ignore[method-assign]


def copy_wrongly(active: Callable[[], bool]) -> None:
    """Backups leave a wrong byte in K of the last layer."""
    from hcache_backend.host.segments import KVSegments

    def faulty(save: Any, self: Any, layout: Any, memory: Any, pages: Any, slots: Any) -> Any:
        fits = save(self, layout, memory, pages, slots)
        if active():
            last = layout.segment(len(layout.segment_bytes) - 1)
            memory[pages, last.start] += 1
        return fits

    around(KVSegments, "save", faulty)
