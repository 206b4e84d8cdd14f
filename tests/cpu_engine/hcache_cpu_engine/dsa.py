"""Sparse attention of DeepSeek V3.2 and GLM-5 (DSA) in PyTorch behind SGLang's backend `dsa`.

An indexer chooses `index_topk` tokens for each query by keys of its own, and attention over MLA's
latents sees only these. SGLang's pools stay: latents in bfloat16 or packed (FP8, a scale for each
128 values, RoPE in bfloat16), and index keys (FP8) with their scales, both written by SGLang's own
methods. Replaced are their kernels, the indexer's logits and its choice, the attention itself, and
copies of index pages to host memory and back.

Scores are float64: what is chosen must not depend on the size of a batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import reordering

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
_SMALLEST_MAXIMUM = 1e-4
_GROUP = 128
"""So many values of a latent or of an index key share a scale."""
_QUERY_ROWS = 128
"""Queries that attend at once."""


def install() -> None:
    """Put the operators in their places. Called before the arguments are read."""
    from sglang.kernels.ops.quantization import hadamard
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache import allocation, kv_cache_configurator, memory_pool
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    # The arguments of these models are resolved for a GPU: here for Hopper.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    ATTENTION_BACKENDS["dsa"] = sparse_attention
    # SGLang 0.5.21 launches kernels unless the backend is one of its own for CPUs.
    allocation.support_triton = forward_batch_info.support_triton = lambda _: False
    DraftBackendFactory._create_dsa_decode_backend = draft_attention
    DraftBackendFactory._create_dsa_prefill_backend = lambda made: (
        "dsa",
        sparse_attention(made.draft_model_runner),
    )
    Indexer.forward_native = choose_tokens
    hadamard.hadamard_transform = hadamard_transform
    factory.get_rope_cpu = rope_for_any_length(factory.get_rope_cpu, factory.get_rope)
    packed_latents_too(kv_cache_configurator)
    memory_pool.DSATokenToKVPool.set_index_k_scale_buffer = write_index_keys
    memory_pool.quantize_k_cache_separate = pack_latents
    memory_pool.set_mla_kv_buffer_triton = write_latents
    memory_pool.set_mla_kv_buffer_dcp_sharded_triton = write_latents
    DSAIndexerPoolHost.load_to_device_per_layer = load_index_pages
    DSAIndexerPoolHost.backup_from_device_all_layer = back_up_index_pages


def rope_for_any_length(
    with_scaling: Callable[..., torch.nn.Module], without: Callable[..., torch.nn.Module]
) -> Callable[..., torch.nn.Module]:
    """SGLang's RoPE for CPUs knows that of DeepSeek only, which GLM-5 does not have."""

    def rope(*size: Any) -> torch.nn.Module:
        *of_both, _device = size
        return without(*of_both) if of_both[5] is None else with_scaling(*size)

    return rope


class NotACpu:
    """A platform that says so."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cpu(self) -> bool:
        return False


def packed_latents_too(configurator: Any) -> None:
    """SGLang refuses FP8 latents on CPUs, which have no attention over them."""
    configure = configurator.KVCacheConfigurator.configure

    @functools.wraps(configure)
    def without_refusal(self: Any, **memory: int) -> Any:
        platform = configurator.current_platform
        if self.use_mla_backend and self.kv_cache_dtype == _FP8:
            configurator.current_platform = NotACpu(platform)
        try:
            return configure(self, **memory)
        finally:
            configurator.current_platform = platform

    configurator.KVCacheConfigurator.configure = without_refusal


# ---- what SGLang's pools call ----


def hadamard_transform(rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """`rows [..., n] @ H * scale`, `n` a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < rows.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (rows.double() @ matrix.double() * scale).to(rows.dtype)


def quantise(rows: torch.Tensor, scale_format: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 of rows `[..., 128]`; scales `[..., 1]`, powers of two if they have a format."""
    scales = rows.float().abs().amax(-1, True).clamp_min(_SMALLEST_MAXIMUM) / _LARGEST
    if scale_format is not None:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    return _to_fp8(rows.float() / scales), scales


def write_index_keys(
    self: Any, layer_id: int, loc: torch.Tensor, index_k: torch.Tensor, index_k_scale: torch.Tensor
) -> None:
    """Into the pool's pages of bytes: all keys of a page, then all scales."""
    keys, scales, page_size = _index_planes(self.get_index_k_with_scale_buffer(layer_id))
    page, place = loc.long() // page_size, loc.long() % page_size
    keys[page, place] = index_k.view(torch.uint8)
    scales[page, place] = index_k_scale.view(torch.uint8)


def _index_planes(pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Bytes of keys `[pages, page_size, 128]` and of scales `[pages, page_size, 4]`; the size."""
    page_size = pages.shape[1] // (_GROUP + 4)
    keys, scales = pages.split([page_size * _GROUP, page_size * 4], 1)
    return keys.unflatten(1, (page_size, -1)), scales.unflatten(1, (page_size, -1)), page_size


def pack_latents(
    latents: torch.Tensor, rope: torch.Tensor, group: int = _GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of latents `[n, 1, rank]`, values before scales, and of their RoPE parts."""
    latents, rope = latents.flatten(1), rope.flatten(1)
    groups = latents.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1) / _LARGEST
    values = _to_fp8(groups * (1.0 / scales)[..., None]).flatten(-2)
    packed = torch.cat((values.view(torch.uint8), scales.contiguous().view(torch.uint8)), -1)
    return packed[:, None], rope.bfloat16().contiguous().view(torch.uint8)[:, None]


def write_latents(
    buffer: torch.Tensor, slots: torch.Tensor, latents: torch.Tensor, rope: torch.Tensor
) -> None:
    """Rows of a layer of the pool, `[slots, 1, latent and RoPE part]`."""
    buffer[slots.long()] = torch.cat((latents.flatten(1), rope.flatten(1)), -1)[:, None]


def _to_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_LARGEST, _LARGEST).to(_FP8)


