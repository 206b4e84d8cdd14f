"""Recomputation with SGLang's models: a batch of tokens, the call of the model, and its stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.restore.recompute import Forward, RecomputePass, Recomputer
from hcache_backend.sglang.arguments import NO_REQUEST, resolved
from hcache_backend.streams import Stream, current_stream, of, to_device


class RecomputeBatch(ForwardBatch):
    """Marks a recomputation: our hook on attention asks ``asked`` first."""

    asked: RecomputePass


def forward_stream(runner: Any) -> Stream:
    """SGLang's stream of forward passes: the scheduler's without overlap and pipeline stages.
    Called on the scheduler thread."""
    args = resolved(runner.server_args)
    if args.disable_overlap_schedule and args.pp_size == 1:
        return current_stream(runner.device)
    return of(runner.forward_stream)


def make_recomputer(runner: Any, kvcache: Any, chunk_tokens: int) -> Recomputer:
    """The :class:`Recomputer` of the model of ``runner``."""
    pool, stream = PagedPool(kvcache), partial(forward_stream, runner)
    first, layers = kvcache.start_layer, kvcache.layer_num
    return Recomputer(_model_forward(runner), pool, first, chunk_tokens, stream, layers)


def _model_forward(runner: Any) -> Forward:
    """The model of ``runner`` (SGLang's ModelRunner) over restored tokens. Attention is planned as
    SGLang plans it before each pass, so its next pass does not see this plan. Inputs are written on
    the stream of forward passes, and the host waits for nothing."""

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, asked: RecomputePass) -> object:
        seen, tokens, device = len(asked.keys), len(token_ids), token_ids.device
        lengths = np.array([seen, seen - tokens, tokens, 0], np.int32)
        all_, before, new, start = to_device(lengths, device).split(1)
        # Other fields keep their defaults: the batch uses no optional feature.
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
            # Some models ask the context for the pool. Nothing else runs the model meanwhile.
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata(batch)
                return runner.model.forward(token_ids, positions, batch)
        finally:
            row.zero_()

    return forward
