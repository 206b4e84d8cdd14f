"""K and V in pages of the KV pool <-> their encoded segments in our pages.

The segments of a layer are K, then V; each is one group of heads after the other, and each group
its units, which are runs of tokens (:mod:`hcache_backend.format.units`). One launch takes all pages
of a save or a load. Encoding writes device memory, or pages in pinned memory right over the bus.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ..launch import Launch
from ..layers import LayerTable
from ..pages import check_ids
from .base import UnsupportedRows
from .exp4 import Cut, Exp4Codec, decode_launch, encode_launch
from .exp4_code import REFERENCE_VALUES, decode_units, encode_units


class SegmentCodec(ABC):
    """Encodes K and V of a layer, each unit by itself.

    - All encoded units of K have one length, and all of V.
    - The same values give the same bytes, on every device.
    - A page that a codec cannot hold is said not to fit. Its bytes mean nothing.

    Args:
        cut: The units of a page in K; those in V are alike.
        dim: Values of a head.
        dtype: Type of K and V.

    Raises:
        UnsupportedRows: The codec does not take such units.

    Attributes:
        name: What options and metrics call it.
        code: What pages call its bytes, at most 8 ASCII characters. When the same values get other
            bytes, it gets another one: else stored pages would be decoded to wrong values.
        lossless: Whether what fits comes back to the bit.
        unit_bytes: Bytes of an encoded unit of K, and of one of V; multiples of 8.
        flags: How many flags say whether a page fits: all are to be set.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    lossless: ClassVar[bool]
    unit_bytes: tuple[int, int]
    flags: int

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        self.cut = cut
        self.dim = dim
        self.dtype = dtype

    @property
    def segment_bytes(self) -> int:
        """Bytes of the encoded units of a page in K and V."""
        return self.cut.units * sum(self.unit_bytes)

    @abstractmethod
    def encode_launch(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offset: int,
        fits: torch.Tensor,
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        """:meth:`encode` as one kernel; ``fits`` is bool ``[p, flags]``, contiguous.

        Args:
            layers: Several layers at once: ``planes`` are the first one's, ``offset`` is in the
                table, ``fits`` is ``[layers, p, flags]``.
            slots: Slots of an item in ``items``, int64 ``[p * slots]``: those of its tokens.
        """

    @abstractmethod
    def decode_launch(
        self,
        encoded: torch.Tensor,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        """:meth:`decode` as one kernel; of several layers ``encoded`` is ``[layers, p, ...]``."""

    @abstractmethod
    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode units in plain torch, on the CPU.

        Args:
            units: K and V of pages, ``[p, 2, units, tokens, width]``.

        Returns:
            uint8 ``[p, segment_bytes]``, and whether each page fits, bool ``[p]``.
        """

    @abstractmethod
    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8 ``[p, segment_bytes]`` in plain torch, on the CPU, to units."""

    def encode(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offset: int,
    ) -> torch.Tensor:
        """Encode pages of the pool.

        Args:
            planes: K and V: ``[slots, heads, dim]`` of one shape, contiguous, whose slots are whole
                pages of the pool.
            items: Which pages of the pool, int64 ``[p]``, on their device. Their values are checked
                only on the CPU, as those of ``pages``.
            memory: uint8 ``[all pages, page_bytes]``, contiguous: memory that the device can write.
            pages: The page of each item there, int64 ``[p]``, likewise.
            offset: Where the units of a page begin in it, a multiple of 8; V follows K.

        Returns:
            Which pages fit, bool ``[p]`` on the device of the items.

        Raises:
            ValueError: The arguments do not fit together. Nothing was written.
        """
        self._check(planes, items)
        end = offset + self.segment_bytes
        if memory.dtype != torch.uint8 or memory.dim() != 2 or not memory.is_contiguous():
            raise ValueError(
                f"memory is {list(memory.shape)} of {memory.dtype}: must be contiguous uint8 "
                "[pages, page_bytes]"
            )
        if offset % 8 or memory.shape[1] % 8 or not 0 <= offset <= end <= memory.shape[1]:
            raise ValueError(
                f"bytes {offset} to {end} of pages of {memory.shape[1]} bytes: must be within a "
                "page and begin at a multiple of 8, as each page"
            )
        check_ids("pages", pages, len(items), len(memory), (torch.int64,))
        if planes[0].is_cuda:
            flags = torch.empty((len(items), self.flags), dtype=torch.bool, device=items.device)
            self.encode_launch(planes, items, memory, pages, offset, flags).run()
            return flags.all(1)
        encoded, fits = self.encode_reference(planes, items)
        memory[pages, offset:end] = encoded
        return fits

    def decode(
        self, encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> None:
        """Decode segments into pages of the pool, whatever their bytes are.

        Args:
            encoded: Contiguous uint8 ``[p, segment_bytes]``, on the device of the pool.
            planes: As in :meth:`encode`; so ``items``. An item that is there twice gets the values
                of either.

        Raises:
            ValueError: The arguments do not fit together. Nothing was written.
        """
        self._check(planes, items)
        shape = (len(items), self.segment_bytes)
        if encoded.dtype != torch.uint8 or encoded.shape != shape or not encoded.is_contiguous():
            raise ValueError(
                f"encoded is {list(encoded.shape)} of {encoded.dtype}: must be contiguous uint8 "
                f"{list(shape)}"
            )
        if planes[0].is_cuda:
            self.decode_launch(encoded, planes, items).run()
            return
        self.decode_reference(encoded, planes, items)

    def encode_reference(
        self, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded segments of pages, uint8 ``[p, segment_bytes]``, and which of the pages fit, bool
        ``[p]``; all on the CPU."""
        parts = []
        for some in items.split(self._pages_at_once):
            parts.append(self.encode_units(self.read_units(planes, some)))
        encoded, fits = zip(*parts, strict=True)
        return torch.cat(encoded), torch.cat(fits)

    def decode_reference(
        self, encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> None:
        """What :meth:`decode` does, in plain torch."""
        at_once = self._pages_at_once
        for some, there in zip(encoded.split(at_once), items.split(at_once), strict=True):
            self.write_units(self.decode_units(some), planes, there)

    def read_units(self, planes: Sequence[torch.Tensor], items: torch.Tensor) -> torch.Tensor:
        """K and V of pages of the pool, ``[p, 2, units, tokens, width]``; arguments as in
        :meth:`encode`."""
        parts = [self._by_unit(plane)[items] for plane in planes]
        return torch.stack(parts, dim=1).flatten(2, 3)

    def write_units(
        self, units: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> None:
        """Put back what :meth:`read_units` gives."""
        units = units.unflatten(2, (self.cut.groups, self.cut.pieces))
        for number, plane in enumerate(planes):
            self._by_unit(plane)[items] = units[:, number]

    @property
    def _pages_at_once(self) -> int:
        return max(1, REFERENCE_VALUES // (2 * self.cut.units * self.cut.values))

    def holds(self, encoded: torch.Tensor, plain: torch.Tensor, number: int) -> bool:
        """Whether one unit of K and of V in a page stands for K and V, as the codec promises.

        All is on the CPU, in plain torch.

        Args:
            encoded: Segments of the page, uint8 ``[segment_bytes]``.
            plain: K, then V, as pages that are not encoded have them: uint8.
            number: Which of the :attr:`Cut.units`.
        """
        cut = self.cut
        parts = encoded.split([cut.units * size for size in self.unit_bytes])
        unit = torch.cat([part.view(cut.units, -1)[number] for part in parts])
        values = plain.view(self.dtype).view(2, cut.units, cut.tokens, cut.width)[:, number]
        alone = type(self)(Cut(cut.width, cut.tokens), self.dim, self.dtype)
        units = values[None, :, None].contiguous()
        return alone._stands_for(unit[None], units, alone.decode_units(unit[None]))

    def _stands_for(self, encoded: torch.Tensor, units: torch.Tensor, back: torch.Tensor) -> bool:
        """The same of whole pages, their units, and what comes back of the pages."""
        return torch.equal(back.view(torch.uint8), units.view(torch.uint8))

    def _by_unit(self, plane: torch.Tensor) -> torch.Tensor:
        """View of a plane: ``[pages, groups, pieces, tokens, width]``."""
        cut = self.cut
        rows = plane.view(-1, cut.pieces, cut.tokens, cut.groups, cut.width)
        return rows.permute(0, 3, 1, 2, 4)

    def _check(self, planes: Sequence[torch.Tensor], items: torch.Tensor) -> None:
        """A ValueError for what is no K and V cut like that."""
        if len(planes) != 2:
            raise ValueError(f"planes are {len(planes)}: must be K and V")
        first = planes[0]
        for plane in planes:
            same = plane.dtype == self.dtype and plane.shape == first.shape
            if not same or not plane.is_contiguous():
                raise ValueError(
                    f"planes have one of {list(plane.shape)} of {plane.dtype}: all must be "
                    f"contiguous {self.dtype} {list(first.shape)}"
                )
        row, cut = first[0].numel(), self.cut
        tokens = cut.tokens * cut.pieces
        if row != cut.groups * cut.width or len(first) % tokens:
            raise ValueError(
                f"planes have {len(first)} slots of {row} values: must be whole pages of {tokens} "
                f"slots of {cut.groups * cut.width} values"
            )
        check_ids("items", items, len(items), len(first) // tokens, (torch.int64,))


class Exp4Segments(SegmentCodec):
    """``exp4``: the code of :mod:`.exp4_code`, in which K and V are alike."""

    name, code = "exp4", Exp4Codec.code
    lossless = True

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype) -> None:
        super().__init__(cut, dim, dtype)
        if dtype != torch.bfloat16:
            raise UnsupportedRows(f"codec 'exp4' takes K and V in bfloat16, not {dtype}")
        if cut.width % 2:
            raise UnsupportedRows(
                f"codec 'exp4' takes an even number of values per token and group, not {cut.width}"
            )
        unit_bytes = Exp4Codec(cut.values, dtype).row_bytes
        self.unit_bytes = unit_bytes, unit_bytes
        self.flags = 2 * cut.units

    def encode_launch(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offset: int,
        fits: torch.Tensor,
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        return encode_launch(planes, items, self.cut, memory, pages, offset, fits, layers, slots)

    def decode_launch(
        self,
        encoded: torch.Tensor,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        layers: LayerTable | None = None,
        slots: int = 1,
    ) -> Launch:
        return decode_launch(encoded, planes, items, self.cut, layers, slots)

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = encode_units(units.reshape(-1, self.cut.values))
        return encoded.view(len(units), -1), fits.view(len(units), -1).all(1)

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        shape = (len(encoded), 2, cut.units, cut.tokens, cut.width)
        units = encoded.reshape(-1, self.unit_bytes[0])
        parts = units.split(max(1, REFERENCE_VALUES // cut.values))
        return torch.cat([decode_units(some, cut.values) for some in parts]).view(shape)
