"""Forward passes without scheduler or prefix cache: through SGLang's own batch objects before
anything is served (they overwrite the KV pool, and all ranks take part), and recomputations."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, PPProxyTensors
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from hcache_backend.checks.self_check import ForwardPass, Observation, check_tokens, is_quantised
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.ranks import Group, Refused, smallest
from hcache_backend.restore.recompute import RecomputePass, Recomputer
from hcache_backend.sglang.arguments import NO_REQUEST, page_size, resolved
from hcache_backend.sglang.compat import bind_pages, set_extend_range
from hcache_backend.streams import Stream, current_stream, to_device, wrap_engine_stream


@torch.no_grad()
def run_prompts(runner: Any, lengths: Sequence[int], before: int = 0) -> ForwardPass:
    """Run prompts of these lengths that begin as the self-check's does. ``before``: first tokens of
    a single prompt with a pass of their own; positions and ids are of the last pass. Then both
    pools are emptied, also after an error: a lost slot would stop the server later."""
    vocabulary = runner.model_config.vocab_size
    prefix: torch.Tensor | None = None
    try:
        for pass_lengths in ([before], lengths) if before else (lengths,):
            prompts = [prefill_request(check_tokens(vocabulary, n), prefix) for n in pass_lengths]
            with _Stages() as stages, _without_prefill_graphs(runner):
                forward = forward_batch(runner, prefill_batch(runner, prompts))
                positions, token_ids = forward.positions.clone(), forward.input_ids.clone()
                written = stages.run_pass(runner, forward)
            prefix = slots = written if prefix is None else torch.cat((prefix, written))
            runner.req_to_token_pool.clear()  # there may be one row only
        return ForwardPass(forward, slots, positions, token_ids)
    finally:
        _empty_pools(runner)


def run_again(runner: Any, lengths: Sequence[int], before: int = 0) -> Sequence[torch.Tensor]:
    """:func:`run_prompts`; the slots of each, int64 ``[n]``."""
    return run_prompts(runner, lengths, before).slots.split(list(lengths))


@torch.no_grad()
def prefill_and_decode(runner: Any, tokens: int, ranks: Group, *, graphs: bool) -> torch.Tensor:
    """Run all but the last token of a prompt that begins as the self-check's, then the last one;
    returns the slots, int64 ``[tokens]``, at least two. The decode step uses a recorded CUDA graph,
    and with ``graphs`` the prefill too. Raises Refused if another of ``ranks`` failed."""
    prompt = check_tokens(runner.model_config.vocab_size, tokens)
    batch: Any = None
    slots: list[torch.Tensor] = []
    problem: Exception | None = None
    try:
        with nullcontext() if graphs else _without_prefill_graphs(runner):
            for _ in range(2):
                with _Stages() as stages:  # also after a problem: the others go on
                    try:
                        if problem is None and batch is None:
                            batch = prefill_batch(runner, [prefill_request(prompt[:-1])])
                        elif problem is None:
                            prepare_decode(batch, prompt[-1:])
                        if problem is None:
                            slots.append(stages.run_pass(runner, forward_batch(runner, batch)))
                    except Exception as error:
                        problem = error
                [fine] = smallest(ranks, problem is None)
                if not fine and problem is None:
                    problem = Refused("another tensor-parallel rank failed in a forward pass")
    finally:
        _empty_pools(runner)
    if problem is not None:
        try:
            raise problem
        finally:
            problem = None  # it holds this frame and those of the model, with all their tensors
    return torch.cat(slots)


def attention_modules(model: torch.nn.Module, layers: int) -> list[Observation]:
    """The attention modules of ``model``, with linear layers, in order. Raises Refused unless they
    are ``layers``, numbered one after the other. For MLA one stands for several objects."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = dict(model.named_modules())
    known: dict[tuple[int, str], Observation] = {}
    for path, kernel in modules.items():
        if not isinstance(kernel, RadixAttention):
            continue
        name = path
        linears: list[torch.nn.Module] = []
        while name and not linears:
            name = name.rpartition(".")[0]
            inside = modules[name].modules()
            linears = [part for part in inside if isinstance(part, LinearBase | torch.nn.Linear)]
        layer = name.rpartition(".")[0]
        parts = modules[layer].named_modules()
        quantised = {f"{layer}.{part}": module for part, module in parts if is_quantised(module)}
        observation = Observation(name, modules[name], kernel, linears, quantised)
        known.setdefault((kernel.layer_id, name), observation)
    observed = [known[key] for key in sorted(known)]
    ids = [observation.kernel.layer_id for observation in observed]
    if not observed or ids != list(range(ids[0], ids[0] + len(ids))):
        raise Refused(f"the attention layers of the model are numbered {ids}")
    if len(ids) != layers:
        raise Refused(f"the KV pool has {layers} layers and the model {len(ids)} attention layers")
    return observed


def prefill_request(token_ids: Sequence[int], prefix: torch.Tensor | None = None) -> Any:
    """SGLang's request for a prefill. ``prefix``: slots (int64 ``[n]``) of its first tokens."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0, max_new_tokens=1)
    request = Req("hcache-prefill", "", array("q", token_ids), sampling)
    request.full_untruncated_fill_ids = request.origin_input_ids
    request.logprob_start_len = -1
    if prefix is not None:
        request.prefix_indices = prefix
    set_extend_range(request, 0 if prefix is None else len(prefix), len(token_ids))
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
    return ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)


def _no_tree(runner: Any) -> SimpleNamespace:
    """In the place of SGLang's radix tree in a batch: nothing is cached, shared or evicted."""
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


