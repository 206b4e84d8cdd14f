"""Recomputation of the first layers of a restore (paper section 4.1), for any model.

The model's own forward pass runs over the restored tokens, with the engine's own attention: what
computed K and V before computes them again. It is stopped at the last wanted layer, once K and V of
that one are written.

One pass takes consecutive tokens of one sequence. Queries attend to the rows of the pool: the
prefix that is on the device already, and the restored tokens themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.streams import Stream, to_device


class ProbedLayer(Protocol):
    """The last queries of a sequence in one layer, and what they attend to, which is fetched when
    it is asked for."""

    @property
    def q(self) -> torch.Tensor:
        """Of the last ``t`` tokens, ``[t, heads, dim]``, as attention receives them."""

    @property
    def scale(self) -> float:
        """Factor of the products of queries and keys."""

    @property
    def length(self) -> int:
        """All ``n`` tokens."""

    @property
    def kv_heads(self) -> int:
        """Heads of K, and of V."""

    def keys(self, heads: slice) -> torch.Tensor:
        """K of all tokens in some heads, ``[n, heads, dim]``; its type may be another one."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence that are restored together.

    Attributes:
        token_ids: int64 ``[n]``.
        prefix: Slots of all tokens before them, in order, int64 ``[m]``, on the device.
    """

    token_ids: np.ndarray
    prefix: torch.Tensor


class RecomputeRefused(RuntimeError):
    """A layer has no K and V of its own, or an attention that cannot be looked at."""


class _LayersDone(Exception):
    """K and V of the last wanted layer are written."""


Engine = Callable[[bool], torch.Tensor]
"""The engine's attention of a layer; the argument says whether it stores K and V."""


class RecomputePass:
    """One forward pass of a recomputation, which the engine's attention asks at every layer.

    Layers are numbered as by the engine's attention objects.

    Attributes:
        keys: Slots of the tokens of this pass and of all before them in their sequence, in order,
            int64 ``[m]``.
        slots: Where K and V of the ``n`` tokens go, int64 ``[n]``.
    """

    def __init__(
        self, pool: PagedPool, last_layer: int, keys: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self.keys = keys
        self.slots = slots
        self._pool = pool
        self._last_layer = last_layer

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, store: bool, engine: Engine
    ) -> torch.Tensor:
        """Let the engine store K and V and attend, or stop it.

        Args:
            kernel: The engine's attention object of the layer.
            q: ``[n, heads * head_dim]``; what is returned is ``[n, heads * value_dim]``.
            k: ``[n, kv_heads * head_dim]``; None where a layer uses those of another one.
            v: ``[n, kv_heads * value_dim]`` or None, likewise.
            store: Whether K and V are to be stored: the model may have done it itself.

        Raises:
            RecomputeRefused: The last wanted layer has no K and V of its own.
            _LayersDone: It was the last wanted layer.
        """
        if kernel.layer_id < self._last_layer:
            return engine(store)
        if k is None or v is None:
            raise RecomputeRefused(f"layer {kernel.layer_id} has no K and V of its own")
        if store:
            k = k.reshape(-1, kernel.tp_k_head_num, kernel.qk_head_dim)
            v = v.reshape(-1, kernel.tp_v_head_num, kernel.v_head_dim)
            self._pool.store(kernel, self.slots, k, v)
        raise _LayersDone


@dataclass(frozen=True)
class _Asked:
    """A :class:`ProbedLayer` whose K are in the pool, in ``slots``."""

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


class _ProbePass(RecomputePass):
    """A pass over tokens whose K and V are in the pool already; nothing is written there.

    Attributes:
        layers: What attention received, by layer.
    """

    def __init__(
        self, pool: PagedPool, last_layer: int, keys: torch.Tensor, slots: torch.Tensor
    ) -> None:
        super().__init__(pool, last_layer, keys, slots)
        self.layers: list[_Asked] = []

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, store: bool, engine: Engine
    ) -> torch.Tensor:
        if k is None or v is None or not _plain(kernel):
            raise RecomputeRefused(f"layer {kernel.layer_id} has an attention of its own kind")
        heads = q.reshape(-1, kernel.tp_q_head_num, kernel.qk_head_dim)
        self.layers.append(_Asked(heads, self._pool, kernel, self.keys))
        return super().attend(kernel, q, k, v, False, engine)


def _plain(kernel: Any) -> bool:
    return (
        not kernel.logit_cap
        and kernel.sliding_window_size <= 0
        and not kernel.is_cross_attention
        and getattr(kernel.attn_type, "value", "decoder") == "decoder"
        and getattr(kernel, "xai_temperature_len", -1) <= 0
    )


Forward = Callable[[torch.Tensor, torch.Tensor, RecomputePass], object]
"""The model over the tokens of a pass: ``forward(token_ids, positions, asked)``, int64 ``[n]``
twice. Whenever it would call the engine's attention it calls :meth:`RecomputePass.attend`."""


class Recomputer:
    """Runs the first layers of a model over restored tokens.

    Args:
        forward: The model; see :data:`Forward`.
        pool: Where K and V are.
        first_layer: Number of the model's first layer, as its attention objects count.
        chunk_tokens: Tokens of one forward pass at most; bounds the memory of activations.

    Attributes:
        layers: How many first layers can be recomputed.
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
        layers: int,
    ) -> None:
        self.layers = layers
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
            RecomputeRefused: The model ended without reaching the last layer, or that one has no K
                and V of its own.
        """
        begin, last = 0, self._first_layer + layers - 1
        for span in spans:
            end = begin + len(span.token_ids)
            token_ids = to_device(span.token_ids, slots.device)
            sequence = torch.cat((span.prefix, slots[begin:end]))
            for start in range(begin, end, self._chunk_tokens):
                stop = min(start + self._chunk_tokens, end)
                keys = sequence[: len(span.prefix) + stop - begin]
                asked = RecomputePass(self._pool, last, keys, slots[start:stop])
                self._run(token_ids[start - begin : stop - begin], positions[start:stop], asked)
            begin = end

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
        asked = _ProbePass(self._pool, last, keys, nowhere)
        self._run(to_device(token_ids, device), positions, asked)
        return asked.layers

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, asked: RecomputePass) -> None:
        try:
            self._forward(token_ids, positions, asked)
        except _LayersDone:
            return
        raise RecomputeRefused("the model ended before attention of the last wanted layer")
