"""How the own pages of a server are divided, and what stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.format.units import Shard
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Restore
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.restore.exchange import Exchange
from hcache_backend.restore.layers import MOST_EXCHANGES, split_evenly
from hcache_backend.restore.ring import ring_bytes
from hcache_kernels.codecs import Codec


@dataclass(frozen=True)
class Layout:
    """The pages of one rank."""

    kvcache: Any  # SGLang's
    methods: Restore
    shard: Shard  # part of a page that this rank holds
    kv: KVSegments  # of the layers that are stored as K and V
    exchange: Exchange | None = None  # of ranks that share a page's tokens; None: pages are whole
    codec: Codec | None = None  # of hidden states; None: K and V only, no layer is captured
    layers: Sequence[AttentionLayer] = ()  # of this stage, if any is captured
    chosen: PageLayout | None = None  # by a plug-in; None: the layers follow each other

    @cached_property
    def page(self) -> PageLayout:
        """The segment of each layer in a page: hidden states, K and V, or nothing (recomputed)."""
        if self.chosen is not None:
            return self.chosen
        size, codec = int(self.kvcache.page_size), self.codec
        layers = [RECOMPUTED] * (len(self.methods.methods) + len(self.kv.drafts))
        for layer in self.methods.layers("hidden"):
            assert codec is not None
            layers[layer] = hidden_layer(size, codec.row_bytes, codec.hidden_size, codec.code)
        for layer in self.kv.layers:
            layers[layer] = self.kv.stored_layer(layer)
        return self.kv.layout(layers, self.shard)

    @property
    def hidden_layers(self) -> list[AttentionLayer]:
        return [self.layers[index] for index in self.methods.layers("hidden")]

    @property
    def ring_bytes(self) -> int:
        """Device memory of the ring that groups of layers pass through in restores; 0: no ring."""
        groups = [range(layer, layer + 1) for layer in self.methods.layers("hidden")]
        if self.kv.shares_tokens:
            groups = [*split_evenly(self.kv.layers, MOST_EXCHANGES)]
        return ring_bytes(self.page, self.methods.chunk_tokens, groups) if groups else 0
