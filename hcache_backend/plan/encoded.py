"""Size of a model's pages after encoding."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from hcache_backend.format.page import latent_layer
from hcache_backend.format.units import units_per_group
from hcache_backend.plan.model_shape import ModelShape

PAGE_TOKENS = 64  # of a page, by default

PlannedCodec = Literal["auto", "none", "exp4", "int8", "fp8"]  # krul is not planned


def encoded(
    shape: ModelShape, codec: PlannedCodec, dtype: str, *, tp: int = 1, page_size: int = PAGE_TOKENS
) -> ModelShape:
    """``shape`` with the bytes that a server stores. Kinds that the codec does not take stay plain.

    ``dtype`` is the type that the model is served in; each of ``tp`` ranks encodes its own heads.
    """
    if codec == "auto":
        codec = "exp4" if dtype == "bfloat16" else "none"
    if codec == "none":
        return shape
    # Not above: most plans need no torch, which takes seconds to import.
    import torch

    from hcache_kernels.codecs import LATENT, Cut, UnsupportedRows, make_codec, make_segment_codec

    values = getattr(torch, dtype)
    found: dict[str, int] = {}
    if shape.latent:  # there are no hidden states
        [whole] = latent_layer(page_size, shape.kv_width, values.itemsize).segments
        pieces = whole.groups * whole.pieces
        cut = Cut(shape.kv_width, page_size // pieces, 1, pieces)
        with suppress(UnsupportedRows):
            latents = make_segment_codec(codec, cut, shape.kv_width, values, LATENT)
            found["kv_row_bytes"] = round(latents.segment_bytes / page_size)
        return shape.model_copy(update=found)
    with suppress(UnsupportedRows):
        found["hidden_row_bytes"] = make_codec(codec, shape.hidden, values).row_bytes
    width = max(1, shape.kv_heads // tp) * shape.head_dim
    pieces = units_per_group(page_size, width)
    cut = Cut(width, page_size // pieces, 1, pieces)
    with suppress(UnsupportedRows):
        if shape.head_dim == shape.value_dim:
            segments = make_segment_codec(codec, cut, shape.head_dim, values)
            plain = 2 * width * page_size * values.itemsize
            found["kv_row_bytes"] = round(segments.segment_bytes / plain * shape.kv_bytes)
    return shape.model_copy(update=found)
