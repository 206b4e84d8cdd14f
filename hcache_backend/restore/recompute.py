"""Recomputation of the first layers of a restore (paper section 4.1), for any model.

The model's own forward pass runs over the restored tokens. Where it calls attention, K and V are
written to the pool, and the queries attend to what the pool holds of the tokens before them: the
prefix that is on the device already, and the restored span itself. It is stopped at the last wanted
layer, once K and V of that one are written.

Several spans (of several requests) go through one forward pass. Within a layer all their K and V
are written before anybody attends, so a span may have another one in its prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from hcache_backend.krul.statistics import KV, ProbedLayer
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.streams import Stream, to_device

_QUERY_ROWS = 1024
"""Queries that attend at once: bounds the mask where no flash kernel can be used."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence that are restored together.

    Attributes:
        token_ids: int64 ``[n]``.
        prefix: Slots of all tokens before them, in order, int64 ``[m]``, on the device.
    """

    token_ids: np.ndarray
    prefix: torch.Tensor


class RecomputeRefused(RuntimeError):
    """The model's attention is not plain causal attention over K and V of its own."""


class _LayersDone(Exception):
    """K and V of the last wanted layer are written."""


class _Piece(NamedTuple):
    """Rows of a forward pass that belong to one span, and the slots that the last of them sees:
    the prefix and the span up to there, int64 ``[m]``."""

    rows: slice
    keys: torch.Tensor


class RecomputeAttention:
    """The attention of one forward pass, called in the place of the engine's.

    Layers are numbered as by the engine's attention objects; ``slots`` are those of the tokens,
    int64 ``[n]``, and ``pieces`` what these belong to.
    """

    def __init__(
        self, pool: PagedPool, last_layer: int, slots: torch.Tensor, pieces: Sequence[_Piece]
    ) -> None:
        self._pool = pool
        self._last_layer = last_layer
        self._slots = slots
        self._pieces = pieces

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """How many tokens are before each sequence of the pass, and how many are in it."""
        counts = ((rows.stop - rows.start, len(keys)) for rows, keys in self._pieces)
        return [(seen - tokens, tokens) for tokens, seen in counts]

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, *, stored: bool, extra: bool
    ) -> torch.Tensor:
        """Write K and V, and attend.

        Args:
            kernel: The engine's attention object of the layer.
            q: ``[n, heads * head_dim]``; what is returned is ``[n, heads * value_dim]``.
            k: ``[n, kv_heads * head_dim]``; None where a layer uses those of another one.
            v: ``[n, kv_heads * value_dim]`` or None, likewise.
            stored: Whether the model has stored K and V itself.
            extra: Whether the model gave arguments that plain attention does not know.

        Raises:
            RecomputeRefused: This is no plain causal attention.
            _LayersDone: It was the last wanted layer.
        """
        if extra or k is None or v is None or not _plain(kernel):
            raise RecomputeRefused(f"layer {kernel.layer_id} has an attention of its own kind")
        if not stored:
            k = k.reshape(-1, kernel.tp_k_head_num, kernel.qk_head_dim)
            v = v.reshape(-1, kernel.tp_v_head_num, kernel.v_head_dim)
            self._pool.store(kernel, self._slots, k, v)
        if kernel.layer_id >= self._last_layer:
            raise _LayersDone
        return self._output(kernel, q.reshape(-1, kernel.tp_q_head_num, kernel.qk_head_dim))

    def _output(self, kernel: Any, q: torch.Tensor) -> torch.Tensor:
        """Attention to what the pool holds: ``[n, heads, head_dim]`` gives ``[n, heads *
        value_dim]``."""
        output = q.new_empty((*q.shape[:2], kernel.v_head_dim))
        for rows, keys in self._pieces:
            held = self._pool.fetch(kernel, keys, q.dtype)
            output[rows] = _attention(q[rows], *held, kernel.scaling)
        return output.flatten(1)


@dataclass(frozen=True)
class _Asked:
    """A :class:`ProbedLayer` whose K and V are in the pool, in ``slots``."""

    q: torch.Tensor
    pool: PagedPool
    kernel: Any
    slots: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.kernel.scaling)

    @property
    def length(self) -> int:
        return len(self.slots)

    @property
    def kv_heads(self) -> int:
        return int(self.kernel.tp_k_head_num)

    def keys(self, heads: slice) -> torch.Tensor:
        return self.pool.fetch_keys(self.kernel, self.slots, self.q.dtype, heads)

    def kv_of(self, tokens: torch.Tensor | None) -> KV:
        slots = self.slots if tokens is None else self.slots[tokens]
        return self.pool.fetch(self.kernel, slots, self.q.dtype)


