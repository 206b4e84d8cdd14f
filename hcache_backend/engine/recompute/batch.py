"""Recomputation with SGLang's models: a batch of tokens, how the model is called, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from hcache_backend.engine.arguments import resolved
from hcache_backend.restore.recompute import Forward, RecomputeAttention
from hcache_backend.streams import Stream, current_stream, of, to_device


class RecomputeBatch(ForwardBatch):
    """Marks a recomputation: our hook on attention hands it over to ``attention``."""

    attention: RecomputeAttention


def forward_stream(runner: Any) -> Stream:
    """Where SGLang runs the forward passes of ``runner``; called on the scheduler thread.

    That is a stream of their own, or with neither overlap nor pipeline stages the scheduler's.
    """
    args = resolved(runner.server_args)
    if args.disable_overlap_schedule and args.pp_size == 1:
        return current_stream(runner.device)
    return of(runner.forward_stream)


def model_forward(runner: Any) -> Forward:
    """The model of ``runner`` (SGLang's ModelRunner) over restored tokens."""

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
            seq_lens=to_device(seen, slots.device),
            out_cache_loc=slots,
            seq_lens_sum=int(seen.sum()),
            positions=positions,
        )
        batch.attention = attention
        # Some models ask the context for the pool. Nobody else runs the model meanwhile.
        with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
            return runner.model.forward(token_ids, positions, batch)

    return forward