def _empty_pools(runner: Any) -> None:
    runner.token_to_kv_pool_allocator.clear()
    runner.req_to_token_pool.clear()


class _Stages(AbstractContextManager["_Stages"]):
    """Data between pipeline stages in a pass, which is run in the block; the first and the only one
    receive none. The next stage gets the output, or nothing if this one failed."""

    def __init__(self) -> None:
        self._group = parallel_state.get_pp_group()
        self._outcome: Any = None
        # Before anything can fail: the stage before this one waits until it is received.
        self._received = None if self._group.is_first_rank else self._group.recv_tensor_dict()

    def run_pass(self, runner: Any, batch: Any) -> torch.Tensor:
        """Run this stage's model; returns the slots that it filled, int64 ``[n]``. Raises Refused
        if the stage before failed."""
        if self._received == {}:
            raise Refused("the pipeline stage before this one failed its self-check")
        slots: torch.Tensor = batch.out_cache_loc.clone()
        received = None if self._received is None else PPProxyTensors(self._received)
        self._outcome = runner.forward(batch, pp_proxy_tensors=received).logits_output
        return slots

    def __exit__(self, *_: object) -> None:
        if not self._group.is_last_rank:
            self._group.send_tensor_dict(getattr(self._outcome, "tensors", {}))


@contextmanager
def _without_prefill_graphs(runner: Any) -> Iterator[None]:
    """Prefill by SGLang's eager runner, because a replay would run without our hooks."""
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    runner.prefill_cuda_graph_runner = None
    try:
        yield
    finally:
        runner.prefill_cuda_graph_runner = graphs


class RecomputeBatch(ForwardBatch):
    """Marks a recomputation: our hook on attention lets ``recompute_pass`` attend."""

    recompute_pass: RecomputePass


def forward_stream(runner: Any) -> Stream:
    """SGLang's stream of forward passes; without overlap and pipeline stages the current one."""
    args = resolved(runner.server_args)
    if args.disable_overlap_schedule and args.pp_size == 1:
        return current_stream(runner.device)
    return wrap_engine_stream(runner.forward_stream)


def make_attention(runner: Any, name: str) -> AttentionBackend:
    """Another instance of SGLang's attention backend ``name``. Raises Refused if that fails."""
    try:
        backend = ATTENTION_BACKENDS[name](runner)
    except Exception as error:  # no memory for its buffers, whose size torch says
        raise Refused(f"attention backend {name!r} cannot be made: {error}") from None
    backend.prefill_attention_backend_str = name  # MLA modules choose their way by it
    return backend


@contextmanager
def attending_by(runner: Any, attention: AttentionBackend | None) -> Iterator[None]:
    """Eager passes within the block attend by this backend of SGLang's; None: by their own."""
    original, runner.attn_backend = runner.attn_backend, attention or runner.attn_backend
    try:
        yield
    finally:
        runner.attn_backend = original


def make_recomputer(
    runner: Any, kvcache: Any, chunk_tokens: int, attention: AttentionBackend | None = None
) -> Recomputer:
    """The :class:`Recomputer` of the model of SGLang's ``runner``. Attention is planned anew before
    each pass of SGLang, so none sees this plan. The host waits for nothing. A pass has at most
    ``chunk_tokens``, and no more than a prefill of SGLang, which leaves memory for that many.
    ``attention`` is the backend that attends; None: that of SGLang's passes."""
    bound = resolved(runner.server_args).chunked_prefill_size  # None or -1: none
    chunk_tokens = min(chunk_tokens, bound) if (bound or -1) > 0 else chunk_tokens

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, step: RecomputePass) -> object:
        """Run the model on the last ``token_ids`` of the sequence in slots ``step.keys``."""
        length, tokens, device = len(step.keys), len(token_ids), token_ids.device
        lengths = np.array([length, length - tokens, tokens, 0], np.int32)
        seq_lens, prefix_lens, extend_lens, start = to_device(lengths, device).split(1)
        # Other fields keep their defaults: the batch uses no optional feature.
        batch = RecomputeBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=token_ids,
            req_pool_indices=torch.full((1,), NO_REQUEST, dtype=torch.int64, device=device),
            seq_lens=seq_lens.to(torch.int64),
            seq_lens_cpu=torch.tensor([length]),
            out_cache_loc=step.slots,
            seq_lens_sum=length,
            positions=positions,
            extend_num_tokens=tokens,
            extend_seq_lens=extend_lens,
            extend_seq_lens_cpu=[tokens],
            extend_prefix_lens=prefix_lens,
            extend_prefix_lens_cpu=[length - tokens],
            extend_start_loc=start,
        )
        batch.recompute_pass = step
        bind_pages(runner.kv_index_translator, batch)
        backend = attention or runner.attn_backend
        row = runner.req_to_token_pool.req_to_token[NO_REQUEST, :length]
        row.copy_(step.keys)
        try:
            # Some models ask the context for the pool. Nothing else runs the model meanwhile.
            with forward_context(ForwardContext(attn_backend=backend)):
                backend.init_forward_metadata(batch)
                return runner.model.forward(token_ids, positions, batch)
        finally:
            row.zero_()

    pool, stream = PagedPool(kvcache), partial(forward_stream, runner)
    first, layers = kvcache.start_layer, kvcache.layer_num
    return Recomputer(forward, pool, first, chunk_tokens, stream, layers)
