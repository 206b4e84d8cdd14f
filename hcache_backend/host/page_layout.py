"""The layout of this server's pages: the share of this rank, groups of heads, layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.format.units import SHARE_COUNTS, WHOLE, Share
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Restore
from hcache_backend.turn import Turn
from hcache_kernels.codecs import Codec


class NodeLayouts(Protocol):
    """Chooses the layout of the pages of each node; its backup waits until then. Scheduler thread
    only.

    Attributes:
        asked: Number of nodes that wait.
    """

    @property
    def asked(self) -> int: ...

    def ask(self, tree: Any, node_ids: Sequence[int]) -> None:
        """Append the node of SGLang's ``tree`` with these ids; without a tree it need not wait."""

    def next(self) -> PageLayout | None:
        """Remove the first node and return its layout; None if there is none, or it has to wait."""

    def look(self, turn: Turn) -> None:
        """Add what this rank knows."""

    def answered(self) -> bool:
        """The ranks have agreed. True if the first node need not wait since now."""

    def forget(self) -> None:
        """Backups that wait were dropped, and the tree is empty."""


def share_of_heads(rank: int, ranks: int) -> Share:
    """A rank's share of pages of K and V: its own heads. If the number of ranks does not divide
    eight, every rank has whole pages of its own."""
    return Share(rank, ranks) if ranks in SHARE_COUNTS else WHOLE


def head_groups(tp_lcm_size: int | None, share: Share, ranks: int) -> int:
    """Groups of heads that K and V of a page divide into, over all ranks; by default one per rank.
    With SGLang's ``tp_lcm_size``, servers with up to that many ranks can share pages."""
    return tp_lcm_size or ranks if share.of == ranks else share.of


def page_layout(
    page_size: int, methods: Restore, kv: KVSegments, codec: Codec | None, share: Share
) -> PageLayout:
    """Layout of pages whose layers are restored by ``methods``; ``codec`` is of hidden states."""
    layers = [RECOMPUTED] * (len(methods.methods) + len(kv.drafts))
    for layer in methods.layers("hidden"):
        assert codec is not None
        layers[layer] = hidden_layer(page_size, codec.row_bytes, codec.hidden_size, codec.code)
    for layer in kv.layers:
        layers[layer] = kv.stored_layer(layer)
    return kv.layout(layers, share)
