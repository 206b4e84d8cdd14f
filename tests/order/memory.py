"""Memory that streams use: who touched which bytes last, and whether it lives long enough."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tests.order import rules
from tests.order.clocks import HOST, Clocks, Site, site

Region = slice | npt.NDArray[np.int64]
"""Cells of a storage: a range of them, or their numbers (repetitions allowed)."""

SMALL, LARGE = 1 << 12, 1 << 17
"""Storages up to these sizes are looked at by the byte, and by eight bytes; larger ones by 64, or
by eight where a row is no multiple of 64: neighbours would share a cell."""


class Kind(Enum):
    """Where memory would be on a GPU machine. What is neither is the host's own affair."""

    DEVICE = "device"
    PINNED = "pinned"


@dataclass
class Block:
    """What is known of one storage."""

    kind: Kind
    stream: int  # that it was made on; freed, it is adopted again in that one's order
    size: int
    cell: int  # bytes of a cell
    made: Site
    name: str
    watched: bool
    # For reads and for writes, by actor, the last step that touched each cell.
    last: dict[str, dict[int, npt.NDArray[np.int32]]] = field(
        default_factory=lambda: {"read": {}, "write": {}}
    )
    used: dict[int, int] = field(default_factory=dict)  # by actor, the last step that touched any
    kept: set[int] = field(default_factory=set)  # streams that were said to use it
    alive: weakref.ref[torch.UntypedStorage] | None = None

    def all_cells(self) -> slice:
        return slice(0, -(-self.size // self.cell))


class Finding(NamedTuple):
    """Two accesses that nothing puts in an order, or memory that dies too early."""

    what: str
    missing: str
    memory: str
    first: Site
    then: Site
    made: Site

    def __str__(self) -> str:
        def lines(where: Site) -> str:
            return "\n            < ".join(map(str, where[:6])) or "(before the watch began)"

        return (
            f"{self.what}\n  missing:  {self.missing}\n  memory:   {self.memory}\n"
            f"  first:    {lines(self.first)}\n  then:     {lines(self.then)}\n"
            f"  made:     {lines(self.made)}"
        )


class Memory:
    """All storages that are watched."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.findings: dict[tuple[str, object, object], Finding] = {}
        self.counts: Counter[tuple[str, object, object]] = Counter()
        self.watching = False
        self._blocks: dict[int, Block] = {}

    # ---- storages ----

    def find(self, tensor: torch.Tensor) -> Block | None:
        """The block of a tensor; None: it is the host's."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def kind(self, tensor: torch.Tensor) -> Kind | None:
        block = self.find(tensor)
        return None if block is None else block.kind

    def register(self, tensor: torch.Tensor, kind: Kind, name: str = "") -> Block:
        """From now on the storage of ``tensor`` is watched; nothing changes if it was already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        block = self._blocks.get(key)
        if block is not None:
            block.name = name or block.name
            return block
        row = tensor.shape[-1] * tensor.itemsize if tensor.dim() > 1 else size
        cell = 1 if size <= SMALL else 8 if size <= LARGE or row % 64 else 64
        block = Block(kind, self.clocks.current, size, cell, site(), name, self.watching)
        block.alive = weakref.ref(storage, lambda _: self._dies(key))
        self._blocks[key] = block
        return block

    def keep(self, tensor: torch.Tensor, actor: int) -> None:
        """``actor`` uses ``tensor``: it is not adopted again before that is done."""
        block = self.find(tensor)
        if block is not None:
            block.kept.add(actor)

    def named(self, name: str) -> Iterator[Block]:
        return (block for block in list(self._blocks.values()) if block.name == name)

    # ---- accesses ----

    def access(
        self, block: Block, region: Region, actor: int, step: int, how: str, *, held: bool = False
    ) -> None:
        """``actor`` reads or writes cells in its ``step``; wrong orders become findings. ``held``:
        torch keeps the memory for this access, as in copies to and from pinned memory."""
        clocks = self.clocks
        if rules.is_silent(block.name, how, clocks.site_of(actor, step)):
            return
        if not held:
            block.used[actor] = step
        for before in ("write", "read") if how == "write" else ("write",):
            for other, steps in list(block.last[before].items()):  # threads of the host add to it
                touched = steps[region]
                last = int(touched.max()) if other != actor and touched.size else 0
                if not clocks.behind(actor, other, last):
                    self._report(
                        f"{clocks.names[actor]} {how}s what {clocks.names[other]} {before}s",
                        f"{clocks.names[actor]} does not wait for {clocks.names[other]}",
                        block,
                        clocks.site_of(other, last),
                        clocks.site_of(actor, step),
                    )
        steps = block.last[how].get(actor)
        if steps is None:
            steps = block.last[how][actor] = np.zeros(block.all_cells().stop, np.int32)
        steps[region] = step

    def _dies(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is None or not self.watching or not block.watched or not block.size:
            return
        owner = HOST if block.kind is Kind.PINNED else block.stream
        for actor, step in block.used.items():
            if actor in (HOST, owner) or actor in block.kept:
                continue
            if self.clocks.seen_of(owner, actor) < step:
                name = self.clocks.names[actor]
                self._report(
                    f"{block.kind.value} memory of {self.clocks.names[owner]} dies "
                    f"while {name} may use it",
                    f"nobody keeps it for {name}",
                    block,
                    self.clocks.site_of(actor, step),
                    site(),
                )

    def _report(self, what: str, missing: str, block: Block, first: Site, then: Site) -> None:
        if not self.watching:
            return
        key = (what, first[:1], then[:1] if "dies" not in what else block.made[:1])
        self.counts[key] += 1
        memory = f"{block.name or 'unnamed'}, {block.kind.value}, {block.size} bytes"
        self.findings.setdefault(key, Finding(what, missing, memory, first, then, block.made))
