"""K and V of what encoded pages cannot hold are kept as they are, in fixed host memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hcache_backend.arena import Ids
from hcache_backend.engine import metrics
from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.page import key_bytes
from hcache_backend.streams import Event, current_stream, host_tensor, to_device

logger = logging.getLogger("hcache")

RowsFit = Callable[[Ids], npt.NDArray[np.bool_] | None]
"""Which host pages (int64 ``[p]``), whose transfer has passed, hold their rows of hidden states,
bool ``[p]``; None: nobody has looked yet."""

Kept = Mapping[int, tuple[Ids, Ids]]
"""By layer, which of some pages (their places) the overflow has, in which rows: int64 ``[n]``."""

_ALIGNMENT = 16
"""Kernels copy so many bytes at once where rows begin at a multiple of them."""

_KEYS = 1 << 16
"""Pages that are known not to be in L3; those that were noted first are forgotten."""


class Overflow:
    """Which layers of host pages are kept apart, because the page cannot hold what they encode to.

    Args:
        rows: Rows of memory, each with room for K and V of one layer of one page.

    Attributes:
        rows: How many there are.
        lost: Host pages with a layer that neither fits nor found a row: a load recomputes them.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.lost: set[int] = set()
        self._rows: dict[int, dict[int, int]] = {}  # by host page, by layer
        self._not_in_l3: dict[bytes, None] = {}
        self.clear()

    @property
    def rows_in_use(self) -> int:
        return self.rows - len(self._free)

    def clear(self) -> None:
        """Forget everything."""
        self._free = list(range(self.rows))
        self._rows.clear()
        self.lost.clear()

    def take(self, host_page: int, layers: Sequence[int]) -> None:
        """Find a row for each of ``layers`` of a page; without room the page is lost."""
        if len(layers) > len(self._free):
            self.lose([host_page])
        else:
            self._rows[host_page] = {layer: self._free.pop() for layer in layers}

    def lose(self, host_pages: Iterable[int]) -> None:
        """What was to be kept of ``host_pages`` is not there."""
        host_pages = list(host_pages)
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

    def note(self, key: bytes, *, encodable: bool) -> None:
        """Whether all layers of the page ``key`` fit, when it was to go to L3. One thread.

        What is behind a page that does not stays out of L3 until this server finds that it does.
        """
        self._not_in_l3.pop(key, None)
        if not encodable:
            self._not_in_l3[key] = None
            if len(self._not_in_l3) > _KEYS:
                del self._not_in_l3[next(iter(self._not_in_l3))]

    def keeps_from_l3(self, key: bytes) -> bool:
        """Whether the page ``key`` is not in L3 because a layer of it did not fit. Any thread."""
        return key in self._not_in_l3

    def keeps_one_from_l3(self, keys: Iterable[str]) -> bool:
        """Whether one of the pages of these keys, as SGLang has them, is not in L3 because of
        that."""
        return bool(self._not_in_l3) and any(self.keeps_from_l3(key_bytes(key)) for key in keys)

    def rows_of(self, host_page: int) -> dict[int, int]:
        """The rows of ``host_page``, by layer."""
        return self._rows.get(host_page, {})

    def of_pages(self, host_pages: Ids) -> Kept:
        """What is here of ``host_pages`` (int64 ``[p]``)."""
        if not self._rows:
            return {}
        found = defaultdict(list)
        for place, page in enumerate(host_pages.tolist()):
            for layer, row in self.rows_of(page).items():
                found[layer].append((place, row))
        return {layer: _columns(pairs) for layer, pairs in found.items()}


def _columns(pairs: list[tuple[int, int]]) -> tuple[Ids, Ids]:
    first, second = np.array(pairs, np.int64).T.copy()
    return first, second


class SavedPages(NamedTuple):
    """Pages of a backup that was launched.

    Attributes:
        host_pages: int64 ``[p]``.
        held: The pages of the pool that they were copied from, int64 ``[p]``, on the device.
        fits: Which of their layers of K and V fit, bool ``[layers, p]``, on the CPU behind the
            transfer; none where these are not encoded.
    """

    host_pages: Ids
    held: torch.Tensor
    fits: torch.Tensor


