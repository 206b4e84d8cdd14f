"""Attention in PyTorch behind SGLang's own route for CPUs, `--attention-backend intel_amx`.

`sgl_kernel` has these operators for processors with AMX; here they run on every processor. Unlike
SGLang's `torch_native`, they compute new tokens only, read the pool of sliding windows by its own
slots, and know sinks, capped scores, token trees and FP8 caches. Outputs of plain decoders are
those of `torch_native` to the last bit, except for single new tokens.

With `HCACHE_CPU_REORDER_SUMS=1` the order of sums depends on the number of rows, and with
`HCACHE_CPU_EXACT_SUMS=1` they are float64: see `reordering`.
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from . import reordering

_QUERY_ROWS = 512
"""Queries that attend at once behind a prefix: the first of them skip the keys of later ones."""


def install() -> None:
    """Offer the operators and let SGLang take this route. Called before the arguments are read."""
    from sglang.srt.layers.attention.intel_amx_backend import IntelAMXAttnBackend
    from sglang.srt.mem_cache import allocation
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()
    torch.ops.sgl_kernel.extend_attention_cpu = extend_attention
    torch.ops.sgl_kernel.decode_attention_cpu = decode_attention
    allocation.get_last_loc_triton = allocation.get_last_loc_torch
    # Otherwise prompts without a prefix attend by expanded K and V, and the pool has latent ones.
    AttentionBackendRegistry.register("intel_amx", lambda *_: AttnForwardMethod.MLA)
    if not hasattr(IntelAMXAttnBackend, "_swa_kv_indices"):
        _remember_window_pools(IntelAMXAttnBackend)


_window_pools: dict[int, Any] = {}
"""By the address of a layer's keys, the pool that translates slots to those of its windows."""


def _remember_window_pools(backend: Any) -> None:
    """SGLang before 0.5.23 gives window layers the slots of the full pool."""
    original = backend.__init__

    def init(self: Any, runner: Any) -> None:
        original(self, runner)
        if self.use_sliding_window_kv_pool:
            for keys in self.token_to_kv_pool.swa_kv_pool.k_buffer:
                _window_pools[keys.data_ptr()] = self.token_to_kv_pool

    backend.__init__ = init


class _Softmax(NamedTuple):
    """What scores become weights by; the same for all sequences of a call.

    Attributes:
        scale: Scores are multiplied by it.
        cap: Scores are bounded by it, smoothly; 0: they are not.
        window: How many tokens a query sees, itself included; 0: all before it.
        sinks: Scores of a token without a value, `[heads]`.
    """

    scale: float
    cap: float
    window: int
    sinks: torch.Tensor | None

    @property
    def special(self) -> bool:
        """Whether the kernel's own causal mask is not enough."""
        return self.cap > 0 or self.window > 0


class _Held(NamedTuple):
    """K and V of a layer in the pool, `[slots, kv_heads, size]` each, and scales of FP8 ones."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float
    v_scale: float

    def of_tokens(
        self, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens in these slots of the full pool, `[kv_heads, n, size]` each."""
        own = _slots(slots, self.k)
        return _fetch(self.k, own, self.k_scale, dtype), _fetch(self.v, own, self.v_scale, dtype)


def extend_attention(
    query: torch.Tensor,
    _key: torch.Tensor | None,
    _value: torch.Tensor | None,
    output: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    _max_extend_len: int,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
    causal: bool,
) -> None:
    """New tokens attend to all tokens of their sequences, whose K and V the pool holds.

    Args:
        query: `[new tokens, heads, head_size]`, one sequence after the other.
        output: `[new tokens, heads, value_size]`, written.
        k_buffer: `[slots, kv_heads, head_size]`; `v_buffer` `[slots, kv_heads, value_size]`.
        req_to_token: Slots of each request's tokens, `[requests, tokens]`.
        tree_mask: What each new token sees, sequence after sequence: of the new tokens, or of all.

    Raises:
        NotImplementedError: The model has an encoder.
    """
    _refuse_encoders(is_cross_attention, encoder_lens)
    held = _Held(k_buffer, v_buffer, k_scale, v_scale)
    softmax, tree_start = _Softmax(scaling, logit_cap, window, sinks), 0
    of_new_only = tree_mask is not None and tree_mask.numel() == int((extend_seq_lens**2).sum())
    for request, total, new, start in zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    ):
        tree = None
        if tree_mask is not None:
            width = new if of_new_only else total
            tree = tree_mask[tree_start : tree_start + new * width].view(new, width).bool()
            tree = pad(tree, (total - width, 0), value=True)
            tree_start += new * width
        rows = slice(start, start + new)
        key, value = held.of_tokens(req_to_token[request, :total], query.dtype)
        output[rows] = _attend(query[rows], key, value, softmax, causal=causal, tree=tree)


