"""Layers in PyTorch that keep a state instead of K and V: gated delta nets (Qwen3-Next, Qwen3.5)
and short convolutions (LFM2).

A state is read and written in its pool, one step for each token. Host copies of states and the
checkpoints of states within a prefill are those of SGLang's pools.
"""

import sys
import types
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

_CHUNK = 64
"""A prefill leaves the state before each chunk of this many tokens, as the kernel does."""

_OPERATORS = "sgl_kernel.mamba"


def name_operators() -> None:
    """Put the operators where Qwen's models look them up when they are imported."""
    operators = types.ModuleType(_OPERATORS)
    vars(operators).update(
        causal_conv1d_fn_cpu=convolve,
        causal_conv1d_update_cpu=convolve_next,
        chunk_gated_delta_rule_cpu=prefill,
    )
    sys.modules[_OPERATORS] = operators
    vars(torch.ops.sgl_kernel).update(
        fused_gdn_gating_cpu=gates,
        fused_sigmoid_gating_delta_rule_update_cpu=decode,
        fused_sigmoid_mul_cpu=gate_in_place,
        fused_qk_gemma_rmsnorm_cpu=normed_heads,
        fused_qk_gemma_rmsnorm_with_gate_cpu=normed_heads_and_gate,
        fused_qkvzba_split_reshape_cat_contiguous_cpu=split,
    )


def install() -> None:
    """Put all in their places. Models without such layers do not call them."""
    name_operators()  # what is imported below imports all models
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.kernels.ops.mamba import mamba_state_scatter_triton
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.mamba import causal_conv1d
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    causal_conv1d._causal_conv1d_fn_triton = convolve
    causal_conv1d._causal_conv1d_update_triton = convolve_next
    fused_norm_gate.layer_norm_gated_fwd = gated_norm
    layernorm_gated._layer_norm_fwd = norm_beside_gate
    for module in (mamba_state_scatter_triton, hybrid_linear_attn_backend):
        module.track_mamba_states_if_needed = track
        module.track_mamba_states_all_layers = track_layers
    mamba_hook.validate_mamba_extra_buffer = lambda *_, **_options: None  # it asks for a GPU
    common._cuda_host_register = lambda *_, **_options: None
    MambaPoolHost.load_to_device_per_layer = load
    MambaPoolHost.backup_from_device_all_layer = back_up


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    conv_states: Any = None,
    query_start_loc: Any = None,
    seq_lens_cpu: Any = None,
    cache_indices: Any = None,
    has_initial_state: Any = None,
    activation: str | None = "silu",
    *_: Any,
    **_options: Any,
) -> torch.Tensor:
    """Depthwise convolution over the tokens of each sequence; `x` is `[channels, n]`."""
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            state = conv_states[int(cache_indices[number])]
            known = has_initial_state is not None and bool(has_initial_state[number])
            before = state if known else torch.zeros_like(state)
            out[:, start:end] = _convolved(x[:, start:end], weight, bias, before, state, activation)
    return out


def convolve_next(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *_: Any,
    conv_state_indices: Any = None,
    **_options: Any,
) -> torch.Tensor:
    """One token of each sequence; `x` is `[n, channels]`."""
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            state = conv_state[slot]
            out[number] = _convolved(x[number, :, None], weight, bias, state, state, activation)[
                :, 0
            ]
    return out


def _convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    before: torch.Tensor,
    state: torch.Tensor,
    activation: str | None,
) -> torch.Tensor:
    """Of one sequence; its last inputs go to `state`, `[channels, width - 1]` or wider."""
    width = weight.shape[1] - 1
    rows = torch.cat([before[:, -width:].to(x.dtype), x], 1)
    found = functional.conv1d(rows[None], weight[:, None].to(x.dtype), bias, groups=len(x))[0]
    state[:, -width:] = rows[:, -width:].to(state.dtype)
    return functional.silu(found) if activation in ("silu", "swish") else found


