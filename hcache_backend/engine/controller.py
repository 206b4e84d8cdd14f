"""HiCache's controller, with the rules that hidden-state pages need.

A node is backed up only when every row of it is valid; a page counts as a hit only when its header
proves it is the wanted one, whatever storage backend brought it; and no page of other weights is
ever projected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend.capture.mirror import HiddenMirror
from hcache_backend.engine import metrics
from hcache_backend.engine.host_pool import HiddenStatePool
from hcache_backend.engine.keys import key_bytes
from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.self_check import layer_problem
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.projector import Projector

logger = logging.getLogger("hcache")


class HiddenStateController(HybridCacheController):
    """Backup, load and storage transfers of hidden-state pages.

    ``write`` and ``load`` run on the scheduler thread; ``_page_*`` in HiCache's storage threads.
    """

    def use_hidden_states(
        self,
        runtime: Runtime,
        pool: HiddenStatePool,
        mirror: HiddenMirror,
        layers: Sequence[AttentionLayer],
        projector: Projector,
    ) -> None:
        """Give the controller what it works with; called once, before the first request."""
        self._runtime = runtime
        self._pool = pool
        self._mirror = mirror
        self._layers = layers
        self._projector = projector
        self._pages_until_check = 0

    # ---- device -> host ----

    def write(self, device_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Back up a node, or return None on every rank when a row of it is not valid."""
        problem = self._write_problem(device_indices)
        if not self._agreed(problem is None):
            problem = problem or "another rank"
            metrics.count_tokens(f"not_backed_up_{problem.replace(' ', '_')}", len(device_indices))
            logger.debug("hcache: %d tokens not backed up: %s", len(device_indices), problem)
            return None
        return super().write(device_indices, *args, **kwargs)

    def _write_problem(self, device_indices: torch.Tensor) -> str | None:
        if self._runtime.distrust is not None:
            return "self-check failed"
        if not self._mirror.all_valid(device_indices):
            unencodable = self._mirror.any_unencodable(device_indices)
            return "rows not encodable" if unencodable else "rows not valid"
        if not self._mirror.are_consecutive(device_indices, self._pool.page_size):
            return "positions not consecutive"
        return self._sampled_check(device_indices)

    def _sampled_check(self, device_indices: torch.Tensor) -> str | None:
        """Project one page in ``check_every_pages`` and compare it with the pool."""
        assert self._runtime.config is not None
        every, size = self._runtime.config.check_every_pages, self._pool.page_size
        if every == 0:
            return None
        pages = len(device_indices) // size
        if self._pages_until_check >= pages:
            self._pages_until_check -= pages
            return None
        start = self._pages_until_check * size
        self._pages_until_check = every - 1 - (pages - 1 - self._pages_until_check) % every
        slots = device_indices[start : start + size]
        host_slots = slots.to("cpu")
        positions = self._mirror.positions[host_slots].to(slots.device, torch.int64)
        metrics.count_tokens("checked", size)
        codec = self._mirror.codec
        for layer in self._layers:
            hidden = codec.decode(self._mirror.rows[layer.index][host_slots].to(slots.device))
            problem = layer_problem(
                layer, hidden, positions, slots, self._projector, self.mem_pool_device, codec.name
            )
            if problem is not None:
                metrics.count_problem("self_check")
                self._runtime.lose_trust(f"the self-check in service failed: {problem}")
                return "self-check failed"
        return None

    def _agreed(self, fine: bool) -> bool:
        """Whether all ranks say so; a rank that lost its trust takes the others with it."""
        fine, trusted = on_all_ranks(self.tp_group, fine, self._runtime.distrust is None)
        if not trusted:
            self._runtime.lose_trust("another tensor-parallel rank failed its self-check")
        return fine and trusted

    # ---- host -> device ----

    def load(self, host_indices: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Load nodes, or return None (a miss) when a page is not of the present weights."""
        if not self._agreed(self._may_project(host_indices)):
            metrics.count_problem("stale_host_page")
            return None
        return super().load(host_indices, *args, **kwargs)

    def _may_project(self, host_indices: torch.Tensor) -> bool:
        if self._runtime.distrust is not None:
            return False
        if host_indices.numel() == 0:
            return True
        namespace, layout = self._runtime.page_namespace(), self._pool.page_layout
        pages = self._pool.pages()
        ids = self._pool.page_ids(host_indices).tolist()
        return all(layout.namespace_of(pages[page]) == namespace for page in ids)

    # ---- host -> storage ----

    def _page_backup(self, operation: Any) -> Any:
        """Seal the pages of a node; the first one that must not be stored ends the backup."""
        tokens, size = _token_array(operation.token_ids), self.page_size
        namespace = self._runtime.page_namespace()
        pages, layout = self._pool.pages(), self._pool.page_layout
        page_ids = self._pool.page_ids(operation.host_indices).tolist()
        for i, (key, page_id) in enumerate(zip(operation.hash_value, page_ids, strict=False)):
            page, wanted = pages[page_id], tokens[i * size : (i + 1) * size]
            if layout.namespace_of(page) != namespace:
                problem = "namespace"
            elif not np.array_equal(layout.token_ids(page), wanted):
                problem = "tokens"
            else:
                layout.seal(page, key_bytes(key))
                continue
            metrics.count_problem(f"host_page_of_other_{problem}")
            logger.warning("hcache: a host page of other %s than its node; not stored", problem)
            operation.hash_value = operation.hash_value[:i]
            break
        return super()._page_backup(operation)

    # ---- storage -> host ----

    def _page_get_zero_copy(self, operation: Any, hash_values: Any, *args: Any) -> int:
        got = super()._page_get_zero_copy(operation, hash_values, *args)
        return self._proven_pages(operation, hash_values, args[0], got)

    def _generic_page_get(self, operation: Any, hash_values: Any, *args: Any) -> int:
        got = super()._generic_page_get(operation, hash_values, *args)
        return self._proven_pages(operation, hash_values, args[0], got)

    def _proven_pages(
        self, operation: Any, hash_values: Sequence[str], host_indices: torch.Tensor, got: int
    ) -> int:
        """How many of the first ``got`` pages are what the radix tree asked for."""
        namespace, layout = self._runtime.page_namespace(), self._pool.page_layout
        pages, size = self._pool.pages(), self.page_size
        tokens = _token_array(operation.token_ids)
        first = operation.hash_value.index(hash_values[0]) if hash_values else 0
        page_ids = self._pool.page_ids(host_indices).tolist()
        for i in range(got):
            start = (first + i) * size
            problem = layout.problem(
                pages[page_ids[i]],
                namespace,
                key_bytes(hash_values[i]),
                tokens[start : start + size],
            )
            if problem is not None:
                metrics.count_problem(f"page_{problem.replace(' ', '_')}")
                logger.warning(
                    "hcache: page %s from storage is not ours (%s): a miss",
                    hash_values[i][:12],
                    problem,
                )
                return i
        return got


def _token_array(token_ids: Any) -> np.ndarray:
    """Token ids of a storage operation (a key, a list or an array) as int32 ``[n]``."""
    return np.asarray(getattr(token_ids, "token_ids", token_ids), dtype=np.int64).astype(np.int32)
