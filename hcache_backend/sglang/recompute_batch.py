"""Recomputation with SGLang's models: a batch of tokens, how the model is called, and where."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.restore.recompute import Forward, RecomputePass, Recomputer
from hcache_backend.sglang.arguments import resolved
from hcache_backend.streams import Stream, current_stream, of, to_device

NO_REQUEST = 0
"""SGLang's row of requests that is no request's: graphs pad batches with it."""


class RecomputeBatch(ForwardBatch):
    """Marks a recomputation: our hook on attention asks ``asked`` first."""

    asked: RecomputePass


def forward_stream(runner: Any) -> Stream:
    """Where SGLang runs the forward passes of ``runner``; called on the scheduler thread.

    That is a stream of their own, or with neither overlap nor pipeline stages the scheduler's.
    """
    args = resolved(runner.server_args)
    if args.disable_overlap_schedule and args.pp_size == 1:
        return current_stream(runner.device)
    return of(runner.forward_stream)


def make_recomputer(runner: Any, kvcache: Any, chunk_tokens: int) -> Recomputer:
    """What recomputes layers of the model of ``runner``; see :class:`Recomputer`."""
    pool, stream = PagedPool(kvcache), partial(forward_stream, runner)
    first, layers = kvcache.start_layer, kvcache.layer_num
    return Recomputer(_model_forward(runner), pool, first, chunk_tokens, stream, layers)


def _model_forward(runner: Any) -> Forward:
    """The model of ``runner`` (SGLang's ModelRunner) over restored tokens.

    Attention is planned here as SGLang plans it before each of its passes; so its next pass does
    not see this plan. What the plan and the kernels read is written on the stream of forward
    passes, and the host waits for nothing.
    """

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, asked: RecomputePass) -> object:
        seen, tokens, device = len(asked.keys), len(token_ids), token_ids.device
        lengths = np.array([seen, seen - tokens, tokens, 0], np.int32)
        all_, before, new, start = to_device(lengths, device).split(1)
        # What is not said has its default: no feature that a batch may have is in use.
        batch = RecomputeBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=token_ids,
            req_pool_indices=torch.full((1,), NO_REQUEST, dtype=torch.int64, device=device),
            seq_lens=all_.to(torch.int64),
            seq_lens_cpu=torch.tensor([seen]),
            out_cache_loc=asked.slots,
            seq_lens_sum=seen,
            positions=positions,
            extend_num_tokens=tokens,
            extend_seq_lens=new,
            extend_seq_lens_cpu=[tokens],
            extend_prefix_lens=before,
            extend_prefix_lens_cpu=[seen - tokens],
            extend_start_loc=start,
        )
        batch.asked = asked
        backend = runner.attn_backend
        row = runner.req_to_token_pool.req_to_token[NO_REQUEST, :seen]
        row.copy_(asked.keys)
        try:
            # Some models ask the context for the pool. Nobody else runs the model meanwhile.
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata(batch)
                return runner.model.forward(token_ids, positions, batch)
        finally:
            row.zero_()

    return forward
