"""The shape of a model for the cost model. Bytes and FLOPs are per token and layer (a multiply-add
is 2 FLOPs, paper section 3.2). Layers that differ (dense and expert layers) are averaged."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hcache_backend.format.page import latent_layer
from hcache_backend.format.units import units_per_group

PAGE_TOKENS = 64  # of a page, by default
CLEARLY_LESS = 0.99  # codecs round units to whole words: smaller differences are noise
PlannedCodec = Literal["auto", "none", "exp3", "exp4", "int8"]  # krul is not planned
DSAType = Literal["auto", "bfloat16", "fp8_e4m3"]  # option --kv-cache-dtype of DSA models
INDEX_KEY_BYTES = 132  # of a token in a layer with an indexer: 128 values in FP8 and a scale


class Latent(BaseModel):
    """Multi-head latent attention (MLA): one cached latent for all heads. Widths: of the latent for
    K and V, of K's part with the position, of the queries' latent, if any."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rank: int = Field(gt=0)
    rope_dim: int = Field(gt=0)
    query_rank: int | None = Field(default=None, gt=0)


class Sides(NamedTuple):
    """Layers that keep a window or a state, instead of K and V of all tokens."""

    kind: Literal["window", "state"]
    layers: int
    size: int  # bytes of one sequence's, in all these layers and on all ranks


class ModelShape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    family: str  # model_type of its config.json
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)  # width of a hidden state
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)  # of Q and K
    value_dim: int = Field(gt=0)  # of V
    mlp_width: int = Field(gt=0)  # inside the MLP, or all active experts together
    gated: bool = True  # the MLP has a gate, so three matrices instead of two
    element_bytes: int = Field(default=2, gt=0)  # of a value of hidden states, and of K and V
    hidden_row_bytes: int | None = Field(default=None, gt=0)  # stored, if a codec changes them
    kv_element_bytes: int | None = Field(default=None, gt=0)  # of K and V, if it differs
    kv_row_bytes: int | None = Field(default=None, gt=0)  # as hidden_row_bytes; of DSA as in a pool
    index_bytes: int = Field(default=0, ge=0)  # of DSA's index keys of a token, in all layers
    latent: Latent | None = None
    windowed: bool = False  # some layers attend to a window; they are planned as if they did not

    @property
    def attention(self) -> str:
        if self.latent:
            return "DSA" if self.index_bytes else "MLA"
        if self.kv_heads == self.heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"

    @property
    def cached(self) -> str:
        return "latents" if self.latent else "K and V"

    @property
    def kv_width(self) -> int:
        """Cached elements of K and V."""
        if self.latent:
            return self.latent.rank + self.latent.rope_dim
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def hidden_bytes(self) -> int:
        return self.hidden_row_bytes or self.hidden * self.element_bytes

    @property
    def kv_bytes(self) -> int:
        size = self.kv_element_bytes or self.element_bytes
        return self.kv_row_bytes or self.kv_width * size

    @property
    def as_it_is(self) -> ModelShape:
        """The shape without a codec."""
        plain = {"hidden_row_bytes": None, "kv_row_bytes": None}
        return self if self.packed else self.model_copy(update=plain)

    @property
    def packed(self) -> bool:
        """True for DSA in FP8: no codec takes its rows."""
        return bool(self.index_bytes) and self.kv_element_bytes == 1

    @property
    def hidden_is_smaller(self) -> bool:
        return self.hidden_bytes < CLEARLY_LESS * self.kv_bytes

    @property
    def projection_flops(self) -> int:
        """From hidden state to cached elements: the paper's C_hidden, ``4 D^2`` for MHA."""
        return 2 * self.hidden * self.kv_width

    @property
    def query_products(self) -> list[tuple[int, int]]:
        """(before, after) widths of the products from hidden state to queries."""
        queries = self.heads * self.head_dim
        if self.latent and self.latent.query_rank:
            return [(self.hidden, self.latent.query_rank), (self.latent.query_rank, queries)]
        return [(self.hidden, queries)]

    @property
    def dense_products(self) -> list[tuple[int, int]]:
        """(before, after) widths of every product of a forward pass but attention."""
        products = [*self.query_products, (self.hidden, self.kv_width)]
        if self.latent:
            key_dim = self.head_dim - self.latent.rope_dim
            products.append((self.latent.rank, self.heads * (key_dim + self.value_dim)))
        products.append((self.heads * self.value_dim, self.hidden))
        products += [(self.hidden, self.mlp_width)] * (2 if self.gated else 1)
        return [*products, (self.mlp_width, self.hidden)]

    @property
    def query_flops(self) -> int:
        return sum(2 * before * after for before, after in self.query_products)

    @property
    def dense_flops(self) -> int:
        """A forward pass without attention: the paper's ``24 D^2`` for MHA and an MLP of 4 D."""
        return sum(2 * before * after for before, after in self.dense_products)

    @property
    def attention_flops(self) -> int:
        """Scores and weighted values, per pair of query and key."""
        return 2 * self.heads * (self.head_dim + self.value_dim)


