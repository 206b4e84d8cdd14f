"""Forward passes through SGLang's own batch objects, without scheduler or prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hcache_backend.sglang.arguments import page_size
from hcache_backend.sglang.compat import set_extend_range


def prefill_request(token_ids: Sequence[int], prefix: torch.Tensor | None = None) -> Any:
    """SGLang's request for a prefill; ``token_ids`` is the whole prompt. ``prefix``: slots of its
    first tokens whose K and V the pool has (int64 ``[n]``)."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(
        rid="hcache-prefill",
        origin_input_text="",
        origin_input_ids=array("q", token_ids),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    before = 0
    if prefix is not None:
        request.prefix_indices, before = prefix, len(prefix)
    set_extend_range(request, before, len(token_ids))
    return request


def prefill_batch(runner: Any, requests: list[Any]) -> Any:
    """SGLang's ScheduleBatch of a prefill; takes slots of ``runner``'s pools."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    batch = ScheduleBatch.init_new(
        reqs=requests,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=_no_tree(runner),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
    return batch


def prepare_decode(batch: Any, token_ids: Sequence[int]) -> None:
    """Continue SGLang's ``batch`` with one token for each request."""
    batch.input_ids = torch.tensor(token_ids, dtype=torch.int64, device=batch.device)
    batch.prepare_for_decode()


def forward_batch(runner: Any, batch: Any) -> Any:
    """SGLang's ForwardBatch of the next step of ``batch``."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def _no_tree(runner: Any) -> SimpleNamespace:
    """A prefix cache with nothing in it, for batches of any supported version."""
    return SimpleNamespace(
        page_size=page_size(runner.server_args),
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        supports_swa=lambda: False,
        supports_mamba=lambda: False,
        supports_prefix_sharing=lambda: True,
        is_chunk_cache=lambda: False,
        is_tree_cache=lambda: True,
        evict=lambda params: None,
        prefix_device_indices=lambda request: request.prefix_indices,
        maybe_hand_to_session=lambda request: None,
    )
