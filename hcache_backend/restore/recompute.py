"""Recomputation of the first layers of a restore (paper section 4.1), for any model. The model's
own forward pass runs over the restored tokens with the engine's own attention: what computed K and
V before computes them again. One pass takes consecutive tokens of one sequence. Queries attend to
rows of the pool: the prefix on the device, and the restored tokens themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.streams import Stream, to_device


class AttentionInputs(Protocol):
    """The last queries ``q`` of a sequence in one layer (``[t, heads, dim]``, as attention receives
    them) and what they attend to: ``length`` tokens, whose products are scaled by ``scale``."""

    @property
    def q(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...
    @property
    def length(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    def keys(self, heads: slice) -> torch.Tensor:
        """Fetch K of all tokens in some heads, ``[length, heads, dim]``; of any type."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence that are restored together."""

    token_ids: np.ndarray  # int64 [n]
    prefix: torch.Tensor  # slots of all tokens before them, in order, int64 [m], on the device


class RecomputeRefused(RuntimeError):
    """A layer has no K and V of its own, or an attention that cannot be looked at."""


class _LayersDone(Exception):
    """K and V of the last wanted layer are written."""


Engine = Callable[[bool], torch.Tensor]  # attention of a layer; True: it stores K and V


@dataclass(eq=False)
class RecomputePass:
    """One forward pass of a recomputation, which the engine's attention asks at every layer.
    Layers are numbered as by the engine's attention objects."""

    _pool: PagedPool
    _last_layer: int
    keys: torch.Tensor  # slots of its tokens and of all before them, in order, int64 [m]
    slots: torch.Tensor  # of its tokens, to which K and V go, int64 [n]

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, store: bool, engine: Engine
    ) -> torch.Tensor:
        """Let the engine attend and, if ``store``, store K and V, or end the pass. ``kernel`` is
        the engine's attention object. ``q``, ``k``, ``v`` and the result are ``[n, heads * dim]``;
        ``k`` and ``v`` are None if a layer uses those of another one. Raises _LayersDone at the
        last wanted layer, or RecomputeRefused if that has no K and V of its own."""
        if kernel.layer_id < self._last_layer:
            return engine(store)
        if k is None or v is None:
            raise RecomputeRefused(f"layer {kernel.layer_id} has no K and V of its own")
        if store and self._pool.latent:
            engine(store)  # it puts latents together in ways of its own
        elif store:
            k = k.reshape(-1, kernel.tp_k_head_num, kernel.qk_head_dim)
            v = v.reshape(-1, kernel.tp_v_head_num, kernel.v_head_dim)
            self._pool.store(kernel, self.slots, k, v)
        raise _LayersDone


class _PoolInputs(NamedTuple):
    """:class:`AttentionInputs` whose K is in the pool."""

    q: torch.Tensor
    scale: float
    length: int
    kv_heads: int
    keys: Callable[[slice], torch.Tensor]


@dataclass(eq=False)
class _AttentionPass(RecomputePass):
    """A pass over tokens whose K and V are in the pool already; it writes nothing there."""

    layers: list[_PoolInputs] = field(default_factory=list)  # what attention received, by layer

    def attend(
        self, kernel: Any, q: torch.Tensor, k: Any, v: Any, store: bool, engine: Engine
    ) -> torch.Tensor:
        """Append what attention receives to :attr:`layers`, and attend without storing. Raises
        RecomputeRefused for attention other than plain softmax, or without K and V of its own."""
        if k is None or v is None or not _is_plain(kernel):
            raise RecomputeRefused(f"layer {kernel.layer_id} has an attention of its own kind")
        heads = q.reshape(-1, kernel.tp_q_head_num, kernel.qk_head_dim)
        scale, kv_heads = float(kernel.scaling), int(kernel.tp_k_head_num)
        keys = partial(self._pool.fetch_keys, kernel, self.keys, heads.dtype)
        self.layers.append(_PoolInputs(heads, scale, len(self.keys), kv_heads, keys))
        return super().attend(kernel, q, k, v, False, engine)


def _is_plain(kernel: Any) -> bool:
    """True if attention of this layer is a softmax of scaled products over all tokens before."""
    return (
        not kernel.logit_cap
        and kernel.sliding_window_size <= 0
        and not kernel.is_cross_attention
        and getattr(kernel.attn_type, "value", "decoder") == "decoder"
        and getattr(kernel, "xai_temperature_len", -1) <= 0
    )


Forward = Callable[[torch.Tensor, torch.Tensor, RecomputePass], object]
"""``forward(token_ids, positions, recompute_pass)`` runs the model over the tokens of a pass, int64
``[n]`` twice. It calls :meth:`RecomputePass.attend` in place of the engine's attention."""


@dataclass(eq=False)
class Recomputer:
    """Runs the first layers of a model over restored tokens."""

    _forward: Forward
    _pool: PagedPool
    _first_layer: int  # of the model, as its attention objects count
    _chunk_tokens: int  # of a forward pass: bounds the memory of activations
    # Gives the engine's stream of forward passes; scheduler thread only.
    stream: Callable[[], Stream]
    layers: int  # number of first ones that can be recomputed

    @torch.inference_mode()
    def recompute(self, layers: int, slots: torch.Tensor, spans: Sequence[TokenSpan]) -> None:
        """Write K and V of the first ``layers`` (at least 1) layers to ``slots``, int64 ``[n]``, on
        the device, span after span. Raises RecomputeRefused if the model ended before the last
        layer, or that one has no K and V of its own."""
        begin, last = 0, self._first_layer + layers - 1
        for span in spans:
            end = begin + len(span.token_ids)
            token_ids = to_device(span.token_ids, slots.device)
            sequence = torch.cat((span.prefix, slots[begin:end]))
            for start in range(begin, end, self._chunk_tokens):
                stop = min(start + self._chunk_tokens, end)
                keys = sequence[: len(span.prefix) + stop - begin]
                recompute_pass = RecomputePass(self._pool, last, keys, slots[start:stop])
                positions = torch.arange(len(keys) - (stop - start), len(keys), device=keys.device)
                self._run(token_ids[start - begin : stop - begin], positions, recompute_pass)
            begin = end

    @torch.inference_mode()
    def attention_inputs(
        self, layers: int, token_ids: np.ndarray, keys: torch.Tensor
    ) -> Sequence[AttentionInputs]:
        """What attention receives for the last tokens of a sequence, in the first ``layers``
        layers: the model runs over these tokens once more, and the pool stays as it is.
        ``token_ids`` are the last tokens, int64 ``[t]``; ``keys`` the slots of all, int64 ``[n]``,
        on the device. The result reads K there: use it on the same stream, while K is there. The
        model takes part in no collective behind the last layer's attention. Raises as
        :meth:`recompute`."""
        device, first = keys.device, len(keys) - len(token_ids)
        no_slots = torch.zeros(len(token_ids), dtype=torch.int64, device=device)  # SGLang's padding
        positions = torch.arange(first, len(keys), device=device)
        attention_pass = _AttentionPass(self._pool, self._first_layer + layers - 1, keys, no_slots)
        self._run(to_device(token_ids, device), positions, attention_pass)
        return attention_pass.layers

    def _run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, recompute_pass: RecomputePass
    ) -> None:
        """Run the model, which ends at the last wanted layer."""
        try:
            self._forward(token_ids, positions, recompute_pass)
        except _LayersDone:
            return
        raise RecomputeRefused("the model ended before attention of the last wanted layer")
