"""K and V of any architecture: run the model's own attention module and stop before attention.

The module is called on the captured hidden states with a :class:`ProjectionBatch` as the engine's
batch. A hook makes the engine's attention object raise :class:`ProjectionReached` for it, with K
and V after norms, biases and RoPE. Attention, output projection and collectives do not run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hcache_backend.projection.attention import AttentionLayer


class ProjectionReached(Exception):
    """Carries K and V out of the attention module, as ``args``. Never escapes this module."""


@dataclass(frozen=True)
class ProjectionBatch:
    """Stands in for the engine's batch; it marks a call that only wants K and V.

    It has no memory pool, so a model that stores K and V inside a fused kernel cannot do so here.
    ``forward_mode`` is the engine's value for prefill, which some models look at.
    """

    forward_mode: object


class ProjectionFailed(RuntimeError):
    """The attention module gave no K and V."""


@torch.no_grad()
def project_with_module(
    layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor, batch: ProjectionBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, by the model's own attention module (paper section 3.1).

    ``hidden`` is the input of the QKV projection, ``[n, hidden]``; ``positions`` are int64 ``[n]``.
    K is ``[n, kv_heads, head_dim]`` and V ``[n, kv_heads, v_head_dim]``, in the model's type.

    Raises:
        ProjectionFailed: The module ended without reaching attention, or without K and V.
    """
    try:
        layer.module(**layer.call.arguments(hidden, positions, batch))
    except ProjectionReached as reached:
        k, v = reached.args
    else:
        raise ProjectionFailed(f"{layer.name} did not call attention")
    if k is None or v is None:
        raise ProjectionFailed(f"{layer.name} makes no K and V of its own")
    return k.reshape(len(hidden), -1, k.shape[-1]), v.reshape(len(hidden), -1, v.shape[-1])