def encoded(
    shape: ModelShape, codec: PlannedCodec, dtype: str, *, tp: int = 1, page_size: int = PAGE_TOKENS
) -> ModelShape:
    """``shape`` with stored bytes per token and layer, in pages of ``page_size`` tokens. Hidden
    states, K and V, or latents that ``codec`` does not take keep their bytes. The model is served
    in ``dtype``; each of ``tp`` ranks encodes its own heads."""
    if codec == "auto":
        codec = "exp3" if dtype == "bfloat16" else "none"
    if codec == "none" or shape.packed:
        return shape
    # Not above: most plans need no torch, which takes seconds to import.
    import torch

    from hcache_kernels.codecs import LATENT, Cut, UnsupportedRows, make_codec, make_segment_codec

    values = getattr(torch, dtype)
    stored: dict[str, int] = {}
    if shape.latent:  # there are no hidden states
        [whole] = latent_layer(page_size, shape.kv_width, values.itemsize).segments
        pieces = whole.groups * whole.pieces  # units of a page, of its tokens
        cut = Cut(shape.kv_width, page_size // pieces, 1, pieces)
        with suppress(UnsupportedRows):
            latents = make_segment_codec(codec, cut, shape.kv_width, values, LATENT)
            stored["kv_row_bytes"] = round(latents.segment_bytes / page_size)
        return shape.model_copy(update=stored)
    with suppress(UnsupportedRows):
        stored["hidden_row_bytes"] = make_codec(codec, shape.hidden, values).row_bytes
    width = max(1, shape.kv_heads // tp) * shape.head_dim
    pieces = units_per_group(page_size, width)
    cut = Cut(width, page_size // pieces, 1, pieces)
    with suppress(UnsupportedRows):
        if shape.head_dim == shape.value_dim:
            segments = make_segment_codec(codec, cut, shape.head_dim, values)
            plain = 2 * width * page_size * values.itemsize
            stored["kv_row_bytes"] = round(segments.segment_bytes / plain * shape.kv_bytes)
    return shape.model_copy(update=stored)


def dsa_rows(shape: ModelShape, kv_cache_dtype: DSAType, device: str = "") -> ModelShape:
    """``shape``, for DSA with the bytes of a latent in SGLang's pool on ``device`` (a GPU's name).
    ``auto``: FP8 on Blackwell, otherwise bfloat16. FP8 has a float32 scale for each 128 values, and
    RoPE in bfloat16. On AMD and Blackwell all is FP8 without scales, but for GLM on RTX cards."""
    if not shape.latent or not shape.index_bytes:
        return shape
    rank, rope = shape.latent.rank, shape.latent.rope_dim
    blackwell = any(name in device for name in ("B200", "B300", "Blackwell", "RTX 50"))
    raw = (blackwell or "MI3" in device) and not (shape.family == "glm_moe_dsa" and "RTX" in device)
    fp8 = rank + rope if raw else rank + rank // 128 * 4 + 2 * rope
    plain = kv_cache_dtype == "bfloat16" or (kv_cache_dtype == "auto" and not blackwell)
    rows = {} if plain else {"kv_row_bytes": fp8, "kv_element_bytes": 1}
    return shape.model_copy(update=rows)
