"""The arena: our pages in one piece of pinned host memory, by the numbers that HiCache gives them.

HiCache's index of a host page is logical: a table names its physical page. If layers are captured,
every page of the device's KV pool owns one more physical page, its *shadow*, for the rows of its
tokens. A backup exchanges two table entries and copies no hidden states.

- Every physical page is in exactly one table entry.
- Rows belong to one allocation of their slot. A new allocation or a load makes them void; later
  results of earlier steps do not count.
- After a backup or a load, the rows of a device page are in a host page: the two are linked. If
  HiCache frees that while the tokens are on the device (``write_back`` does), the entries are
  exchanged back, and the page can be backed up again.
- A page that was loaded cannot be backed up again.
- Recomputed rows come to a host page without a shadow, which counts once they are there.
- A page that the codec cannot hold is not a page. Its rows are not backed up. If that is known
  only after the copy, the host page is unfit: no load takes it, and it does not go to L3.

Scheduler thread, but any thread may use ``physical``, ``pages``, ``unfit`` and ``expect`` for pages
that it owns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hcache_backend.format.envelope import WRITER_BYTES
from hcache_backend.format.page import NO_NAMESPACE, PageLayout

Ids = npt.NDArray[np.int64]  # numbers of pages or slots, [n]

NOT_ENCODABLE = "rows not encodable"  # the problem of a page that the codec cannot hold


class _RowState:
    """The state of a slot's row, all layers together; an enum would take time."""

    VOID = 0
    PROMISED = 1  # the step was launched; that every layer was written is not proven yet
    PROVEN = 2
    UNFIT = 3  # the codec cannot hold a row of it


class Verdict:
    """The device's verdict on a promised row, in the numbers of ``judge_rows``."""

    MISSING = 0  # a layer's copy did not happen
    WRITTEN = 1
    UNFIT = 2  # the codec cannot hold it in a layer


class ShadowChanges(NamedTuple):
    """New shadows of device pages; captures from now on must use them."""

    device_pages: Ids
    physical: Ids