class _ProbeAttention(RecomputeAttention):
    """The attention of tokens whose K and V are in the pool already; nothing is written there.

    ``keys`` are the slots of all tokens of their sequence, int64 ``[m]``, and ``slots`` where the
    model may write itself.

    Attributes:
        layers: What attention received, by layer.
    """

    def __init__(
        self, pool: PagedPool, last_layer: int, slots: torch.Tensor, keys: torch.Tensor
    ) -> None:
        super().__init__(pool, last_layer, slots, [_Piece(slice(0, len(slots)), keys)])
        self.layers: list[_Asked] = []
        self._keys = keys

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, *, stored: bool, extra: bool
    ) -> torch.Tensor:
        if extra or k is None or v is None or not _plain(kernel):
            raise RecomputeRefused(f"layer {kernel.layer_id} has an attention of its own kind")
        q = q.reshape(-1, kernel.tp_q_head_num, kernel.qk_head_dim)
        self.layers.append(_Asked(q, self._pool, kernel, self._keys))
        if kernel.layer_id >= self._last_layer:
            raise _LayersDone
        return self._output(kernel, q)


def _plain(kernel: Any) -> bool:
    return (
        not kernel.logit_cap
        and kernel.sliding_window_size <= 0
        and not kernel.is_cross_attention
        and getattr(kernel.attn_type, "value", "decoder") == "decoder"
        and getattr(kernel, "xai_temperature_len", -1) <= 0
    )


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last ``n`` of ``m`` tokens.

    ``[n, heads, head_dim]``, ``[m, kv_heads, head_dim]`` and ``[m, kv_heads, value_dim]`` give
    ``[n, heads, value_dim]``.
    """
    before, parts = len(k) - len(q), []
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    for start in range(0, q.shape[2], _QUERY_ROWS):
        rows = q[:, :, start : start + _QUERY_ROWS]
        end = before + start + rows.shape[2]
        parts.append(
            functional.scaled_dot_product_attention(
                rows,
                k[:, :, :end],
                v[:, :, :end],
                attn_mask=causal_lower_right(rows.shape[2], end),
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1)


Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RecomputeAttention], object]
"""The model over some tokens: ``forward(token_ids, positions, slots, attention)``, int64 ``[n]``
three times. Whenever it would call the engine's attention it calls :meth:`attend`."""


class Recomputer:
    """Runs the first layers of a model over restored tokens.

    Args:
        forward: The model; see :data:`Forward`.
        pool: Where K and V are.
        first_layer: Number of the model's first layer, as its attention objects count.
        chunk_tokens: Tokens of one forward pass at most; bounds the memory of activations.

    Attributes:
        stream: Returns the stream that the engine runs its forward passes on; to be called on the
            scheduler thread.
    """

    def __init__(
        self,
        forward: Forward,
        pool: PagedPool,
        first_layer: int,
        chunk_tokens: int,
        stream: Callable[[], Stream],
    ) -> None:
        self.stream = stream
        self._forward = forward
        self._pool = pool
        self._first_layer = first_layer
        self._chunk_tokens = chunk_tokens

    @torch.inference_mode()
    def run(
        self,
        layers: int,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: Sequence[TokenSpan],
    ) -> None:
        """Write K and V of the first ``layers`` (at least 1) layers to the pool.

        Positions and slots of the ``spans`` are int64 ``[n]`` each, on the device, span after span.

        Raises:
            RecomputeRefused: The model ended without reaching the last layer, or is no plain one.
        """
        token_ids = to_device(np.concatenate([span.token_ids for span in spans]), slots.device)
        for start in range(0, len(slots), self._chunk_tokens):
            chunk = slice(start, min(start + self._chunk_tokens, len(slots)))
            attention = RecomputeAttention(
                self._pool,
                self._first_layer + layers - 1,
                slots[chunk],
                list(_pieces(chunk, slots, spans)),
            )
            try:
                self._forward(token_ids[chunk], positions[chunk], slots[chunk], attention)
            except _LayersDone:
                continue
            raise RecomputeRefused(f"the model ended before attention of layer {layers - 1}")

    @torch.inference_mode()
    def probe(
        self, layers: int, token_ids: np.ndarray, keys: torch.Tensor
    ) -> Sequence[ProbedLayer]:
        """Ask the last tokens of a sequence again in ``layers`` layers; the pool stays as it is.
        What is returned reads K and V there: on the same stream, while they are there. The model
        takes part in no collective behind the last layer's attention.

        Args:
            token_ids: The last tokens, int64 ``[t]``.
            keys: Slots of all tokens of the sequence, int64 ``[n]``, on the device.

        Raises:
            RecomputeRefused: See :meth:`run`.
        """
        device, first = keys.device, len(keys) - len(token_ids)
        nowhere = torch.zeros(len(token_ids), dtype=torch.int64, device=device)  # SGLang's padding
        positions = torch.arange(first, len(keys), device=device)
        last = self._first_layer + layers - 1
        attention = _ProbeAttention(self._pool, last, nowhere, keys)
        try:
            self._forward(to_device(token_ids, device), positions, nowhere, attention)
        except _LayersDone:
            return attention.layers
        raise RecomputeRefused(f"the model ended before attention of layer {layers - 1}")


def _pieces(chunk: slice, slots: torch.Tensor, spans: Sequence[TokenSpan]) -> Iterator[_Piece]:
    begin = 0
    for span in spans:
        behind = begin + len(span.token_ids)
        first, end = max(begin, chunk.start), min(behind, chunk.stop)
        if first < end:
            keys = torch.cat((span.prefix, slots[begin:end]))
            yield _Piece(slice(first - chunk.start, end - chunk.start), keys)
        begin = behind
