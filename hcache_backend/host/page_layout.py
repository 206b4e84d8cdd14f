"""What the pages of this server look like: the share of this rank, groups of heads, layers."""

from __future__ import annotations

from hcache_backend.host.segments import KVSegments
from hcache_backend.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.plan.restore import Restore
from hcache_backend.units import SHARE_COUNTS, WHOLE, Share
from hcache_kernels.codecs import Codec


def share_of_heads(rank: int, ranks: int) -> Share:
    """The share of pages of K and V alone that a tensor-parallel rank holds: its own heads.

    With a number of ranks that does not divide eight the heads make no shares: every rank's pages
    are whole, and its own.
    """
    return Share(rank, ranks) if ranks in SHARE_COUNTS else WHOLE


def head_groups(tp_lcm_size: int | None, share: Share, ranks: int) -> int:
    """Into how many groups of heads K and V of a page divide, those of all ranks together.

    Args:
        tp_lcm_size: SGLang's option: as many groups, so that servers with that many ranks, and with
            fewer, read each other's pages. Without it there is one for each rank.
        share: What this rank holds of a page.
    """
    return tp_lcm_size or ranks if share.of == ranks else share.of


def page_layout(
    page_size: int, methods: Restore, kv: KVSegments, codec: Codec | None, share: Share
) -> PageLayout:
    """The layout of pages whose layers are restored by ``methods``.

    ``codec`` encodes hidden states; None where there are none.
    """
    layers = [RECOMPUTED] * len(methods.methods)
    for layer in methods.layers("hidden"):
        assert codec is not None
        layers[layer] = hidden_layer(page_size, codec.row_bytes, codec.hidden_size, codec.code)
    for layer in kv.layers:
        layers[layer] = kv.stored_layer(layer)
    return kv.layout(layers, share)