def gates(
    a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm of the decay and the strength of each write, `[1, n, heads]`."""
    decay = -torch.exp(a_log.float()) * functional.softplus(a.float() + dt_bias.float())
    return decay[None], torch.sigmoid(b.float()).to(b.dtype)[None]


def gate_in_place(x: torch.Tensor, gate: torch.Tensor) -> None:
    x.mul_(torch.sigmoid(gate.float()).view_as(x).to(x.dtype))


def normed_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    size: int,
) -> tuple[torch.Tensor, ...]:
    """A norm on each head of q and k, `[n, heads * size]`; weights are offsets from one."""
    found = []
    for rows, weight in ((q, q_weight), (k, k_weight)):
        heads = rows.reshape(-1, size).float()
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
        found.append((heads * (1 + weight.float())).to(rows.dtype).view(rows.shape))
    return tuple(found)


def normed_heads_and_gate(
    q_and_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    size: int,
    heads: int,
) -> tuple[torch.Tensor, ...]:
    """The same, where each head's gate follows its q, `[n, heads * 2 * size]`; and the gates."""
    q, gate = q_and_gate.view(-1, heads, 2 * size).split(size, 2)
    found = normed_heads(q.reshape(len(q), -1), k, q_weight, k_weight, eps, size)
    return *found, gate.reshape(len(q), -1)


def split(
    qkvz: torch.Tensor,
    ba: torch.Tensor,
    key_heads: int,
    value_heads: int,
    key_size: int,
    value_size: int,
) -> tuple[torch.Tensor, ...]:
    """q, k and v in one, gates `[n, value heads, value size]`, and b and a, `[n, value heads]`."""
    width = value_heads * value_size
    qkv, z = qkvz.split([2 * key_heads * key_size + width, width], 1)
    b, a = ba.split(value_heads, 1)
    z = z.reshape(-1, value_heads, value_size)
    return qkv.contiguous(), z, b.contiguous(), a.contiguous()


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Any = None,
    initial_state_indices: Any = None,
    cu_seqlens: Any = None,
    *_: Any,
    **_options: Any,
) -> tuple[torch.Tensor, None, torch.Tensor | None]:
    """All tokens of each sequence; also the states before each chunk, `[1, chunks, ...]`."""
    out, starts = torch.empty_like(v), cu_seqlens.tolist()
    checkpoints: list[torch.Tensor] = []
    for number, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            state = initial_state[int(initial_state_indices[number])]
            some = [part[0, start:end] for part in (q, k, v, g, beta)]
            out[0, start:end] = _steps(some, state, checkpoints).to(out.dtype)
    return out, None, torch.stack(checkpoints)[None] if checkpoints else None


def decode(
    A_log: Any = None,
    dt_bias: Any = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    a: Any = None,
    b: Any = None,
    initial_state_source: Any = None,
    initial_state_indices: Any = None,
    cu_seqlens: Any = None,
    **_options: Any,
) -> torch.Tensor:
    """The next tokens of each sequence."""
    out = torch.empty_like(v)
    q, k, v, flat = (part.reshape(-1, *part.shape[-2:]) for part in (q, k, v, out))
    g, beta = gates(A_log, a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]), dt_bias)
    starts = cu_seqlens.tolist()
    for number, (start, end) in enumerate(pairwise(starts)):
        slot = int(initial_state_indices[number])
        if slot >= 0 and start < end:
            some = [part[start:end] for part in (q, k, v, g[0], beta[0])]
            flat[start:end] = _steps(some, initial_state_source[slot], []).to(out.dtype)
    return out


