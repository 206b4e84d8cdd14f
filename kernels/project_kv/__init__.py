"""K and V of one layer from its hidden states, into the paged pool: the fastest way on the device.

On a GPU that is one of two ways on Triton (``ways.py``, ``choice.py``), on anything else torch
(``reference.py``). Torch also serves what no kernel can: e4m3 pools before compute capability 8.9,
GPUs before 8.0, and norms over more than 16384 numbers of K.
"""

from __future__ import annotations

import torch

from .choice import choose
from .reference import finish_keys, project_kv_reference
from .spec import (
    KeyNorm,
    KVPool,
    KVProjection,
    Rotary,
    check_call,
    check_projection,
    check_rows,
    kind_of,
)

__all__ = [
    "KVPool",
    "KVProjection",
    "KeyNorm",
    "Rotary",
    "check_projection",
    "check_rows",
    "compute_kv",
    "finish_keys",
    "project_kv",
]


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
    if not hidden.is_cuda:
        check_rows(positions, slots, projection, pool)
    if not len(hidden):
        return
    way = None
    if hidden.is_cuda:
        way = choose(kind_of(projection), pool.k.dtype, len(hidden), hidden.device)
    if way is None:
        project_kv_reference(hidden, positions, slots, projection, pool)
        return
    with torch.cuda.device(hidden.device):
        way.run(hidden, positions, slots, projection, pool)


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
