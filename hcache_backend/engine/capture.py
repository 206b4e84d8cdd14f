"""Capture: take the hidden states out of the forward pass, for every token of every step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hcache_backend.capture.mirror import HiddenMirror
from hcache_backend.engine import metrics
from hcache_backend.projection.attention import AttentionLayer

logger = logging.getLogger("hcache")


class _Step(NamedTuple):
    """What a forward pass works on, read before the engine may pad it."""

    slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    layers_seen: list[int]


class HiddenCapture:
    """Copies each layer's projection input to the mirror while the model runs.

    A step counts only when every layer was seen exactly once: a hook that fired is not a row that
    was captured. Nothing here raises into the forward pass.

    Args:
        layers: The attention layers; a forward pre-hook goes on each projection.
        mirror: Where rows go.
    """

    def __init__(self, layers: Sequence[AttentionLayer], mirror: HiddenMirror) -> None:
        self._mirror = mirror
        self._layers = len(layers)
        self._step: _Step | None = None
        self._complained = False
        self._noted_unencodable = False
        for layer in layers:
            layer.projection.register_forward_pre_hook(self._hook(layer.index), with_kwargs=True)

    @contextmanager
    def step(self, batch: Any) -> Iterator[None]:
        """Around one forward pass of the engine."""
        self._step = self._begin(batch)
        try:
            yield
            self._end()
        finally:
            self._step = None

    def _begin(self, batch: Any) -> _Step | None:
        slots = getattr(batch, "out_cache_loc_virtual", None)
        slots = batch.out_cache_loc if slots is None else slots
        ids, positions = batch.input_ids, batch.positions
        if slots is None or slots.numel() == 0:
            return None
        self._mirror.invalidate(slots)
        if ids is None or positions is None or not len(ids) == len(positions) == len(slots):
            self._complain("a step without token ids or positions")
            return None
        if positions.dim() != 1:
            self._complain("a step with positions of several dimensions")
            return None
        # Copies: the batch may hold static buffers, which the next step overwrites.
        return _Step(slots.to("cpu", copy=True), positions.clone(), ids.clone(), [0] * self._layers)

    def _hook(self, index: int) -> Any:
        def take(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            step = self._step
            if step is None:
                return
            hidden = args[0] if args else next(iter(kwargs.values()), None)
            if hidden is not None and self._fits(hidden, len(step.slots)):
                self._mirror.put_layer(index, step.slots, hidden[: len(step.slots)])
                step.layers_seen[index] += 1

        return take

    def _fits(self, hidden: object, tokens: int) -> bool:
        codec = self._mirror.codec
        return (
            isinstance(hidden, torch.Tensor)
            and hidden.dim() == 2
            and hidden.dtype == codec.dtype
            and hidden.shape[0] >= tokens
            and hidden.shape[1] == codec.hidden_size
        )

    def _end(self) -> None:
        step = self._step
        if step is None:
            return
        if any(seen != 1 for seen in step.layers_seen):
            self._complain(f"a step that showed each layer {step.layers_seen} times")
            return
        valid = self._mirror.commit(step.slots, step.positions, step.token_ids)
        metrics.count_tokens("captured", valid)
        if valid < len(step.slots):
            self._note_unencodable(len(step.slots) - valid)

    def _note_unencodable(self, tokens: int) -> None:
        metrics.count_tokens("not_encodable", tokens)
        if not self._noted_unencodable:
            self._noted_unencodable = True
            logger.warning(
                "hcache: codec %r cannot hold a row of %d tokens of this step; what they belong to "
                "is not stored (said once, counted always)",
                self._mirror.codec.name,
                tokens,
            )

    def _complain(self, what: str) -> None:
        metrics.count_problem("capture")
        if not self._complained:
            self._complained = True
            logger.warning("hcache: not captured: %s (said once, counted always)", what)
