"""The check in service: is a backed-up page what the model's K and V say?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hcache_backend.engine import metrics
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.startup.self_check import layer_problem
from hcache_backend.page import PageLayout
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import Exchange
from hcache_kernels.codecs import Codec


@dataclass(frozen=True)
class PageCheck:
    """Compares a page with the pool.

    Attributes:
        layout: Layout of a page.
        codec: How its hidden states are encoded.
        hidden_layers: Layers that are stored as hidden states.
        kv: Layers that are stored as K and V.
        projector: Makes K and V of hidden states.
        kvcache: The KV pool.
        exchange: Between the ranks that share the tokens of every page; None: pages are whole.
    """

    layout: PageLayout
    codec: Codec
    hidden_layers: Sequence[AttentionLayer]
    kv: KVSegments
    projector: Projector
    kvcache: Any
    exchange: Exchange | None

    def __call__(self, page: torch.Tensor, slots: torch.Tensor) -> str | None:
        """Why ``page`` is not what the pool says, or None. All ranks must call it.

        Args:
            page: uint8 ``[page_bytes]``, on the CPU; no row of it was lost.
            slots: Slots of its tokens, int64 ``[page_size]``, on the device.

        Raises:
            ExchangeFailed: Another rank has no page to show.
        """
        header, device = page.numpy(), slots.device
        size = self.layout.page_size
        positions = torch.from_numpy(self.layout.positions(header)).to(device, torch.int64)
        metrics.count_tokens("checked", size)
        problems = []
        for layer in self.hidden_layers:
            segment = page[self.layout.segment(layer.index)]
            if self.exchange is not None:
                segment = self.exchange.whole(segment)
            encoded = segment.view(size, -1).to(device)
            problem = layer_problem(
                layer,
                self.codec.decode(encoded),
                positions,
                slots,
                self.projector,
                self.kvcache,
                self.codec.name,
            )
            if problem is not None:  # go on: some attention modules talk to the other ranks
                problems.append(problem)
        other = self.kv.differs(self.layout, page, slots)
        if other is not None:
            problems.append(f"stored K and V of layer {other} are not those of the pool")
        return problems[0] if problems else None
