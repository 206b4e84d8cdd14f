"""``project_kv``: K and V of one layer from its hidden states, by the best way for the device."""

from __future__ import annotations

import torch

from .checks import check_call, check_rows
from .reference import project_kv_reference
from .spec import KVPool, KVProjection


def project_kv(
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    projection: KVProjection,
    pool: KVPool,
) -> None:
    """Write K and V of ``n`` tokens into their slots of the pool (paper section 3.1).

    Slots may come in any order; slots that are not named stay untouched. A slot named twice gets
    either row. Values beyond the range of an fp8 pool are stored as its largest.

    Args:
        hidden: Input of the QKV projection, ``[n, hidden]``, float32, float16 or bfloat16.
        positions: Positions of the tokens, int32 or int64 ``[n]``.
        slots: Where each token goes, int32 or int64 ``[n]``. The values are checked here only
            when they are on the CPU; see :func:`check_rows`.
        projection: The layer.
        pool: The layer's pool.

    Raises:
        ValueError: The arguments do not fit together. Nothing was written.
    """
    check_call(hidden, positions, slots, projection, pool)
    if not slots.is_cuda:
        check_rows(positions, slots, projection, pool)
    if len(hidden):
        project_kv_reference(hidden, positions, slots, projection, pool)


def compute_kv(
    hidden: torch.Tensor, positions: torch.Tensor, projection: KVProjection
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``n`` tokens, computed exactly as :func:`project_kv` does.

    Returns:
        K and V ``[n, kv_heads, head_dim]`` in the type of ``hidden``.

    Raises:
        ValueError: The arguments do not fit together.
    """
    shape = (len(hidden), projection.kv_heads, projection.head_dim)
    pool = KVPool(hidden.new_empty(shape), hidden.new_empty(shape))
    slots = torch.arange(len(hidden), device=hidden.device)
    project_kv(hidden, positions, slots, projection, pool)
    return pool.k, pool.v
