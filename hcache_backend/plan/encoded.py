"""Size of a model's pages after encoding."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from hcache_backend.format.units import units_per_group
from hcache_backend.plan.model_shape import ModelShape

PAGE_TOKENS = 64  # of a page, by default

PlannedCodec = Literal["auto", "none", "exp3", "exp4", "int8", "fp8"]  # krul is not planned


def encoded(
    shape: ModelShape, codec: PlannedCodec, dtype: str, *, tp: int = 1, page_size: int = PAGE_TOKENS
) -> ModelShape:
    """``shape`` with the bytes that a server stores. Kinds that the codec does not take stay plain.

    ``dtype`` is the type that the model is served in; each of ``tp`` ranks encodes its own heads.
    """
    automatic = codec == "auto" and dtype == "bfloat16"
    if codec == "none" or (codec == "auto" and not automatic) or shape.latent:  # plain pages of MLA
        return shape
    # Not above: most plans need no torch, which takes seconds to import.
    import torch

    from hcache_kernels.codecs import (
        AUTOMATIC,
        Cut,
        UnsupportedRows,
        make_codec,
        make_segment_codec,
    )

    values = getattr(torch, dtype)
    names, found = AUTOMATIC if automatic else (codec,), dict[str, int]()
    with suppress(UnsupportedRows):
        found["hidden_row_bytes"] = make_codec(names[-1], shape.hidden, values).row_bytes
    width = max(1, shape.kv_heads // tp) * shape.head_dim
    pieces = units_per_group(page_size, width)
    cut = Cut(width, page_size // pieces, 1, pieces)
    for name in reversed(names) if shape.head_dim == shape.value_dim else ():
        with suppress(UnsupportedRows):
            segments = make_segment_codec(name, cut, shape.head_dim, values)
            plain = 2 * width * page_size * values.itemsize
            found["kv_row_bytes"] = round(segments.segment_bytes / plain * shape.kv_bytes)
    return shape.model_copy(update=found)
