"""Check at start-up: own pages of K and V bring back what the pool held. It compiles the kernels
that copy them: what was not tried at the start is not trusted later."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hcache_backend.format.page import PageLayout
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.layers import RestoredLayer
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.start.agreement import Refused
from hcache_backend.start.page_plan import PagePlan
from hcache_backend.streams import host_tensor

_FROM, _TO, _HOST = (1, 2), (4, 3), (1, 0)  # pages of the pool, and of host memory between them


def check_copies(plan: PagePlan) -> None:
    """Round-trip two pool pages through host memory, in the layers stored as K and V.

    With a codec, the first must decode to the codec's reference. The second has random bits, and
    must come back if the codec says that it fits. Repeated for each variant of the layout. Nothing
    may be served yet; the pool gets its content back. Raises Refused for wrong or missing pages, or
    if the codec does not hold normally distributed values.
    """
    for tried in plan.layout.variants:
        _check_copies(plan.kvcache, tried, plan.kv)


def _check_copies(kvcache: Any, layout: PageLayout, kv: KVSegments) -> None:
    size, device = layout.page_size, kvcache.k_buffer[0].device
    if len(kvcache.k_buffer[0]) <= size * max(*_FROM, *_TO):
        raise Refused("the KV pool is too small to try copies of its pages")
    slots, others = (
        torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages]).to(device)
        for pages in (_FROM, _TO)
    )
    memory = host_tensor((len(_HOST), layout.page_bytes), torch.uint8, device).zero_()
    layout.divide(memory.numpy())
    planes = [
        buffers[layer] for buffers in (kvcache.k_buffer, kvcache.v_buffer) for layer in kv.layers
    ]
    buffers = [plane.view(torch.uint8) for plane in planes]
    touched = torch.cat((slots, others))
    before = [buffer[touched] for buffer in buffers]
    fits = None
    for buffer in buffers:
        buffer[slots] = torch.randint_like(buffer[slots], 1, 256)
        buffer[others] = 0
    try:
        first, stored = slots[:size], len(kv.layers)
        if kv.codec != "none":
            for plane in planes:
                plane[first] = torch.randn_like(plane[first])
        wanted = [buffer[slots] for buffer in buffers]
        if kv.codec != "none":
            by_layer = [[planes[n][first], planes[n + stored][first]] for n in range(stored)]
            for number, back in enumerate(kv.through_codec(layout, by_layer)[0]):
                for part, plane in enumerate(back):
                    wanted[number + part * stored][:size] = plane.view(torch.uint8).to(device)
        pages = torch.tensor(_HOST, device="cpu" if kv.by_header else device)
        fits = kv.save(layout, memory, pages, slots)
        others_stay = RestoredLayer("kv", copy=lambda *_: None)
        restored = [others_stay] * len(layout.segment_bytes)
        for layer in kv.layers:
            restored[layer] = kv.restored_layer(layer)
        pipeline = RestorePipeline(memory, layout, restored, len(slots), device)
        pipeline.start(np.array(_HOST), others).synchronize()  # nothing is served yet
        if fits is not None:
            unfit = (~fits).repeat_interleave(size, 1).repeat(2, 1)
            for buffer, held, at in zip(buffers, wanted, unfit, strict=True):
                held[at] = buffer[others[at]]  # any content will do
        wrong = [
            not torch.equal(buffer[others], held)
            for buffer, held in zip(buffers, wanted, strict=True)
        ]
    except Exception as error:  # a kernel that cannot be compiled, or memory that is not there
        raise Refused(f"K and V cannot be copied: {type(error).__name__}: {error}") from None
    finally:
        for buffer, held in zip(buffers, before, strict=True):
            buffer[touched] = held
    if any(wrong):
        layer = kv.layers[wrong.index(True) % stored]
        raise Refused(f"K or V of layer {layer} come back from host memory as something else")
    if fits is not None and not bool(fits[:, 0].all()):
        layer = kv.layers[fits[:, 0].tolist().index(False)]
        raise Refused(
            f"codec {kv.codec!r} does not hold normally distributed K and V of layer {layer}"
        )