def decode_attention(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    k_scale: float,
    v_scale: float,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out_cache_loc: torch.Tensor,
    _attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    logit_cap: float,
    is_cross_attention: bool,
    window: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """One new token of each sequence: write its K and V, unless they are written, and attend.

    As in `extend_attention`; `key`, `value` and `out_cache_loc` are of the new tokens.
    """
    _refuse_encoders(is_cross_attention, encoder_lens)
    held = _Held(k_buffer, v_buffer, k_scale, v_scale)
    softmax = _Softmax(scaling, logit_cap, window, sinks)
    if key is not None and value is not None:
        slots = _slots(out_cache_loc, k_buffer)
        k_buffer[slots] = key.view(-1, *k_buffer.shape[1:]).to(k_buffer.dtype)
        if v_buffer.data_ptr() != k_buffer.data_ptr():  # otherwise V is a part of the latent K
            v_buffer[slots] = value.view(-1, *v_buffer.shape[1:]).to(v_buffer.dtype)
    for row, (request, total) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        keys, values = held.of_tokens(req_to_token[request, :total], query.dtype)
        rows = slice(row, row + 1)
        output[rows] = _attend(query[rows], keys, values, softmax, causal=True)


def _refuse_encoders(is_cross_attention: bool, encoder_lens: torch.Tensor | None) -> None:
    if is_cross_attention or encoder_lens is not None:
        raise NotImplementedError("the CPU engine's attention is for models without an encoder")


def _slots(slots: torch.Tensor, k_buffer: torch.Tensor) -> torch.Tensor:
    """Slots of the full pool as those of the layer's own, `[n]`."""
    pool = _window_pools.get(k_buffer.data_ptr())
    return slots if pool is None else pool.translate_loc_from_full_to_swa(slots)


def _fetch(
    buffer: torch.Tensor, slots: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """What the pool holds in `slots`, `[heads, n, size]`."""
    rows = buffer[slots].movedim(0, 1)
    return (rows.float() * scale).to(dtype) if buffer.dtype.itemsize == 1 else rows.to(dtype)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: _Softmax,
    *,
    causal: bool,
    tree: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the last `n` of `m` tokens.

    `[n, heads, size]`, `[kv_heads, m, size]`, `[kv_heads, m, value_size]` and perhaps a mask
    `[n, m]` give `[n, heads, value_size]`.
    """
    new, total, splits = len(query), key.shape[1], reordering.splits(len(query))
    if reordering.exact():
        query, key, value = query.double(), key.double(), value.double()
    query, step, parts = query.movedim(0, 1), _QUERY_ROWS, []
    # Without a prefix the kernel needs no mask, which would take a sixth of its time.
    square = causal and new == total and tree is None and not (splits or softmax.special)
    if square:
        step = new
    for start in range(0, new, step):
        stop = min(start + step, new)
        end = total - new + stop if causal else total
        seen = None if tree is None else tree[start:stop, :end]
        if causal and not square:
            seen = _before(stop - start, end, softmax.window, seen)
        of_block = query[:, start:stop], key[:, :end], value[:, :end], softmax, seen
        found, sums = _in_parts(splits, *of_block) if splits else _weigh(*of_block, square=square)
        if softmax.sinks is not None:
            found = found * torch.sigmoid(sums - softmax.sinks.float()[:, None])[..., None]
        parts.append(found)
    return torch.cat(parts, 1).movedim(0, 1)


def _before(rows: int, end: int, window: int, tree: torch.Tensor | None) -> torch.Tensor | None:
    """Which of `end` tokens the last `rows` of them see, `[rows, end]`; None: each sees all."""
    if rows == 1 and not 0 < window < end:
        return tree
    seen = torch.ones(rows, end, dtype=torch.bool).tril_(end - rows)
    if window > 0:
        seen.triu_(end - rows - window + 1)
    return seen if tree is None else seen & tree


def _weigh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: _Softmax,
    seen: torch.Tensor | None,
    *,
    square: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted means of values, `[heads, n, value_size]`, and logarithms of the sums of weights.

    `seen` is a mask `[n, m]`; `square`: the kernel's own one, where `n` is `m`.
    """
    heads, rows, size = query.shape
    if rows == 1:  # heads that share K and V are rows of one product
        query = query.reshape(len(key), -1, size)
        seen = None if seen is None else seen.expand(query.shape[1], -1)
    mask = None
    if seen is not None:
        mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
    if softmax.cap > 0:
        found, sums = _capped(query, key, value, softmax, mask)
    else:
        found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[None],
            key[None],
            pad(value, (0, size - value.shape[-1]))[None],  # those of latent K are narrower
            0.0,
            square,
            attn_mask=mask,
            scale=softmax.scale,
        )
    return found.reshape(heads, rows, -1)[..., : value.shape[-1]], sums.reshape(heads, rows)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: _Softmax,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the kernel, which knows no cap."""
    each = len(query) // len(key)
    key, value = (part.float().repeat_interleave(each, 0) for part in (key, value))
    scores = query.float() @ key.transpose(1, 2) * softmax.scale
    scores = torch.tanh(scores / softmax.cap) * softmax.cap
    if mask is not None:
        scores = scores + mask.float()
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


def _in_parts(
    splits: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax: _Softmax,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_weigh`, of `splits` parts of the keys one by one, put together in float32."""
    query, key, value = query.float(), key.float(), value.float()
    means, sums = [], []
    for columns in torch.arange(key.shape[1]).chunk(splits):
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        visible = None if seen is None else seen[:, part]
        mean, weights = _weigh(query, key[:, part], value[:, part], softmax, visible)
        if visible is not None:  # of nothing there is no mean
            blind = ~visible.any(1)
            mean = mean.masked_fill(blind[:, None], 0)
            weights = weights.masked_fill(blind, -torch.inf)
        means.append(mean)
        sums.append(weights)
    total = torch.logsumexp(torch.stack(sums), 0)
    weighted = (m * torch.exp(s - total)[..., None] for m, s in zip(means, sums, strict=True))
    return sum(weighted, torch.zeros(())), total