# ---- sequences of a batch ----


class _Sequence(NamedTuple):
    """One of a batch: which of its rows are of this sequence, and where its tokens are.

    Attributes:
        rows: Those of its new tokens.
        slots: Of all its tokens, in the pools.
        first: Position of the first new token.
    """

    rows: slice
    slots: torch.Tensor
    first: int


def _sequences(batch: Any, req_to_token: torch.Tensor, drafts: int) -> Iterator[_Sequence]:
    """`drafts`: how many of each sequence its length does not count."""
    totals, requests = (batch.seq_lens + drafts).tolist(), batch.req_pool_indices.tolist()
    mode = batch.forward_mode
    if mode.is_target_verify():
        each = batch.spec_info.draft_token_num
        news = [each] * len(totals)
        totals = [total + each for total in totals]
    else:
        news = [1] * len(totals) if mode.is_decode_or_idle() else batch.extend_seq_lens.tolist()
    start = 0
    for request, total, new in zip(requests, totals, news, strict=True):
        yield _Sequence(
            slice(start, start + new), req_to_token[request, :total].long(), total - new
        )
        start += new


# ---- the indexer ----


def choose_tokens(
    self: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor:
    """Write index keys of the new tokens; positions that each of them attends to. Scores may be
    equal, most often 0: the first of these tokens are chosen.

    Returns:
        int32 `[n, index_topk]`, filled up with -1.
    """
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    query, key = _queries_and_keys(self, x, q_lora, positions)
    pool = get_token_to_kv_pool()
    written = quantise(key, self.scale_fmt)
    pool.set_index_k_scale_buffer(layer_id, forward_batch.out_cache_loc, *written)
    values, scales = quantise(query, self.scale_fmt)
    gates = torch.nn.functional.linear(x.float(), self.weights_proj.weight.float())
    weights = gates.double() * self.n_heads**-0.5 * scales[..., 0] * self.softmax_scale

    pages = pool.get_index_k_with_scale_buffer(layer_id)
    chosen = torch.full((len(x), self.index_topk), -1, dtype=torch.int32)
    for sequence in get_attn_backend().sequences:
        keys = _index_keys(pages, sequence.slots)
        for row in range(sequence.rows.start, sequence.rows.stop):
            seen = sequence.first + row - sequence.rows.start + 1
            count = min(seen, self.index_topk)
            scores = (values[row].double() @ keys[:seen].t()).relu_()
            best = (weights[row] @ scores).sort(dim=-1, descending=True, stable=True)[1]
            chosen[row, :count] = best[:count].int()
    return chosen


def _queries_and_keys(
    indexer: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As they are quantised, `[n, heads, 128]` and `[n, 128]`. As on a GPU of NVIDIA's, those with
    interleaved RoPE are not turned by a Hadamard matrix unless a variable says so. (SGLang's own
    method gives keys without a dimension of heads to RoPE, which only its kernels take.)"""
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.dsa.dsa_indexer import rotate_activation

    width = indexer.rope_head_dim
    query = indexer.wq_b(q_lora)[0].view(len(x), indexer.n_heads, indexer.head_dim)
    key = indexer.k_norm(indexer.wk(x)[0])[:, None]
    turned = indexer.rotary_emb(positions, query[..., :width], key[..., :width])
    query, key = (
        torch.cat((rope.view_as(rows[..., :width]), rows[..., width:]), -1)
        for rope, rows in zip(turned, (query, key), strict=True)
    )
    if indexer.is_neox_style or envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get():
        query, key = rotate_activation(query), rotate_activation(key)
    return query, key[:, 0].contiguous()


def _index_keys(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys of tokens in these slots, float64 `[n, 128]`."""
    keys, scales, page_size = _index_planes(pages)
    page, place = slots // page_size, slots % page_size
    return keys[page, place].view(_FP8).double() * scales[page, place].view(torch.float32)


# ---- attention ----


def sparse_attention(runner: Any, drafts: int = 0) -> Any:
    """The backend `dsa` of a model runner; of a draft model for the step with so many `drafts`."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    class SparseAttention(AttentionBackend):
        """Queries attend to the latents of the tokens that the indexer chose."""

        def __init__(self, runner: Any):
            super().__init__()
            self.req_to_token_pool = runner.req_to_token_pool
            self.token_to_kv_pool = runner.token_to_kv_pool
            self.kv_cache_dtype = runner.kv_cache_dtype

        def init_forward_metadata(self, forward_batch: Any) -> None:
            """Before all layers, as SGLang's backends do: the scheduler writes its table while a
            forward pass runs."""
            table = self.req_to_token_pool.req_to_token
            self.sequences = list(_sequences(forward_batch, table, drafts))

        def forward_extend(
            self,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            layer: Any,
            forward_batch: Any,
            save_kv_cache: bool = True,
            *,
            q_rope: torch.Tensor,
            k_rope: torch.Tensor,
            topk_indices: torch.Tensor,
        ) -> torch.Tensor:
            if save_kv_cache:
                slots = forward_batch.out_cache_loc
                self.token_to_kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope)
            rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
            query = torch.cat((q.view(len(q), layer.tp_q_head_num, -1), q_rope), -1)
            out = query.new_empty(*query.shape[:2], layer.v_head_dim)
            for sequence in self.sequences:
                latents = _latents(rows, sequence.slots, self.token_to_kv_pool)
                chosen = topk_indices[sequence.rows]
                out[sequence.rows] = _attend(
                    query[sequence.rows], latents, chosen, layer.scaling, layer.v_head_dim
                )
            return out.flatten(1)

        forward_decode = forward_extend

    return SparseAttention(runner)


class DraftAttention:
    """Backends of the steps in which a draft model decodes, all but the last of `steps`."""

    def __init__(self, runner: Any, steps: int):
        self.attn_backends = [sparse_attention(runner, 1 + step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def draft_attention(made: Any) -> tuple[str, DraftAttention]:
    """As SGLang's factory `made` asks for it; one draft at a time."""
    return "dsa", DraftAttention(made.draft_model_runner, made.speculative_num_steps)


def _latents(rows: torch.Tensor, slots: torch.Tensor, pool: Any) -> torch.Tensor:
    """Latents with their RoPE parts as attention sees them, `[n, rank + rope]`."""
    found = rows[slots, 0]
    if not pool.dsa_kv_cache_store_fp8:
        return found
    rank, parts = pool.kv_lora_rank, found.view(torch.uint8)
    end = rank + rank // _GROUP * 4
    scales = parts[:, rank:end].contiguous().view(torch.float32)
    values = parts[:, :rank].contiguous().view(_FP8).float().unflatten(-1, (-1, _GROUP))
    rope = parts[:, end:].contiguous().view(torch.bfloat16).float()
    return torch.cat(((values * scales[..., None]).flatten(-2), rope), -1)


def _attend(
    query: torch.Tensor, latents: torch.Tensor, chosen: torch.Tensor, scale: float, width: int
) -> torch.Tensor:
    """`[n, heads, size]`, `[m, size]` and positions `[n, k]` give `[n, heads, width]`."""
    kind, parts = torch.float64 if reordering.exact() else torch.float32, []
    for start in range(0, len(query), _QUERY_ROWS):
        rows = slice(start, start + _QUERY_ROWS)
        keys = latents[chosen[rows].clamp_min(0).long()].to(kind)
        scores = query[rows].to(kind) @ keys.transpose(1, 2) * scale
        scores.masked_fill_((chosen[rows] < 0)[:, None], -torch.inf)
        parts.append((torch.softmax(scores, -1) @ keys[..., :width]).to(query.dtype))
    return torch.cat(parts)


# ---- index pages between host memory and device ----


def load_index_pages(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    if not is_draft and not self._is_device_layer_owned(device_pool, layer_id):
        return
    host, device = self._get_indexer_page_indices(host_indices, device_indices)
    layer = self._draft_host_layer(layer_id) if is_draft else self._host_layer_index(layer_id)
    target = device_pool.index_k_with_scale_buffer[0 if is_draft else layer_id]
    target[device] = _host_layer(self, layer)[host]


def back_up_index_pages(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    host, device = self._get_indexer_page_indices(host_indices, device_indices)
    for layer, source in enumerate(self.packed_device_index_buffers):
        _host_layer(self, layer)[host] = source[device]


def _host_layer(pool: Any, layer: int) -> torch.Tensor:
    """Index pages of a layer in host memory, `[pages, bytes]`."""
    buffer = pool.index_k_with_scale_buffer
    return buffer[layer] if pool.layout == "layer_first" else buffer[:, layer, 0]
