"""HiCache's controller over own pages of K and V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hcache_backend.arena import Ids
from hcache_backend.engine import metrics
from hcache_backend.engine.controller import OwnPagesController
from hcache_backend.engine.kv_pages.node_pairs import NodePairs
from hcache_backend.engine.loads import QueuedLoad
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.service_check import KVChecks
from hcache_backend.engine.stage_pages import StagePages
from hcache_backend.page import Bytes, Ints, PageLayout


class KVController(OwnPagesController):
    """Backup, load and storage transfers of own pages that hold K and V of all layers.

    They are what the pool held, so each can be loaded, and needs nothing from the model. When one
    was not, no page is loaded any more. Pipeline stages cannot stop backups at one point: there
    the first stage refuses all loads, once it has heard of it.
    """

    def check_by(
        self, checks: KVChecks, stages: StagePages, node_pairs: NodePairs | None = None
    ) -> None:
        """Give the controller what it works with besides; called once, before the first request.

        ``node_pairs`` says which layers share slots; None: the same in all pages.
        """
        self._checks = checks
        self._stages = stages
        self._node_pairs = node_pairs
        self._tree: Any = None

    def reset(self) -> None:
        super().reset()
        self._checks.forget()
        if self._node_pairs is not None:
            self._node_pairs.forget()

    def turn(self, cache: Any) -> None:
        super().turn(cache)
        if self._node_pairs is not None:
            self._tree = cache.tree_core
            if self._node_pairs.answered():
                self.start_writing()
        self._checks.run()
        self._stages.talk()
        if self._ended():
            # None of them will be loaded, and what HiCache takes for a hit it does not look up.
            cache.evict_host(self._pool.size)

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._ended():
            self._not_backed_up("self-check failed", len(device_indices))
            return None
        host_indices = super().write(device_indices, *args, **kwargs)
        if host_indices is not None:
            metrics.TOKENS.count("backed_up", len(device_indices))
            self._stages.backed_up(self._pool.page_ids(host_indices))
        return host_indices

    def start_writing(self) -> None:
        """Launch the backups of nodes whose pages are known to be divided in some way."""
        pairs, due = self._node_pairs, len(self.write_queue)
        layouts: Sequence[PageLayout] = [self._pool.page_layout] * due
        if pairs is not None:
            # HiCache waits for a write-back on the spot.
            tree = self._tree if self.write_policy != "write_back" else None
            for operation in self.write_queue[pairs.asked :]:
                pairs.ask(tree, operation.node_ids)
            layouts = [*iter(pairs.next, None)]
            due = len(layouts)
        for operation, layout in zip(self.write_queue, layouts, strict=False):
            self._pool.divide(self._pool.page_ids(operation.host_indices), layout)
        later = self.write_queue[due:]
        del self.write_queue[due:]
        super().start_writing()
        self.write_queue.extend(later)

    def _ended(self) -> bool:
        return self._checks.failed and self._stages.alone

    def _own_depths(self, host_pages: Ids) -> Ids:
        depths = super()._own_depths(host_pages)
        if not self._pool.divided(host_pages):
            depths[:] = self._pool.layer_num + 1
        return depths

    def _planned(self, host_pages: Ids) -> QueuedLoad | None:
        depths = self._depths(host_pages)
        if self._stages.alone:
            fine = not self._checks.failed
        else:
            self._stages.talk()
            (fine,) = on_all_ranks(self.tp_group, self._runtime.distrust is None)
            fine = self._stages.decide(fine)
        if not fine:
            return None
        tokens = len(host_pages) * self.page_size
        if depths is None:
            metrics.TOKENS.count("not_restored_unsettled", tokens)
            return None
        load = self._loads.plan(host_pages, depths, self._prefix, self._token_ids)
        if load is None:
            metrics.TOKENS.count("not_restored_layers_not_recomputable", tokens)
            self._never_loaded = True
        return load

    def _finish_header(self, page: Bytes, token_ids: Ints, position: int | None) -> str | None:
        """Write it: HiCache had no tokens to tell before."""
        layout, weights = self._pool.page_layout.of(page), self._runtime.weights
        if layout is None:
            return "page_of_another_form"
        if weights is None or weights.suspended is not None:
            return "page_of_other_weights"
        if position is None:
            return "page_without_position"
        layout.begin(page, self._runtime.page_namespace(weights), self._runtime.writer)
        layout.positions(page)[:] = np.arange(position, position + self.page_size)
        layout.token_ids(page)[:] = token_ids
        return None
