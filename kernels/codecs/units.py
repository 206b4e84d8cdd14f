"""Units of values: how items of planes divide into them, and where a kernel finds them.

A *plane* is contiguous, ``[items, values]``: rows of hidden states, or K or V of a layer in pages
of the KV pool.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..pages.kernel import plane_of, segment_of

WORK = ("of_layer", "parts")
"""Arguments of encoders that Triton must not compile them again for (see pages/kernel.py)."""
ADDRESSES = ("items", "pages", "fits", "table", "offsets")
"""Those of encoders and decoders whose alignment differs from launch to launch."""


class Cut(NamedTuple):
    """How the values of an item divide into units: groups of channels, each into runs of tokens."""

    width: int  # values of a token in a unit
    tokens: int = 1  # of a unit
    groups: int = 1  # of a token's values
    pieces: int = 1  # units of a group

    @property
    def values(self) -> int:
        """Values of a unit."""
        return self.width * self.tokens

    @property
    def units(self) -> int:
        """Units of an item in one plane, group after group."""
        return self.groups * self.pieces


class Places(NamedTuple):
    """What a kernel knows of its planes when it is compiled."""

    width: int  # as the next three of the cut, here in words that move together
    tokens: int
    groups: int
    pieces: int
    planes: int  # one or two
    slots: int  # of an item: there are this many ``items`` for each
    aligned: int  # see LayerTable; 1 without a table


@triton.jit
def unit_values(first, second, table, layer, items, item, unit, AT: tl.constexpr):
    """Where the values of a unit begin in its plane; ``unit`` counts through all planes of the
    item. ``items``: first slots of the items' tokens, or pages; None: item ``item`` itself."""
    plane = plane_of(first, table, layer, 0, AT.aligned)
    if AT.planes == 2:
        other = plane_of(second, table, layer, 1, AT.aligned)
        plane = tl.where(unit < AT.groups * AT.pieces, plane, other)
        unit = unit % (AT.groups * AT.pieces)
    place = item
    if items is not None:
        place = tl.load(items + item * AT.slots).to(tl.int64) // AT.slots
    token = (place * AT.pieces + unit % AT.pieces) * AT.tokens
    return plane + (token * AT.groups + unit // AT.pieces) * AT.width


@triton.jit
def in_plane(at, AT: tl.constexpr):
    """Places of words of a unit, behind its first one, in the plane."""
    return at if AT.groups == 1 else at // AT.width * (AT.groups * AT.width) + at % AT.width


@triton.jit
def unit_bytes_at(memory, pages, item, count, page_bytes, offsets, layer, offset):
    """Where the units of an item begin in ``memory``: in its page, at the layer's offset. Without
    ``pages`` all ``count`` items of a layer follow each other, layer by layer."""
    if pages is None:
        at = segment_of(memory, layer * count + item, page_bytes, offset, None, layer)
    else:
        page = tl.load(pages + item).to(tl.int64)
        at = segment_of(memory, page, page_bytes, offset, offsets, layer)
    return at
