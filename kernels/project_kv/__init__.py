"""K and V of one layer from its hidden states, into the paged pool: the fastest way on the device.

On a GPU that is one of two ways on Triton (``ways.py``), on anything else torch (``reference.py``).
Torch also serves what no kernel can: e4m3 pools before compute capability 8.9, GPUs before 8.0, and
norms over more than 16384 numbers of K.
"""

import torch

from .reference import finish_keys, project_kv_reference
from .spec import (
    KeyNorm,
    KVPool,
    KVProjection,
    ProjectionCall,
    Rotary,
    Rounding,
    check_call,
    check_projection,
    check_rows,
    kind_of,
)
from .ways import Way, choose, ways_in_use

__all__ = [
    "KVPool", "KVProjection", "KeyNorm", "ProjectionCall", "Rotary", "Rounding", "Way",
    "check_projection", "check_rows", "compute_kv", "finish_keys", "project_kv", "ways_in_use",
]  # fmt: skip


def project_kv(
    call: ProjectionCall, way: Way | None = None, product: torch.Tensor | None = None
) -> None:
    """Write K and V of ``n`` tokens into their slots of the pool (paper section 3.1), by ``way`` or
    the fastest one. ``product``: memory for what a way multiplies, in the type of hidden states,
    ``[n * 2 * kv_heads * head_dim]`` or more; None: new memory. A ValueError says which arguments
    do not fit together; then nothing was written. Values of positions and slots are checked only on
    the CPU (:func:`check_rows`)."""
    check_call(call)
    n, device = len(call.hidden), call.hidden.device
    if device.type != "cuda":
        check_rows(call)
    if not n:
        return
    if way is None and device.type == "cuda":
        way = choose(kind_of(call.projection), call.pool.k.dtype, n, device)
    if way is None:
        project_kv_reference(call)
        return
    with torch.cuda.device_of(call.hidden):
        way.run(call, product)


def compute_kv(
    hidden: torch.Tensor, positions: torch.Tensor, projection: KVProjection
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``n`` tokens, ``[n, kv_heads, head_dim]`` in the type of ``hidden``, computed
    exactly as :func:`project_kv` does; a ValueError as there."""
    shape = (len(hidden), projection.kv_heads, projection.head_dim)
    pool = KVPool(hidden.new_empty(shape), hidden.new_empty(shape))
    slots = torch.arange(len(hidden), device=hidden.device)
    project_kv(ProjectionCall(hidden, positions, slots, projection, pool))
    return pool.k, pool.v