def _steps(
    parts: Sequence[torch.Tensor], state: torch.Tensor, checkpoints: list[torch.Tensor]
) -> torch.Tensor:
    """The gated delta rule, token by token; `state` is `[value heads, value size, key size]`.

    `parts` are q, k, v, the logarithms of decays, and strengths of one sequence.
    """
    q, k, v, g, beta = parts
    repeats, size = v.shape[1] // q.shape[1], q.shape[-1]
    q, k = (functional.normalize(rows.float(), dim=-1, eps=1e-6) for rows in (q, k))
    q, k = (rows.repeat_interleave(repeats, 1) for rows in (q * size**-0.5, k))
    now, values = state.float(), v.float()
    out = torch.empty_like(values)[..., None]
    decays, strengths = (each[..., None, None] for each in (g.float().exp(), beta.float()))
    tokens = (out, q[..., None], k[..., None], k[:, :, None], values[..., None], decays, strengths)
    for token, (read, query, key, row, value, decay, strength) in enumerate(
        zip(*tokens, strict=True)
    ):
        if token % _CHUNK == 0:
            checkpoints.append(now)
        now = now * decay
        change = torch.baddbmm(value, now, key, alpha=-1) * strength
        now = torch.baddbmm(now, change, row)
        torch.bmm(now, query, out=read)
    state.copy_(now)
    return out[..., 0]


def gated_norm(
    x: torch.Tensor,
    g: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
    *_: Any,
    is_rms_norm: bool = False,
    **_options: Any,
) -> tuple[torch.Tensor, None, None, torch.Tensor]:
    rows = x.float() if residual is None else x.float() + residual.float()
    centred = rows if is_rms_norm else rows - rows.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normed = normed if weight is None else normed * weight.float()
    normed = normed if bias is None else normed + bias.float()
    gate = torch.sigmoid(g.float())
    gate = gate * g.float() if activation in ("swish", "silu") else gate
    return (normed * gate).to(x.dtype), None, None, x


def norm_beside_gate(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    z: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    **_options: Any,
) -> tuple[torch.Tensor, None, None]:
    """A norm of groups of values, with a gate before or behind it; `x` is `[n, size]`."""
    rows = x.float()
    gate = 1.0 if z is None else functional.silu(z.float())
    rows = rows if norm_before_gate else rows * gate
    groups = rows.unflatten(-1, (-1, group_size or rows.shape[-1]))
    groups = groups if is_rms_norm else groups - groups.mean(-1, keepdim=True)
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = normed.flatten(-2) * weight.float()
    normed = normed if bias is None else normed + bias.float()
    found = (normed * gate if norm_before_gate else normed).to(x.dtype)
    return found if out is None else out.copy_(found), None, None


def track(
    conv: Any, states: Any, source: Any, mask: Any, target: Any, size: int, *_: Any, **_options: Any
) -> None:
    """Copy the states of some sequences of a batch to where they are kept."""
    for number in range(size):
        if bool(mask[number]):
            to, slot = int(target[number]), int(source[number])
            conv[to], states[to] = conv[slot], states[slot]


def track_layers(conv: Any, states: Any, *others: Any, **options: Any) -> None:
    for layer in range(len(conv)):
        track(conv[layer], states[layer], *others, **options)


def load(
    self: Any, device_pool: Any, host: Any, device: Any, layer_id: int, *_: Any, **_options: Any
) -> None:
    for held, pool in _pools(self, device_pool):
        rows = held[layer_id][host] if self.layout == "layer_first" else held[host, layer_id]
        pool[layer_id][device] = rows.reshape(pool[layer_id][device].shape).to(pool.dtype)


def back_up(self: Any, device_pool: Any, host: Any, device: Any, *_: Any, **_options: Any) -> None:
    for held, pool in _pools(self, device_pool):
        for layer in range(self.num_mamba_layers):
            rows = pool[layer][device]
            if self.layout == "layer_first":
                held[layer][host] = rows.reshape(held[layer][host].shape)
            else:
                held[host, layer] = rows.reshape(held[host, layer].shape)


def _pools(host_pool: Any, device_pool: Any) -> list[tuple[Any, Any]]:
    cache = device_pool.mamba_cache
    pairs = [(host_pool.temporal_buffer, cache.temporal)]
    pairs += zip(host_pool.conv_buffer, cache.conv, strict=True)
    return [(held, pool) for held, pool in pairs if held is not None and held.numel()]