class Arena:
    """Page tables, validity of rows, and the tokens of every slot. ``memory``: uint8 ``[host_pages
    + device_pages, stride]``, of which only headers are written here. ``device_pages``: of the
    device's KV pool, with the padding page; 0: no layer is captured, and pages get their headers on
    the way to L3. ``stamp`` writes the header of a complete page (uint8 ``[page_bytes]``) that has
    its tokens.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        layout: PageLayout,
        host_pages: int,
        device_pages: int = 0,
        stamp: Callable[[npt.NDArray[np.uint8]], None] = lambda page: None,
    ) -> None:
        wanted = (host_pages + device_pages, layout.stride)
        if host_pages < 1:
            raise ValueError(f"{host_pages} host pages: the arena needs at least one")
        if memory.shape != wanted:
            raise ValueError(f"memory is {memory.shape}, the arena needs {wanted}")
        self.memory = memory
        self.layout = layout
        self._unfit = np.zeros(len(memory), np.bool_)  # by physical page
        self._pending: dict[int, Ids] = {}  # by host page: the array of its wait_for
        self._stamp = stamp
        slots = device_pages * layout.page_size
        self._host = np.arange(host_pages, dtype=np.int64)
        self._shadow = np.arange(host_pages, host_pages + device_pages, dtype=np.int64)
        self._clock = 0
        self._generation = np.zeros(slots, np.int64)  # clock when the slot's rows last became void
        self._rows = np.zeros(slots, np.uint8)
        self._lost = np.zeros(slots, np.bool_)  # filled, and a row is missing
        self._positions = np.zeros(slots, np.int32)
        self._token_ids = np.zeros(slots, np.int32)
        self._device_page = np.full(host_pages, -1, np.int64)  # the one whose tokens it holds
        self._host_page = np.full(device_pages, -1, np.int64)  # the same link from the other side
        self._unproven: set[int] = set()  # host pages that wait for the proof of their rows
        self._recomputed: set[int] = set()  # pending pages whose rows do not come from shadows
        self._blank_header = np.empty(layout.header_bytes, np.uint8)
        layout.begin_header(self._blank_header, NO_NAMESPACE, bytes(WRITER_BYTES))

    def physical(self, host_pages: Ids) -> Ids:
        return self._host[host_pages]

    def pages(self, host_pages: Ids, *, header: bool = False) -> list[npt.NDArray[np.uint8]]:
        """Views of pages, uint8 ``[page_bytes]`` each; with ``header`` only headers are read."""
        physical = self.physical(host_pages)
        self.host_access(physical, write=False, header=header)
        return [self.memory[page, : self.layout.page_bytes] for page in physical.tolist()]

    def host_access(self, pages: Ids, *, write: bool, header: bool = False) -> None:
        """Does nothing. Shows tests/order what the CPU accesses: no stream shows it."""

    def settled(self, host_pages: Ids) -> bool:
        """True if it is known of all pages whether their layers are there."""
        if not self._pending and not self._unproven:
            return True
        return not any(p in self._pending or p in self._unproven for p in host_pages.tolist())

    def unfit(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Mask of pages that the codec cannot hold, or that could not be copied."""
        return self._unfit[self.physical(host_pages)]

    def complete(self, host_pages: Ids) -> None:
        """All layers of the pages are there, or on their way."""
        self.stop_waiting(host_pages)
        self._unfit[self.physical(host_pages)] = False

    def mark_unfit(self, host_pages: Ids) -> None:
        """No load may take the pages until they get other content."""
        self._unfit[self.physical(host_pages)] = True

    def expect(self, host_pages: Ids) -> None:
        """The pages are about to be read from L3."""
        self.host_access(self.physical(host_pages), write=True)
        self.complete(host_pages)

    def wait_for(self, host_pages: Ids) -> None:
        """The pages are not settled until :meth:`mark_saved` gets this array, or are rewritten."""
        self._pending |= dict.fromkeys(host_pages.tolist(), host_pages)

    def stop_waiting(self, host_pages: Ids) -> None:
        """The pages wait for nothing any more."""
        for page in host_pages.tolist() if self._pending else ():
            self._pending.pop(page, None)
            self._recomputed.discard(page)

    def mark_saved(self, host_pages: Ids, fits: npt.NDArray[np.bool_]) -> Ids:
        """Settle pages of a :meth:`wait_for`, without those that wait anew. Returns those that do
        not fit the codec (``fits`` is False). Recomputed pages are stamped."""
        still = [self._pending.get(p) is host_pages for p in host_pages.tolist()]
        waited = np.array(still, np.bool_)
        recomputed = waited & [p in self._recomputed for p in host_pages.tolist()]
        self.stop_waiting(host_pages[waited])
        unfit = host_pages[waited & ~fits]
        self.mark_unfit(unfit)
        self._unlink_host(host_pages[recomputed & ~fits])
        self._stamp_all(host_pages[recomputed])
        return unfit

    def _stamp_all(self, host_pages: Ids) -> None:
        physical = self._host[host_pages]
        self.host_access(physical, write=True, header=True)
        for page in physical.tolist():
            self._stamp(self.memory[page])

    @property
    def shadows(self) -> Ids:
        return self._shadow.copy()

    def allocated(self, slots: Ids) -> None:
        """``slots`` were allocated: their rows are void."""
        self._unlink_device(slots // self.layout.page_size)
        self._refill(slots)
        self._lost[slots] = False

    def not_captured(self, slots: Ids) -> None:
        """A forward pass fills ``slots`` and leaves no rows."""
        self.allocated(slots)
        self._lost[slots] = True

    @property
    def none_lost(self) -> bool:
        """True if no slot that a forward pass filled is known to lack its rows."""
        return not self._lost.any()

    def begin_step(
        self, slots: Ids, positions: Ids, token_ids: Ids, *, promised: bool = True
    ) -> int:
        """A forward pass that fills ``slots`` was launched, and with it, if ``promised``, all that
        captures its rows. Returns the step's ticket for :meth:`prove`."""
        self._unlink_device(slots // self.layout.page_size)
        self._refill(slots, _RowState.PROMISED if promised else _RowState.VOID)
        self._lost[slots] = not promised
        self._positions[slots] = positions
        self._token_ids[slots] = token_ids
        return self._clock

    def prove(self, slots: Ids, ticket: int, verdicts: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """Apply a step's verdicts; returns how many rows, if still its own, are missing, unfit."""
        due = (self._generation[slots] == ticket) & (self._rows[slots] == _RowState.PROMISED)
        written = verdicts == Verdict.WRITTEN
        if np.count_nonzero(written) == len(written):
            self._rows[slots[due]] = _RowState.PROVEN
            self._finish_unproven()
            return 0, 0
        self._rows[slots[due & written]] = _RowState.PROVEN
        missing = slots[due & (verdicts == Verdict.MISSING)]
        unfit = slots[due & (verdicts == Verdict.UNFIT)]
        lost = np.concatenate((missing, unfit))
        self._refill(lost)
        self._lost[lost] = True
        self._rows[unfit] = _RowState.UNFIT
        self._finish_unproven()
        return len(missing), len(unfit)

    def problem(self, slots: Ids) -> str | None:
        """The reason why the pages of ``slots`` cannot be backed up, or None."""
        size = self.layout.page_size
        positions = self._positions[slots]
        pages = slots[::size] // size
        if not np.array_equal(slots, (pages[:, None] * size + np.arange(size)).ravel()):
            return "slots are not whole pages"
        rows = self._rows[slots]
        if (rows == _RowState.VOID).any():
            return "rows not valid"
        if (self._host_page[pages] >= 0).any():
            return "rows backed up already"
        first = int(positions[0])
        wanted = np.arange(first, first + len(positions), dtype=np.int32)
        if first % size or not np.array_equal(positions, wanted):
            return "positions not consecutive"
        return NOT_ENCODABLE if (rows == _RowState.UNFIT).any() else None

    def swap(self, slots: Ids, host_pages: Ids) -> ShadowChanges:
        """Back up the pages of ``slots``: their shadows become ``host_pages``. :meth:`problem` must
        be None; transfers to the shadows may still be under way."""
        size = self.layout.page_size
        pages = slots[::size] // size
        filled, empty = self._shadow[pages], self._host[host_pages]
        self._host[host_pages], self._shadow[pages] = filled, empty
        self._link(host_pages, pages)
        self.complete(host_pages)
        self._begin_headers(filled, self._positions[slots], self._token_ids[slots])
        self._unproven.update(host_pages.tolist())
        self._finish_unproven()
        return ShadowChanges(pages, empty)

    def mark_rows_missing(self, host_pages: Ids) -> None:
        """HiCache allocated ``host_pages`` for tokens whose rows are not there."""
        self.complete(host_pages)
        self._begin_headers(self._host[host_pages])

    def _begin_headers(self, physical: Ids, *tokens: npt.NDArray[Any]) -> None:
        """``tokens``: positions and ids, [n * page_size] each."""
        layout = self.layout
        self.host_access(physical, write=True, header=True)
        self.memory[physical, : layout.header_bytes] = self._blank_header
        for field, values in zip((layout.positions, layout.token_ids), tokens, strict=False):
            field(self.memory)[physical] = values.reshape(-1, layout.page_size)

    def whole(self, host_pages: Ids) -> bool | None:
        """True if all rows of ``host_pages`` are there; None if that is not known yet."""
        if not self.settled(host_pages):
            return None
        stamped = map(self.layout.is_stamped, self.memory[self._host[host_pages]])
        return not self.unfit(host_pages).any() and (not len(self._shadow) or all(stamped))

    def unfit_rows(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Mask of ``slots`` whose rows are known not to fit the codec."""
        return self._rows[slots] == _RowState.UNFIT

    def recomputed(self, host_pages: Ids, positions: Ids, token_ids: Ids) -> None:
        """The tokens come recomputed to ``host_pages``; :meth:`mark_saved` gets this array then."""
        self.complete(host_pages)
        self.wait_for(host_pages)
        if len(self._shadow):  # otherwise headers come when pages go to L3
            self._begin_headers(self._host[host_pages], positions, token_ids)
            self._recomputed.update(host_pages.tolist())

    def loaded(self, slots: Ids, host_pages: Ids) -> None:
        """``slots`` were allocated for the tokens of ``host_pages``. An unfit one has no rows:
        its tokens were recomputed to the slots."""
        size = self.layout.page_size
        pages = slots[::size] // size
        physical = self._host[host_pages]
        self._unlink_device(pages)
        self.host_access(physical, write=False, header=True)
        self._positions[slots] = self.layout.positions(self.memory)[physical].ravel()
        self._token_ids[slots] = self.layout.token_ids(self.memory)[physical].ravel()
        self._link(host_pages, pages)
        unfit = np.repeat(self._unfit[physical], size)
        self._rows[slots] = np.where(unfit, _RowState.UNFIT, _RowState.PROVEN)

    def _finish_unproven(self) -> None:
        """Stamp the pages whose rows are all there; a page that lost one is never stamped."""
        if not self._unproven:
            return
        host_pages = np.fromiter(self._unproven, np.int64)
        rows = self._rows.reshape(-1, self.layout.page_size)[self._device_page[host_pages]]
        proven = (rows == _RowState.PROVEN).all(1)
        unfit = (rows == _RowState.UNFIT).any(1)
        self.mark_unfit(host_pages[unfit])
        self._stamp_all(host_pages[proven])
        settled = proven | unfit | (rows == _RowState.VOID).any(1)
        self._unproven.difference_update(host_pages[settled].tolist())

    def host_freed(self, host_pages: Ids) -> ShadowChanges:
        """HiCache freed ``host_pages``: tokens still on the device take their rows back as shadows.
        All that happened to their slots must be known, and recomputed rows must be there."""
        linked = host_pages[self._device_page[host_pages] >= 0]
        rows = self._rows.reshape(-1, self.layout.page_size)[self._device_page[linked]]
        back = linked[(rows == _RowState.PROVEN).all(1)]
        pages = self._device_page[back]
        self._host[back], self._shadow[pages] = self._shadow[pages], self._host[back]
        self._host_page[pages] = self._device_page[back] = -1
        self.host_dropped(host_pages)
        return ShadowChanges(pages, self._shadow[pages])

    def host_dropped(self, host_pages: Ids) -> None:
        """HiCache freed ``host_pages``, and their tokens are not on the device any more."""
        self.stop_waiting(host_pages)
        self._unlink_host(host_pages)

    def clear(self) -> None:
        """Every host page and every slot was freed."""
        self._refill(slice(None))
        self._lost[:] = False
        self._device_page[:] = self._host_page[:] = -1
        for pages in (self._unproven, self._pending, self._recomputed):
            pages.clear()

    def _link(self, host_pages: Ids, device_pages: Ids) -> None:
        self._unlink_host(host_pages)
        self._device_page[host_pages] = device_pages
        self._host_page[device_pages] = host_pages

    def _unlink_host(self, host_pages: Ids) -> None:
        """Cut the links: rows that were in these host pages are in no shadow, so they are void."""
        device_pages, size = self._device_page[host_pages], self.layout.page_size
        device_pages = device_pages[device_pages >= 0]
        self._refill((device_pages[:, None] * size + np.arange(size)).ravel())
        self._host_page[device_pages] = -1
        self._device_page[host_pages] = -1
        self._unproven.difference_update(host_pages.tolist())

    def _refill(self, slots: Ids | slice, state: int = _RowState.VOID) -> None:
        """``slots`` get other rows; a proof that is still on its way does not count for them."""
        self._clock += 1
        self._generation[slots] = self._clock
        self._rows[slots] = state

    def _unlink_device(self, device_pages: Ids) -> None:
        host_pages = self._host_page[device_pages]
        host_pages = host_pages[host_pages >= 0]
        if len(host_pages):
            self._unlink_host(np.unique(host_pages))
