"""K and V that encoded pages cannot hold are kept as they are, in host memory of a fixed size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hcache_backend.arena import Ids
from hcache_backend.engine import metrics
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.streams import Event, current_stream, host_tensor, to_device

logger = logging.getLogger("hcache")

_NONE = np.empty(0, np.int64)


class Overflow:
    """Which layers of host pages are kept apart, because the page cannot hold what they encode to.

    Args:
        rows: Rows of memory, each with room for K and V of one layer of one page.

    Attributes:
        lost: Host pages with a layer that neither fits nor found a row. They cannot be loaded.
    """

    def __init__(self, rows: int) -> None:
        self.lost: set[int] = set()
        self._all = range(rows)
        self._rows: dict[int, dict[int, int]] = {}  # by host page, by layer
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._free = list(self._all)
        self._rows.clear()
        self.lost.clear()

    def take(self, host_page: int, layers: Iterable[int]) -> dict[int, int]:
        """A row for each of ``layers`` of a page, or none at all, and the page is lost."""
        layers = list(layers)
        if len(layers) > len(self._free):
            self.lose([host_page])
            return {}
        self._rows[host_page] = {layer: self._free.pop() for layer in layers}
        return self._rows[host_page]

    def lose(self, host_pages: Iterable[int]) -> None:
        """What was to be kept of ``host_pages`` is not there."""
        self.forget(host_pages)
        self.lost.update(host_pages)

    def forget(self, host_pages: Iterable[int]) -> None:
        """HiCache has freed ``host_pages``."""
        for page in host_pages:
            self._free.extend(self._rows.pop(page, {}).values())
            self.lost.discard(page)

    def __contains__(self, host_page: int) -> bool:
        """Whether a layer of ``host_page`` did not fit. Any thread."""
        return host_page in self._rows or host_page in self.lost

    def rows_of(self, host_page: int) -> dict[int, int]:
        """The rows of ``host_page``, by layer."""
        return self._rows.get(host_page, {})

    def rows(self, host_pages: Ids, layer: int) -> tuple[Ids, Ids]:
        """Which of ``host_pages`` (their places, int64 ``[n]``) have ``layer`` here, in which
        rows."""
        if not self._rows:
            return _NONE, _NONE
        kept = [self._rows.get(page, {}).get(layer, -1) for page in host_pages.tolist()]
        rows = np.array(kept, np.int64)
        places = np.flatnonzero(rows >= 0)
        return places, rows[places]


class SavedPages(NamedTuple):
    """Pages of a backup that was launched.

    Attributes:
        host_pages: int64 ``[p]``.
        held: The pages of the pool that they were copied from, int64 ``[p]``, on the device.
        fits: Which of their layers fit, bool ``[layers, p]``, on the CPU behind the transfer.
    """

    host_pages: Ids
    held: torch.Tensor
    fits: torch.Tensor


class OverflowArea:
    """Keeps K and V that do not fit in encoded pages as they are, in host memory of a fixed size.

    That something does not fit is known behind the transfer, when HiCache already counts on the
    backup. So HiCache hears of the backup's end only once this is copied, too: until then it leaves
    the tokens on the device. Scheduler thread only.

    Args:
        kv: Saved the pages.
        room: uint8, contiguous memory that the device can read and write.
    """

    def __init__(self, kv: KVSegments, room: torch.Tensor, device: torch.device | str) -> None:
        rows = room.numel() // kv.plain_bytes
        self.pages = Overflow(rows)
        self._kv = kv
        self._memory = room.view(-1)[: rows * kv.plain_bytes].view(rows, -1)
        self._device = device
        self._last: SavedPages | None = None
        self._unsettled: set[int] = set()
        self._warned = False

    def saved(self, host_pages: Ids, slots: torch.Tensor, fits: torch.Tensor) -> SavedPages:
        """``host_pages`` were saved from ``slots``, as far as they fit, on the current stream."""
        told = host_tensor(fits.shape, torch.bool, self._device).copy_(fits, non_blocking=True)
        self._last = SavedPages(host_pages, self._kv.pages_of(slots), told)
        self._unsettled.update(host_pages.tolist())
        return self._last

    def awaited(self, ack: Any) -> Any:
        """HiCache's ``HiCacheAck`` of the last backup, which ends when what did not fit is kept."""
        assert self._last is not None
        saved, self._last = self._last, None
        settle = partial(self._unsettled.difference_update, saved.host_pages.tolist())
        end = _BackupEnd(ack, partial(self._end, saved), settle)
        return ack._replace(start_event=end, finish_event=end)

    def settled(self, host_page: int) -> bool:
        """Whether all that a backup brought to ``host_page`` is there, or is lost."""
        return host_page not in self._unsettled

    def kept(self, host_page: int) -> dict[int, torch.Tensor]:
        """What is here of ``host_page``, by layer: uint8 ``[plain_bytes]``, on the CPU."""
        return {layer: self._memory[row] for layer, row in self.pages.rows_of(host_page).items()}

    def load(self, layer: int, host_pages: Ids, slots: torch.Tensor) -> None:
        """Copy what is here of a layer of ``host_pages`` to ``slots``, on the current stream."""
        places, rows = self.pages.rows(host_pages, layer)
        if len(places):
            held = self._kv.pages_of(slots)[to_device(places, self._device)]
            self._kv.load_plain(layer, held, self._memory, to_device(rows, self._device))

    def freed(self, host_pages: Ids) -> None:
        """HiCache has freed ``host_pages`` (int64 ``[n]``)."""
        self.pages.forget(host_pages.tolist())

    def clear(self) -> None:
        """HiCache has freed all pages."""
        self.pages.clear()
        self._unsettled.clear()

    def _end(self, saved: SavedPages) -> Event | None:
        """See :meth:`copy_unfit`; counts, and warns once."""
        unfit = int((~saved.fits).any(0).sum())
        copied = self.copy_unfit(saved)
        metrics.TOKENS.count("not_encodable", unfit * self._kv.page_size)
        if self.pages.lost and not self._warned:
            self._warned = True
            logger.warning(
                "hcache: K and V of pages that codec 'exp4' cannot encode have no room in host "
                "memory: they are computed again wherever they are not on the device (codec 'none' "
                'keeps them; hcache_tokens_total{event="not_restored_overflow_full"} counts)'
            )
        return copied

    def copy_unfit(self, saved: SavedPages) -> Event | None:
        """Copy what did not fit of pages that have arrived, on the current stream; an event behind
        it, or None: nothing is on its way."""
        unfit = ~saved.fits.numpy()
        places = np.flatnonzero(unfit.any(0))
        if not len(places):
            return None
        host_pages = saved.host_pages[places].tolist()
        with metrics.harmless("overflow", "K and V that could not be encoded are lost"):
            now = current_stream(self._device)
            now.keep(saved.held)
            for place, host_page in zip(places.tolist(), host_pages, strict=True):
                layers = [self._kv.layers[number] for number in np.flatnonzero(unfit[:, place])]
                held = saved.held[place : place + 1]
                for layer, row in self.pages.take(host_page, layers).items():
                    self._kv.save_plain(layer, held, self._memory, torch.full_like(held, row))
            return now.record()
        self.pages.lose(host_pages)
        return None


class _BackupEnd:
    """Both events of a backup, for HiCache's list of what it waits for.

    Args:
        ack: HiCache's, with the events of the transfer.
        launch: Launches what comes behind the backup; an event behind that, or None.
        ended: Is told when that has passed.
    """

    def __init__(
        self, ack: Any, launch: Callable[[], Event | None], ended: Callable[[], None]
    ) -> None:
        self._start, self._finish = ack.start_event, ack.finish_event
        self._launch: Callable[[], Event | None] | None = launch
        self._launched: Event | None = None
        self._ended = ended

    def query(self) -> bool:
        if not self._finish.query():
            return False
        last = self._go_on()
        if last is not None and not last.query():
            return False
        self._ended()
        return True

    def synchronize(self) -> None:
        self._finish.synchronize()
        last = self._go_on()
        if last is not None:
            last.synchronize()
        self._ended()

    def elapsed_time(self, _end: _BackupEnd) -> float:
        milliseconds: float = self._start.elapsed_time(self._finish)
        return milliseconds

    def _go_on(self) -> Event | None:
        if self._launch is not None:
            self._launched, self._launch = self._launch(), None
        return self._launched
