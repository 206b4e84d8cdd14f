"""Recomputation with SGLang's models: how they are called, and the proof that it is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from hcache_backend.engine.startup.layer_projections import PagedPool
from hcache_backend.engine.startup.self_check import (
    Probe,
    SelfCheckFailed,
    difference_problem,
    pool_rows,
)
from hcache_backend.projection.check import tolerance
from hcache_backend.restore.recompute import RecomputeAttention, Recomputer, RestoredSpan
from hcache_backend.streams import held_for_device


class RecomputeBatch(ForwardBatch):
    """Marks a recomputation: our hook on attention hands it over to ``attention``."""

    attention: RecomputeAttention


def make_recomputer(runner: Any, kvcache: Any, chunk_tokens: int) -> Recomputer:
    """What recomputes the first layers of the model of ``runner``.

    Args:
        runner: SGLang's ModelRunner.
        kvcache: The KV pool.
        chunk_tokens: Tokens of one forward pass at most.
    """

    def forward(
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attention: RecomputeAttention,
    ) -> object:
        before, tokens = zip(*attention.lengths, strict=True)
        seen = np.add(before, tokens, dtype=np.int64)
        # What is not said has its default: no feature that a batch may have is in use.
        batch = RecomputeBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(tokens),
            input_ids=token_ids,
            req_pool_indices=torch.zeros(len(tokens), dtype=torch.int64, device=slots.device),
            seq_lens=held_for_device(seen, slots.device).to(slots.device, non_blocking=True),
            out_cache_loc=slots,
            seq_lens_sum=int(seen.sum()),
            positions=positions,
        )
        batch.attention = attention
        # Some models ask the context for the pool. Nobody else runs the model meanwhile.
        with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            return runner.model.forward(token_ids, positions, batch)

    return Recomputer(forward, PagedPool(kvcache), kvcache.start_layer, chunk_tokens)


def check_recompute(probe: Probe, recomputer: Recomputer, kvcache: Any) -> None:
    """Recompute the probe's tokens, and once more the second half of them behind the first.

    Nothing may be allocated yet: other slots of the pool are overwritten too. There are more tokens
    than the probe had, so what is left of its batch would show.

    Raises:
        SelfCheckFailed: It cannot be done, or K or V differ from the model's by more than rounding
            explains.
    """
    slots, device = probe.slots, probe.slots.device
    tokens = len(slots)
    half, layers = tokens // 2, len(probe.layers)
    dtype = probe.hidden[0].dtype
    wanted = [pool_rows(layer, slots, kvcache, dtype) for layer in probe.layers]
    # The pool's last slots; the probe's are its first.
    others = torch.arange(kvcache.size - tokens, kvcache.size, device=device)
    if int(slots.max()) >= int(others[0]):
        raise SelfCheckFailed("the KV pool is too small to try recomputation")
    buffers = [*kvcache.k_buffer, *kvcache.v_buffer]
    held = [buffer[slots] for buffer in buffers]
    for buffer in buffers:
        buffer[slots] = 0
    none = slots[:0]
    spans = [
        RestoredSpan(tokens, none),
        RestoredSpan(half, none),
        RestoredSpan(tokens - half, slots[:half]),
    ]
    where = torch.cat((slots, others))
    ids = probe.token_ids
    try:
        recomputer.run(layers, ids.repeat(2), probe.positions.repeat(2), where, spans)
    except Exception as error:  # a model's own code, with a batch that it was not made for
        raise SelfCheckFailed(f"{type(error).__name__}: {error}") from None
    problems = list(_differences(probe, wanted, (slots, others), kvcache))
    for buffer, rows in zip(buffers, held, strict=True):
        buffer[slots] = rows  # later checks compare with what the model itself wrote
    if problems:
        raise SelfCheckFailed(problems[0])


def _differences(
    probe: Probe,
    wanted: Sequence[tuple[torch.Tensor, torch.Tensor]],
    places: Sequence[torch.Tensor],
    kvcache: Any,
) -> Iterator[str]:
    allowed = tolerance(kvcache.dtype)
    for layer, want in zip(probe.layers, wanted, strict=True):
        for at in places:
            got = pool_rows(layer, at, kvcache, probe.hidden[0].dtype)
            for name, has, should in zip("KV", got, want, strict=True):
                what = f"recomputed {name} of {layer.name}"
                problem = difference_problem(what, has, should, allowed)
                if problem is not None:
                    yield problem
