"""The arena: our pages in one piece of pinned host memory, and the table of what each of them is.

HiCache's index of a host page is logical: a table names its physical page. If layers are captured,
every page of the device's KV pool owns one more physical page, its *shadow*, for the rows of its
tokens. A backup exchanges two table entries and copies no hidden states.

- Every physical page is in exactly one table entry.
- A host page is FREE, COMING, HERE or UNFIT (docs/structure.md draws it). Loads take pages that are
  HERE, which may be on their way in a stream that the load waits for. They take no UNFIT page, and
  it does not go to L3. A page is FREE also if HiCache has it for tokens whose rows did not come.
- Content is expected, and settled by a ticket. Rows of a step are judged by their slots. A page is
  COMING until it has all that it waits for.
- Rows belong to one allocation of their slot: a new allocation or a load makes them void.
- After a backup or a load, the rows of a device page are in a host page: the two are linked. A page
  that was loaded cannot be backed up again.
- Positions and token ids stand in the header of a page as soon as its tokens are known: loads read
  them. All else of a header is written by :meth:`.PageLayout.seal`, once.

Scheduler thread, but any thread may use ``physical``, ``pages``, ``namespaces``, ``usable`` and
``unfit`` for pages that it owns, ``expect`` if HiCache has just allocated them, and ``settle`` for
what it expected itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hcache_backend.format.envelope import NAMESPACE_BYTES
from hcache_backend.format.page import PageLayout

Ids = npt.NDArray[np.int64]  # numbers of pages or slots, [n]
_Values = npt.NDArray[np.int64] | npt.NDArray[np.int32]

NO_NAMESPACE = bytes(NAMESPACE_BYTES)  # of pages whose weights are not known, or do not matter
NOT_ENCODABLE = "rows not encodable"  # the problem of a page that the codec cannot hold


class _PageState:
    """The state of a host page; an enum would take time."""

    FREE = 0
    HERE = 1  # COMING, as long as it waits for something
    UNFIT = 2  # the codec cannot hold it, or it could not be copied


class RowState:
    """The state of a slot's row, all layers together. The first three are also the verdicts of
    ``judge_rows`` on a promised row."""

    VOID = 0  # in a verdict: a layer's copy did not happen
    VALID = 1
    UNFIT = 2  # the codec cannot hold it in a layer
    PROMISED = 3  # the step was launched; that every layer was written is not known yet


class ShadowChanges(NamedTuple):
    """New shadows of device pages; captures from now on must use them."""

    device_pages: Ids
    physical: Ids


class Arena:
    """``memory``: uint8 ``[host_pages + device_pages, stride]``, of which only positions and token
    ids are written here. ``device_pages``: of the device's KV pool, with the padding page; 0: no
    layer is captured. ``namespace`` returns the namespace of pages made by the present weights."""

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        layout: PageLayout,
        host_pages: int,
        device_pages: int = 0,
        namespace: Callable[[], bytes] = lambda: NO_NAMESPACE,
    ) -> None:
        wanted = (host_pages + device_pages, layout.stride)
        if host_pages < 1:
            raise ValueError(f"{host_pages} host pages: the arena needs at least one")
        if memory.shape != wanted:
            raise ValueError(f"memory is {memory.shape}, the arena needs {wanted}")
        self.memory = memory
        self.layout = layout
        self._present_namespace = namespace
        slots = device_pages * layout.page_size
        # The table, by host page (a host page is a number that HiCache uses):
        self._host = np.arange(host_pages, dtype=np.int64)  # its physical page
        self._state = np.zeros(host_pages, np.uint8)
        self._ticket = np.zeros(host_pages, np.int64)  # of what was expected last; 0: none
        self._unsettled = np.zeros(host_pages, np.bool_)  # it waits for that...
        self._awaiting_rows = np.zeros(host_pages, np.bool_)  # ...or for rows of its device page
        self._namespace = np.zeros(host_pages, f"V{NAMESPACE_BYTES}")  # of the weights that made it
        self._device_page = np.full(host_pages, -1, np.int64)  # the one whose tokens it holds
        # By page of the device's KV pool:
        self._shadow = np.arange(host_pages, host_pages + device_pages, dtype=np.int64)
        self._host_page = np.full(device_pages, -1, np.int64)  # the same link from the other side
        # Ticket of the last step that may write the shadow.
        self._written = np.zeros(device_pages, np.int64)
        # By slot:
        self._generation = np.zeros(slots, np.int64)  # clock when the slot's rows last became void
        self._rows = np.zeros(slots, np.uint8)
        self._lost = np.zeros(slots, np.bool_)  # filled, and a row is missing
        self._positions = np.zeros(slots, np.int32)
        self._token_ids = np.zeros(slots, np.int32)
        self._clock = 0
        self._ended_step = 0  # ticket of the last step whose verdicts have come
        self._tickets = count(1)

    def physical(self, host_pages: Ids) -> Ids:
        return self._host[host_pages]

    def pages(self, host_pages: Ids, *, header: bool = False) -> list[npt.NDArray[np.uint8]]:
        """Views of pages, uint8 ``[page_bytes]`` each; with ``header`` the caller reads headers."""
        physical = self.physical(host_pages)
        self.host_access(physical, write=False, header=header)
        return [self.memory[page, : self.layout.page_bytes] for page in physical.tolist()]

    def host_access(self, pages: Ids, *, write: bool, header: bool = False) -> None:
        """Does nothing. Shows tests/order what the CPU accesses: no stream shows it."""

    def usable(self, host_pages: Ids) -> bool | None:
        """Whether loads may take all of the pages; None: the content of one has not come yet."""
        waits = self._unsettled[host_pages] | self._awaiting_rows[host_pages]
        return None if waits.any() else bool((self._state[host_pages] == _PageState.HERE).all())

    def unfit(self, host_pages: Ids) -> npt.NDArray[np.bool_]:
        """Mask of pages that the codec cannot hold, or that could not be copied."""
        return self._state[host_pages] == _PageState.UNFIT

    def namespaces(self, host_pages: Ids) -> list[bytes]:
        found: list[bytes] = self._namespace[host_pages].tolist()
        return found

    def expect(self, host_pages: Ids, namespace: bytes = NO_NAMESPACE) -> int:
        """HiCache has allocated ``host_pages``, and content of ``namespace`` will be written there.
        Returns a ticket (> 0): the caller passes it to :meth:`settle` when the content has come."""
        ticket = next(self._tickets)
        self._state[host_pages] = _PageState.HERE
        self._ticket[host_pages], self._unsettled[host_pages] = ticket, True
        self._namespace[host_pages] = np.void(namespace)
        return ticket

    def expect_recomputed(self, host_pages: Ids, positions: Ids, token_ids: Ids) -> int:
        """As :meth:`expect`, of rows that a forward pass recomputes: headers get the tokens now."""
        self._write_tokens(self._host[host_pages], positions, token_ids)
        return self.expect(host_pages, self._present_namespace())

    def tickets(self, host_pages: Ids) -> Ids:
        """The ticket of each page. It changes, or becomes 0, when HiCache frees the page."""
        return self._ticket[host_pages]

    def settle(
        self, host_pages: Ids, tickets: Ids | int, fits: npt.NDArray[np.bool_] | None = None
    ) -> Ids:
        """The content expected under ``tickets`` has come: loads may take ``host_pages``. A page
        that has another ticket by now was freed meanwhile, and is skipped. ``fits`` (``[n]``) is
        False for pages that the codec cannot hold: they become UNFIT. Returns these pages."""
        due = (self._ticket[host_pages] == tickets) & self._unsettled[host_pages]
        unfit = host_pages[:0] if fits is None else host_pages[due & ~fits]
        self._unsettled[host_pages[due]] = False
        if len(unfit):  # scheduler thread: the thread that reads L3 passes no ``fits``
            self.mark_unfit(unfit)
        return unfit

    def mark_unfit(self, host_pages: Ids) -> None:
        """No load may take the pages until they get other content."""
        self.free(host_pages)
        self._state[host_pages] = _PageState.UNFIT

    def free(self, host_pages: Ids) -> None:
        """The pages are FREE: HiCache freed them, or their expected content will never come. Rows
        of their tokens on the device become void."""
        self._unlink_host(host_pages)
        self._empty(host_pages)

    def _empty(self, host_pages: Ids | npt.NDArray[np.bool_] | slice) -> None:
        self._state[host_pages] = _PageState.FREE
        self._ticket[host_pages] = 0
        self._unsettled[host_pages] = self._awaiting_rows[host_pages] = False

    def take_back(self, host_pages: Ids) -> ShadowChanges:
        """HiCache freed the pages. If their tokens are still on the device, the exchange of a
        backup is undone: the rows are in a shadow again. It is not undone if a step that has not
        ended may write the present shadow, because the next owner of the host page writes it at
        once. All verdicts that have come must be applied before."""
        linked = host_pages[self._device_page[host_pages] >= 0]
        back = linked[self._written[self._device_page[linked]] <= self._ended_step]
        device_pages = self._device_page[back]
        self._host[back], self._shadow[device_pages] = self._shadow[device_pages], self._host[back]
        self._host_page[device_pages] = self._device_page[back] = -1
        self.free(host_pages)
        return ShadowChanges(device_pages, self._shadow[device_pages])

    @property
    def shadows(self) -> Ids:
        return self._shadow.copy()

    def note_allocated(self, slots: Ids) -> None:
        """``slots`` were allocated: their rows are void."""
        self._unlink_device(slots // self.layout.page_size)
        self._refill(slots)
        self._lost[slots] = False

    def note_not_captured(self, slots: Ids) -> None:
        """A forward pass fills ``slots`` and leaves no rows."""
        self.note_allocated(slots)
        self._lost[slots] = True

    @property
    def none_lost(self) -> bool:
        """True if no slot that a forward pass filled is known to lack its rows."""
        return not self._lost.any()

    def begin_step(
        self, slots: Ids, positions: Ids, token_ids: Ids, *, promised: bool = True
    ) -> int:
        """A forward pass that fills ``slots`` was launched. ``promised``: so were the copies that
        capture its rows; otherwise the rows are void. Returns a ticket for :meth:`end_step`."""
        self._unlink_device(slots // self.layout.page_size)
        self._refill(slots, RowState.PROMISED if promised else RowState.VOID)
        self._lost[slots] = not promised
        self._written[slots // self.layout.page_size] = self._clock
        self._positions[slots] = positions
        self._token_ids[slots] = token_ids
        return self._clock

    def end_step(self, slots: Ids, ticket: int, verdicts: npt.NDArray[np.uint8]) -> tuple[int, int]:
        """The step of ``ticket`` is over: ``verdicts`` (of RowState) are the states of its rows.
        Slots that got other rows since are skipped. Returns how many rows are VOID, and UNFIT."""
        due = (self._generation[slots] == ticket) & (self._rows[slots] == RowState.PROMISED)
        slots, verdicts, self._ended_step = slots[due], verdicts[due], ticket
        self._rows[slots] = verdicts
        self._lost[slots] = verdicts != RowState.VALID
        linked = self._host_page[slots // self.layout.page_size]  # -1: none
        waiting = linked[(linked >= 0) & self._awaiting_rows[linked]]
        if len(waiting):
            self._judge(np.unique(waiting))
        missing, unfit = verdicts == RowState.VOID, verdicts == RowState.UNFIT
        return int(np.count_nonzero(missing)), int(np.count_nonzero(unfit))

    def _judge(self, host_pages: Ids) -> None:
        """Decide on pages that wait for rows of their device page. They wait no longer if all are
        valid. They become FREE if a row is void, UNFIT if a row is unfit; otherwise they wait."""
        device_pages = self._device_page[host_pages]
        rows = self._rows.reshape(-1, self.layout.page_size)[device_pages]  # [page, token]
        valid, unfit = (rows == RowState.VALID).all(1), (rows == RowState.UNFIT).any(1)
        self._awaiting_rows[host_pages[valid]] = False
        if not valid.all():
            self.free(host_pages[(rows == RowState.VOID).any(1)])
            self.mark_unfit(host_pages[unfit])

    def problem(self, slots: Ids) -> str | None:
        """The reason why the pages of ``slots``, in order, cannot be backed up, or None."""
        size = self.layout.page_size
        positions = self._positions[slots]
        pages = slots[::size] // size  # of the device's KV pool
        if not np.array_equal(slots, (pages[:, None] * size + np.arange(size)).ravel()):
            return "slots are not whole pages"
        rows = self._rows[slots]
        if (rows == RowState.VOID).any():
            return "rows not valid"
        if (self._host_page[pages] >= 0).any():
            return "rows backed up already"
        first = int(positions[0])
        wanted = np.arange(first, first + len(positions), dtype=np.int32)
        if first % size or not np.array_equal(positions, wanted):
            return "positions not consecutive"
        return NOT_ENCODABLE if (rows == RowState.UNFIT).any() else None

    def swap(self, slots: Ids, host_pages: Ids) -> ShadowChanges:
        """Back up the pages of ``slots``: their shadows, to which rows may still be on their way,
        become ``host_pages``, and the reverse. :meth:`problem` must be None."""
        size = self.layout.page_size
        device_pages = slots[::size] // size
        filled, empty = self._shadow[device_pages], self._host[host_pages]
        self._host[host_pages], self._shadow[device_pages] = filled, empty
        self._link(host_pages, device_pages)
        self._state[host_pages], self._awaiting_rows[host_pages] = _PageState.HERE, True
        self._namespace[host_pages] = np.void(self._present_namespace())
        self._write_tokens(filled, self._positions[slots], self._token_ids[slots])
        self._judge(host_pages)
        return ShadowChanges(device_pages, empty)

    def _write_tokens(self, physical: Ids, positions: _Values, token_ids: _Values) -> None:
        """Write values (``[n * page_size]`` each) to the headers of ``n`` physical pages."""
        layout = self.layout
        self.host_access(physical, write=True, header=True)
        layout.positions(self.memory)[physical] = positions.reshape(-1, layout.page_size)
        layout.token_ids(self.memory)[physical] = token_ids.reshape(-1, layout.page_size)

    def unfit_rows(self, slots: Ids) -> npt.NDArray[np.bool_]:
        """Mask of ``slots`` whose rows are known not to fit the codec."""
        return self._rows[slots] == RowState.UNFIT

    def note_loaded(self, slots: Ids, host_pages: Ids, tickets: Ids) -> None:
        """``slots`` were allocated, and ``host_pages`` are loaded there. The rows of a page are
        void if it is unfit, or if its ticket is not that of ``tickets``: it was freed meanwhile."""
        size = self.layout.page_size
        device_pages = slots[::size] // size
        physical = self._host[host_pages]
        self._unlink_device(device_pages)
        self.host_access(physical, write=False, header=True)
        self._positions[slots] = self.layout.positions(self.memory)[physical].ravel()
        self._token_ids[slots] = self.layout.token_ids(self.memory)[physical].ravel()
        kept = (self._state[host_pages] == _PageState.HERE) & (self._ticket[host_pages] == tickets)
        self._link(host_pages[kept], device_pages[kept])
        self._rows[slots] = np.where(np.repeat(kept, size), RowState.VALID, RowState.VOID)

    def forget(self) -> None:
        """All rows are void, and host pages that wait for rows are FREE; other pages stay."""
        self._refill(slice(None))
        self._lost[:] = False
        self._empty(self._awaiting_rows.copy())
        self._device_page[:] = self._host_page[:] = -1

    def clear(self) -> None:
        """Every host page and every slot was freed."""
        self.forget()
        self._empty(slice(None))

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
        self._empty(host_pages[self._awaiting_rows[host_pages]])

    def _refill(self, slots: Ids | slice, state: int = RowState.VOID) -> None:
        """``slots`` get other rows, in ``state``: verdicts of earlier steps no longer apply."""
        self._clock += 1
        self._generation[slots] = self._clock
        self._rows[slots] = state

    def _unlink_device(self, device_pages: Ids) -> None:
        host_pages = self._host_page[device_pages]
        host_pages = host_pages[host_pages >= 0]
        if len(host_pages):
            self._unlink_host(np.unique(host_pages))