class OverflowArea:
    """Keeps K and V of what does not fit in encoded pages as they are, in fixed host memory.

    That something does not fit is known behind the transfer, when HiCache already counts on the
    backup. So HiCache hears of the backup's end only once this is copied, too: until then it leaves
    the tokens on the device. Where a row of hidden states does not fit, K and V of all layers of
    hidden states of its page are kept. Scheduler thread only.

    Args:
        kv: Saved the pages.
        room: uint8, contiguous memory that the device can read and write.
        hidden: Layers that are stored as encoded hidden states; none: see ``rows_fit``.

    Attributes:
        rows_fit: Says which pages hold these; None: pages that do not are not backed up.
        agree: For each page, whether it is so on all ranks, which all ask at one point; None: there
            are no others.
    """

    def __init__(
        self,
        kv: KVSegments,
        room: torch.Tensor,
        device: torch.device | str,
        hidden: Sequence[int] = (),
    ) -> None:
        room = room.view(-1)[-room.data_ptr() % _ALIGNMENT :]
        plain_bytes = self._row_bytes(kv, hidden)
        rows = room.numel() // plain_bytes
        self.pages = Overflow(rows)
        self.hidden = tuple(hidden)
        self.rows_fit: RowsFit | None = None
        self.agree: Callable[[Sequence[bool]], Sequence[bool]] | None = None
        self._told = (0, 0, 0)
        self._kv = kv
        self._memory = room[: rows * plain_bytes].view(rows, -1)
        self._device = device
        self._last: SavedPages | None = None
        self._unsettled: dict[int, Ids] = {}  # by host page, all those of its backup
        self._warned = False

    @staticmethod
    def least_bytes(kv: KVSegments, hidden: Sequence[int] = ()) -> int:
        """Room for a page of which no layer fits, wherever it begins; 0: nothing is encoded."""
        layers = len(hidden) + (len(kv.layers) if kv.codec != "none" else 0)
        return layers * OverflowArea._row_bytes(kv, hidden) + _ALIGNMENT if layers else 0

    @staticmethod
    def _row_bytes(kv: KVSegments, hidden: Sequence[int]) -> int:
        return max(kv.bytes_of(layer) for layer in (*kv.layers, *hidden))

    def saved(self, host_pages: Ids, slots: torch.Tensor, fits: torch.Tensor | None) -> SavedPages:
        """``host_pages`` were saved from ``slots``, as far as they fit, on the current stream.

        ``fits`` is as by :meth:`KVSegments.save`.

        What did not fit will be kept when :meth:`awaited` is told of this backup.
        """
        if fits is None:
            fits = torch.ones((0, len(host_pages)), dtype=torch.bool, device=slots.device)
        self._last = self.told(host_pages, slots, fits)
        return self._last

    def told(self, host_pages: Ids, slots: torch.Tensor, fits: torch.Tensor) -> SavedPages:
        """The same of pages that are no backup: somebody calls :meth:`lose_unfit` behind that."""
        told = host_tensor(fits.shape, torch.bool, self._device).copy_(fits, non_blocking=True)
        self._unsettled |= dict.fromkeys(host_pages.tolist(), host_pages)
        return SavedPages(host_pages, self._kv.pages_of(slots), told)

    def lose_unfit(self, saved: SavedPages) -> npt.NDArray[np.bool_]:
        """Pages that have arrived, and of which a layer did not fit, are lost: bool ``[p]``."""
        lost = ~saved.fits.numpy().all(0) & self._unfreed(saved)
        self.pages.lose(saved.host_pages[lost].tolist())
        self._settle(saved.host_pages)
        self._tell()
        return lost

    def _unfreed(self, saved: SavedPages) -> npt.NDArray[np.bool_]:
        """Which pages are still those: freed before it was known, a page is another's."""
        pages = saved.host_pages.tolist()
        return np.array([self._unsettled.get(page) is saved.host_pages for page in pages], np.bool_)

    def awaited(self, ack: Any) -> list[Any]:
        """HiCache's ``HiCacheAck`` of the last backup, which ends when what did not fit is kept.

        Where ranks have to agree on that, it is the second of two: all ranks hear of the end of the
        first one, which is of no node, in the same turn.
        """
        if self._last is None:
            return [ack]
        saved, self._last = self._last, None
        known = partial(self._known, saved.host_pages)
        launch, settle = partial(self._end, saved), partial(self._settle, saved.host_pages)
        end = _BackupEnd(ack, known, launch, settle, alone=self.agree is None)
        ended = ack._replace(start_event=end, finish_event=end)
        if self.agree is None:
            return [ended]
        agreed = SimpleNamespace(query=end.ready, synchronize=end.go_on)
        return [type(ack)(agreed, agreed, []), ended]

    def settled(self, host_page: int) -> bool:
        """Whether all that a backup brought to ``host_page`` is there, or is lost."""
        return host_page not in self._unsettled

    def kept(self, host_page: int) -> dict[int, torch.Tensor]:
        """What is here of ``host_page``, by layer: uint8 ``[bytes]``, on the CPU."""
        return {
            layer: self._memory[row, : self._kv.bytes_of(layer)]
            for layer, row in self.pages.rows_of(host_page).items()
        }

    def load(self, layer: int, kept: Kept, slots: torch.Tensor) -> None:
        """Copy what is ``kept`` of a layer to ``slots``, on the current stream.

        ``slots`` (int64 ``[p * page_size]``, on the device) are those of all pages of ``kept``.
        """
        if layer in kept:
            places, rows = (to_device(ids, self._device) for ids in kept[layer])
            held = self._kv.pages_of(slots)[places]
            self._kv.load_plain(layer, held, self._memory, rows)

    def freed(self, host_pages: Ids) -> None:
        """HiCache has freed ``host_pages`` (int64 ``[n]``)."""
        pages = host_pages.tolist()
        self.pages.forget(pages)
        for page in pages:
            self._unsettled.pop(page, None)
        self._tell()

    def clear(self) -> None:
        """HiCache has freed all pages."""
        self.pages.clear()
        self._unsettled.clear()
        self._tell()

    def _settle(self, host_pages: Ids) -> None:
        for page in host_pages.tolist():
            if self._unsettled.get(page) is host_pages:
                del self._unsettled[page]

    def _known(self, host_pages: Ids) -> bool:
        return self.rows_fit is None or self.rows_fit(host_pages) is not None

    def _end(self, saved: SavedPages) -> Event | None:
        """See :meth:`copy_unfit`; counts, and warns once."""
        copied = self.copy_unfit(saved)
        unfit = sum(page in self.pages for page in saved.host_pages.tolist())
        metrics.TOKENS.count("not_encodable", unfit * self._kv.page_size)
        self._tell()
        if self.pages.lost and not self._warned:
            self._warned = True
            logger.warning(
                "hcache: K and V of pages that cannot be encoded have no room in host memory: they "
                "are computed again wherever they are not on the device (codec 'none' keeps them; "
                'hcache_tokens_total{event="recomputed_at_load"} counts)'
            )
        return copied

    def _tell(self) -> None:
        """Say in the metrics how full it is."""
        use = self.pages.rows, self.pages.rows_in_use, len(self.pages.lost)
        if use != self._told:
            self._told = use
            for what, number in zip(("rows", "rows_in_use", "pages_lost"), use, strict=True):
                metrics.OVERFLOW.set(what, value=number)

    def copy_unfit(self, saved: SavedPages) -> Event | None:
        """Copy what did not fit of pages that have arrived, on the current stream; an event behind
        it, or None: nothing is on its way."""
        pages, unfit, layers = len(saved.host_pages), ~saved.fits.numpy(), self._kv.layers
        if self.rows_fit is not None:
            fit = None
            with metrics.harmless("overflow", "pages are kept as if their rows did not fit"):
                fit = self.rows_fit(saved.host_pages)
            lacks = np.ones(pages, np.bool_) if fit is None else ~fit
            if self.agree is not None:
                lacks = ~np.array(self.agree((~lacks).tolist()), np.bool_)
            unfit = np.concatenate((unfit, np.tile(lacks, (len(self.hidden), 1))))
            layers = (*layers[: len(saved.fits)], *self.hidden)
        unfit &= self._unfreed(saved)
        places = np.flatnonzero(unfit.any(0))
        if not len(places):
            return None
        host_pages = saved.host_pages[places].tolist()
        with metrics.harmless("overflow", "K and V that could not be encoded are lost"):
            now = current_stream(self._device)
            now.keep(saved.held)
            for place, host_page in zip(places.tolist(), host_pages, strict=True):
                self.pages.take(host_page, [layers[n] for n in np.flatnonzero(unfit[:, place])])
            for layer, kept in self.pages.of_pages(saved.host_pages[places]).items():
                at, rows = (to_device(ids, self._device) for ids in (places[kept[0]], kept[1]))
                self._kv.save_plain(layer, saved.held[at], self._memory, rows)
            return now.record()
        self.pages.lose(host_pages)
        return None


