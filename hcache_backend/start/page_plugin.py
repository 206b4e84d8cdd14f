"""A codec that decides on its own how layers share a page; the only place that loads one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hcache_backend.config import HCacheConfig
from hcache_backend.format.page import PageLayout
from hcache_backend.host.node_backups import NodeLayouts
from hcache_backend.host.segments import KVSegments
from hcache_backend.restore.recompute import Recomputer


class PagePlugin(Protocol):
    """Pages of K and V, each a rank's own, whose headers say how layers share them. Methods raise
    ValueError on every rank if such pages cannot be used.

    Attributes:
        allowed_change: Largest change of K and V that codes of its own may make, relative RMS.
        wants_model: It chooses a layout for each node by a look at the model.
    """

    allowed_change: float
    wants_model: bool

    def segments(
        self, kvcache: Any, layers: Sequence[int], page_size: int, groups: int
    ) -> KVSegments:
        """Copies K and V of ``layers`` of the pool; raises UnsupportedRows."""

    def settle(
        self, kv: KVSegments, layout: PageLayout, slots: torch.Tensor, group: Any
    ) -> PageLayout:
        """The layout of pages that have no layout of their own. All ranks of ``group`` call it. The
        model has written K and V to ``slots``, int64 ``[p * page_size]``."""

    def try_model(
        self, recomputer: Recomputer, token_ids: Sequence[int], slots: torch.Tensor
    ) -> None:
        """Look at the model once. K and V of ``token_ids`` are in ``slots``, int64 ``[n]``."""

    def backups(
        self, recomputer: Recomputer, layout: PageLayout, group: Any, ranks: int
    ) -> NodeLayouts:
        """Chooses the layouts of nodes by a look at the model; otherwise they have ``layout``."""


def page_plugin(config: HCacheConfig | None) -> PagePlugin | None:
    """The plug-in that option ``codec`` names, if it names one."""
    if config is None or config.codec != "krul":
        return None
    from hcache_backend.krul.plugin import Krul

    return Krul(config.krul)
