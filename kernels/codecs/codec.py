"""The interface of codecs: values in planes <-> encoded units in pages.

An item is a row of hidden states (one plane), or a page of the KV pool (K and V). Its encoded units
follow each other: plane by plane, there group by group, and in a group run of tokens by run
(:mod:`hcache_backend.format.units`). One launch takes all items of a save or a load, of all layers.
A backup encodes to device memory by few programs, and then copies as pages without a codec do:
encoders write a byte or two a thread, which a bus carries slowly.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch

from ..checks import BYTES, check_tensor
from ..launch import Launch, copy_programs
from ..pages.kernel import ONE_LAYER, LayerTable
from .units import Cut, Places

ROWS, KV, LATENT = "h", "kv", "l"
"""Planes of a row of hidden states, and of a page of the KV pool: K and V, or latents of MLA. One
letter for each."""
REFERENCE_VALUES = 1 << 20  # encoded or decoded at once on a CPU: a core's cache holds them


class UnsupportedRows(ValueError):
    """A codec does not take such units or values; the message says which ones it takes."""


class Program(NamedTuple):
    kernel: Any
    per_item: int  # programs of an item
    warps: int  # of a program
    code: Mapping[str, "NamedTuple | int | None"]  # constants of the code for the compiler


class Codec(ABC):
    """Encodes values unit by unit. Each encoded unit decodes without any other.

    The same values give the same bytes, on every device. A codec says which items it cannot hold:
    these do not fit. Their bytes mean nothing: whoever stores them stores wrong KV. A constructor
    raises UnsupportedRows if the codec does not take such units.

    Args:
        cut: The units of an item in each plane.
        dim: Values of a head; of rows their width.
        dtype: Type of the values.
        planes: :data:`ROWS`, :data:`KV`, :data:`LATENT`, or ``k`` and ``v`` of several layers.
            Kernels take one or two planes.

    Attributes:
        name: What options and metrics call it.
        code: What pages call its bytes, at most 8 ASCII characters. When the same values get other
            bytes, it gets another one: otherwise stored pages would be decoded to wrong values.
        lossless: Whether all that fits comes back to the bit.
        is_view: Whether encoded rows are the rows themselves, seen as bytes.
        word: The type by which kernels see planes: one value, or several that move together.
        unit_bytes: Bytes of an encoded unit, by plane; multiples of 8, unless it is a view.
        encoder: The kernel that encodes. Each of its programs sets a flag if its part fits.
        decoder: The kernel that decodes.
    """

    name: ClassVar[str]
    code: str
    lossless: ClassVar[bool]
    is_view: ClassVar[bool] = False
    word: torch.dtype
    unit_bytes: tuple[int, ...]
    encoder: Program
    decoder: Program

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        self.cut, self.dim, self.dtype, self.planes = cut, dim, dtype, planes

    @classmethod
    def of_rows(cls, width: int, dtype: torch.dtype) -> Self:
        return cls(Cut(width), width, dtype, ROWS)

    @property
    def hidden_size(self) -> int:
        return self.cut.width

    @property
    def segment_bytes(self) -> int:
        """Bytes of the encoded units of an item."""
        return self.cut.units * sum(self.unit_bytes)

    row_bytes = segment_bytes

    @property
    def flags(self) -> int:
        """Flags of an item, which fits if all of them are set."""
        return self.encoder.per_item

    @abstractmethod
    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode units of items, ``[p, planes, units, tokens, width]``, in plain torch on the CPU.
        Returns uint8 ``[p, segment_bytes]``, and whether each item fits, bool ``[p]``."""

    @abstractmethod
    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        """Decode uint8 ``[p, segment_bytes]``, whatever the bytes are, in plain torch on the CPU,
        to units of items."""

    def encode(
        self, rows: torch.Tensor, to: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode ``rows`` (``[n, hidden_size]``), on their device; a ValueError for other rows.
        ``to``: memory that a kernel may encode to, at least ``[n, row_bytes]``; None: new memory.
        Returns encoded rows, uint8 ``[n, row_bytes]``, and which of them fit, bool ``[n]``."""
        rows = rows.contiguous()
        check_tensor("rows", rows, (self.dtype,), ("n", self.hidden_size))
        if self.is_view or not rows.is_cuda:
            units = rows.view(-1, 1, 1, 1, self.hidden_size)
            return self._encode_all(units.split(self.at_once))
        if to is None:
            to = rows.new_empty((len(rows), self.row_bytes), dtype=torch.uint8)
        encoded = to[: len(rows)]
        flags = rows.new_empty((len(rows), self.flags), dtype=torch.bool)
        self.encode_launch((rows,), None, encoded, None, 0, flags).run()
        return encoded, flags.all(1) if self.flags > 1 else flags[:, 0]

    def decode(self, encoded: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        """Decode uint8 ``[n, row_bytes]`` to rows; a ValueError for another form. ``to``: memory
        that a kernel may decode to, at least ``[n, hidden_size]``; None: new memory."""
        encoded = encoded.contiguous()
        check_tensor("encoded", encoded, BYTES, ("n", self.row_bytes))
        if self.is_view or not encoded.is_cuda:
            units = [self.decode_units(some) for some in encoded.split(self.at_once)]
            return _joined(units).view(-1, self.hidden_size)
        if to is None:
            to = encoded.new_empty((len(encoded), self.hidden_size), dtype=self.dtype)
        rows = to[: len(encoded)]
        self.decode_launch(encoded, (rows,), None).run()
        return rows

    def encode_pages(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor,
        memory: torch.Tensor,
        pages: torch.Tensor,
        offset: int,
    ) -> torch.Tensor:
        """Encode pages of the KV pool; arguments are not checked. Returns which pages fit, bool
        ``[p]`` on the device of ``items``.

        Args:
            planes: K and V, or latents: ``[slots, heads, dim]`` of one shape, contiguous, whose
                slots are whole pages of the pool.
            items: Which pages of the pool, int64 ``[p]``, on the device of the planes.
            memory: uint8 ``[all pages, page_bytes]``, contiguous: memory that the device can write.
            pages: The page of each item in ``memory``, int64 ``[p]``, on the same device.
            offset: Where the units begin in a page of ``memory``, a multiple of 8; V follows K.
        """
        if planes[0].is_cuda:
            flags = torch.empty((len(items), self.flags), dtype=torch.bool, device=items.device)
            self.encode_launch(planes, items, memory, pages, offset, flags).run()
            return flags.all(1)
        encoded, fits = self.encode_reference(planes, items)
        memory[pages, offset : offset + self.segment_bytes] = encoded
        return fits

    def decode_pages(
        self, encoded: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> None:
        """Decode contiguous uint8 ``[p, segment_bytes]``, whatever the bytes are, into pages of the
        KV pool; the others are as in :meth:`encode_pages`. An item that is there twice gets the
        values of either."""
        self.decode_layers(encoded[None], [planes], items)

    def encode_reference(
        self, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encoded pages of the pool, uint8 ``[p, segment_bytes]``, and which of them fit, bool
        ``[p]``; all on the CPU."""
        return self._encode_all(self.read_units(planes, s) for s in items.split(self.at_once))

    def decode_layers(
        self,
        encoded: torch.Tensor,
        layers: Sequence[Sequence[torch.Tensor]],
        items: torch.Tensor,
    ) -> None:
        """Decode uint8 ``[layers, p, segment_bytes]`` into pages ``items`` of the planes of each
        layer. On the CPU by one call: it takes a quarter of a millisecond, and 2 ns a value."""
        if items.is_cuda:
            for rows, planes in zip(encoded, layers, strict=True):
                self.decode_launch(rows, planes, items).run()
            return
        parts = encoded.split(self.at_once, dim=1), items.split(self.at_once)
        for part, some in zip(*parts, strict=True):
            units = self.decode_units(part.flatten(0, 1)).split(len(some))
            for planes, of_layer in zip(layers, units, strict=True):
                self.write_units(of_layer, planes, some)

    def encode_launch(
        self,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor | None,
        memory: torch.Tensor,
        pages: torch.Tensor | None,
        offset: int,
        fits: torch.Tensor,
        layers: LayerTable | None = None,
    ) -> Launch:
        """Encode items by one kernel, into buffers of the caller; all tensors are contiguous.
        Args: as in :meth:`encode_pages`, but
            items, pages: None: all in their order; of layers ``memory`` is then ``[layers, p,
                segment_bytes]``.
            fits: Flags, bool ``[p, flags]``; of several layers ``[layers, p, flags]``.
            layers: Several layers at once: ``planes`` are the first one's, offsets in the table,
                and ``items`` the slots of all tokens of the items.
        """
        parts, together = fits.numel(), 1 if layers is None else len(layers)
        arguments = {"memory": memory, "pages": pages, "page_bytes": memory.shape[-1]}
        arguments |= {"offset": offset, "fits": fits.view(torch.uint8)}
        arguments |= {"of_layer": parts // together, "parts": parts}
        grid = (parts,)
        if self.planes != ROWS:  # few programs take all parts: backups run beside forward passes
            grid = (min(parts, 2 * copy_programs(fits.device)),)
        return self._launch(self.encoder, grid, planes, items, layers, arguments)

    def decode_launch(
        self,
        encoded: torch.Tensor,
        planes: Sequence[torch.Tensor],
        items: torch.Tensor | None,
        layers: LayerTable | None = None,
    ) -> Launch:
        """Decode items by one kernel; ``encoded`` is contiguous uint8 ``[p, segment_bytes]``, of
        several layers ``[layers, p, ...]``, and the others are as in :meth:`encode_launch`."""
        count = encoded.shape[-2] * self.decoder.per_item
        grid, arguments = (count, 1 if layers is None else len(layers)), {"encoded": encoded}
        return self._launch(self.decoder, grid, planes, items, layers, arguments)

    def _launch(
        self,
        program: Program,
        grid: tuple[int, ...],
        planes: Sequence[torch.Tensor],
        items: torch.Tensor | None,
        layers: LayerTable | None,
        arguments: dict[str, Any],
    ) -> Launch:
        """The launch of ``program``: ``arguments``, and those that encoders and decoders share. Of
        several ``layers``, ``items`` has one slot for each token of an item."""
        width = self.cut.width * self.dtype.itemsize // self.word.itemsize
        slots, aligned = 1, 1
        if layers is not None:
            slots, aligned = self.cut.tokens * self.cut.pieces, layers.aligned
        arguments |= {
            "first": planes[0].view(self.word),
            "second": planes[-1].view(self.word),
            "items": items,
            **(ONE_LAYER if layers is None else layers.arguments()),
            "AT": Places(width, *self.cut[1:], len(planes), slots, aligned),
            **program.code,
        }
        return Launch(program.kernel, grid, arguments, program.warps, stages=1)

    def read_units(self, planes: Sequence[torch.Tensor], items: torch.Tensor) -> torch.Tensor:
        """Units of pages of the pool, ``[p, planes, units, tokens, width]``; arguments as in
        :meth:`encode_pages`."""
        pages = (plane.view(-1, self.cut.units * self.cut.values) for plane in planes)
        parts = [self._by_unit(page.index_select(0, items)) for page in pages]
        return torch.stack(parts, dim=1).flatten(2, 3)

    def write_units(
        self, units: torch.Tensor, planes: Sequence[torch.Tensor], items: torch.Tensor
    ) -> None:
        """Write units, as :meth:`read_units` returns them, to pages ``items`` of the planes."""
        units = units.unflatten(2, (self.cut.groups, self.cut.pieces))
        wide = self.cut.width * self.dtype.itemsize % 8 == 0
        word = torch.int64 if wide else self.dtype  # torch moves word by word
        for number, plane in enumerate(planes):
            self._by_unit(plane).view(word)[items] = units[:, number].view(word)

    def holds(self, encoded: torch.Tensor, plain: torch.Tensor, number: int) -> bool:
        """Whether unit ``number`` of each plane of a page stands for its values, as
        :meth:`stands_for` says. ``encoded`` is the page, uint8 ``[segment_bytes]``; ``plain`` are
        its values as codec ``none`` stores them."""
        cut = self.cut
        parts = encoded.split([cut.units * size for size in self.unit_bytes])
        unit = torch.cat([part.view(cut.units, -1)[number] for part in parts])
        shape = (len(self.planes), cut.units, cut.tokens, cut.width)
        values = plain.view(self.dtype).view(shape)[:, number]
        alone = type(self)(Cut(cut.width, cut.tokens), self.dim, self.dtype, self.planes)
        return alone.stands_for(unit[None], values[None, :, None].contiguous())

    def stands_for(self, encoded: torch.Tensor, units: torch.Tensor) -> bool:
        """Whether encoded items stand for their ``units``, by the reference: these come back, or a
        lossy codec encodes them so and what comes back is as near as the codec promises."""
        back = self.decode_units(encoded)
        if torch.equal(back.view(torch.uint8), units.view(torch.uint8)):
            return True
        if self.lossless:
            return False
        again, fits = self.encode_units(units)
        return bool(fits.all()) and torch.equal(again, encoded) and self._near(back, units)

    def _near(self, back: torch.Tensor, units: torch.Tensor) -> bool:
        return True

    def _encode_all(self, units: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        encoded, fits = zip(*map(self.encode_units, units), strict=True)
        return _joined(encoded), _joined(fits)

    @property
    def at_once(self) -> int:
        """Items that are encoded or decoded together on a CPU."""
        if self.is_view:
            return 1 << 40  # parts would be copied together
        return max(1, REFERENCE_VALUES // (len(self.planes) * self.cut.units * self.cut.values))

    def _by_unit(self, plane: torch.Tensor) -> torch.Tensor:
        """View of a plane: ``[items, groups, pieces, tokens, width]``."""
        cut = self.cut
        rows = plane.view(-1, cut.pieces, cut.tokens, cut.groups, cut.width)
        return rows.permute(0, 3, 1, 2, 4)


class ExactCodec(Codec):
    """``none``: values of any type, as they are."""

    name = code = "none"
    lossless = True
    is_view = True

    def __init__(self, cut: Cut, dim: int, dtype: torch.dtype, planes: str = KV) -> None:
        super().__init__(cut, dim, dtype, planes)
        self.unit_bytes = (cut.values * dtype.itemsize,) * len(planes)

    def encode_units(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fits = torch.ones(len(units), dtype=torch.bool, device=units.device)
        return units.view(torch.uint8).view(len(units), self.segment_bytes), fits

    def decode_units(self, encoded: torch.Tensor) -> torch.Tensor:
        cut = self.cut
        shape = (len(encoded), len(self.planes), cut.units, cut.tokens, cut.width)
        return encoded.view(self.dtype).view(shape)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Parts one after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