class _BackupEnd:
    """Both events of a backup, for HiCache's list of what it waits for.

    Args:
        ack: HiCache's, with the events of the transfer.
        known: Whether it is known what comes behind the backup, once that has passed.
        launch: Launches it; an event behind that, or None.
        ended: Is told when that has passed.
        alone: Whether it may be launched as soon as it is known.
    """

    def __init__(
        self,
        ack: Any,
        known: Callable[[], bool],
        launch: Callable[[], Event | None],
        ended: Callable[[], None],
        *,
        alone: bool,
    ) -> None:
        self._start, self._finish = ack.start_event, ack.finish_event
        self._known = known
        self._launch: Callable[[], Event | None] | None = launch
        self._launched: Event | None = None
        self._ended = ended
        self._alone = alone

    def ready(self) -> bool:
        """Whether what comes behind the backup can be launched."""
        return bool(self._finish.query()) and self._known()

    def go_on(self) -> Event | None:
        """Launch it, unless that was done; an event behind it, or None."""
        if self._launch is not None:
            self._finish.synchronize()
            self._launched, self._launch = self._launch(), None
        return self._launched

    def query(self) -> bool:
        if self._launch is not None and not (self._alone and self.ready()):
            return False
        last = self.go_on()
        if last is not None and not last.query():
            return False
        self._ended()
        return True

    def synchronize(self) -> None:
        last = self.go_on()
        if last is not None:
            last.synchronize()
        self._ended()

    def elapsed_time(self, _end: _BackupEnd) -> float:
        milliseconds: float = self._start.elapsed_time(self._finish)
        return milliseconds
