"""Is a host page the wanted one, by its header (weights, key, tokens and positions): before it goes
to L3, when it comes, and before it is projected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hcache_backend import metrics
from hcache_backend.arena import Arena, Ids
from hcache_backend.format.envelope import key_bytes
from hcache_backend.format.page import Bytes, Ints, PageLayout
from hcache_backend.host.ports import ModelWeights
from hcache_backend.metrics import logger


@dataclass(eq=False)
class PageHeaders:
    """Of pages with hidden states (``_captured``) the arena knows weights and tokens."""

    _weights: ModelWeights
    _arena: Arena
    _layout: PageLayout
    _captured: bool
    _positions: int  # with a row in RoPE tables
    _writer: bytes  # of the pages of this run

    def seal(self, host_pages: Ids, keys: Sequence[str], token_ids: Ints, first: int | None) -> int:
        """Seal pages (int64 ``[p]``) of ``keys``, up to one that must not be stored; returns how
        many. ``token_ids`` (int32 ``[p * page_size]``) begin at position ``first``; None: unknown.
        HiCache's backup thread."""
        arena, size = self._arena, self._layout.page_size
        arena.host_access(arena.physical(host_pages), write=True, header=True)
        for i, (key, page) in enumerate(zip(keys, arena.pages(host_pages), strict=False)):
            tokens = token_ids[i * size : (i + 1) * size]
            position = None if first is None else first + i * size
            problem = self._seal(host_pages[i : i + 1], page, key_bytes(key), tokens, position)
            if problem is not None:
                metrics.PROBLEMS.count(problem)
                if "other" in problem:
                    logger.warning("hcache: %s: not stored", problem.replace("_", " "))
                return i
        return len(host_pages)

    def _seal(
        self, host_page: Ids, page: Bytes, key: bytes, token_ids: Ints, position: int | None
    ) -> str | None:
        """Seal a page (uint8 ``[page_bytes]``), or return the reason why it must not be stored.
        ``token_ids``: int32 ``[page_size]``, from ``position`` on."""
        layout, weights = self._layout.of_page(page), self._weights.present
        if not self._arena.usable(host_page):
            unfit = self._arena.unfit(host_page).any()
            return "page_not_encodable" if unfit else "page_with_lost_rows"
        if layout is None:
            return "page_of_another_form"
        if weights is None or (weights.suspended is not None and not self._captured):
            return "page_of_other_weights"
        namespace = self._weights.page_namespace(weights)
        if self._captured:
            if self._weights.quarantine is not None:
                return "page_in_quarantine"
            if self._arena.namespaces(host_page) != [namespace]:
                return "host_page_of_other_namespace"
            if not np.array_equal(layout.token_ids(page), token_ids):
                return "host_page_of_other_tokens"
        else:
            if position is None:
                return "page_without_position"
            layout.positions(page)[:] = np.arange(position, position + layout.page_size)
            layout.token_ids(page)[:] = token_ids
        layout.seal(page, namespace, key, self._writer)
        return None

    def verified_pages(
        self, host_pages: Ids, keys: Sequence[str], token_ids: Ints, *, digests_checked: bool
    ) -> int:
        """Number of the first of these pages (int64 ``[p]``), which came from L3, that are those of
        ``keys`` and ``token_ids`` (int32 ``[p * page_size]``). ``digests_checked``: L3 has
        checked their units. HiCache's storage thread."""
        namespace, size = self._weights.page_namespace(), self._layout.page_size
        for i, page in enumerate(self._arena.pages(host_pages)):
            tokens = token_ids[i * size : (i + 1) * size]
            key, segments = key_bytes(keys[i]), not digests_checked
            problem = self._layout.problem(page, namespace, key, tokens, segments=segments)
            if problem is None and not self._has_valid_positions(page):
                problem = "positions"
            if problem is not None:
                label = problem.replace(" ", "_")
                metrics.PROBLEMS.count(f"page_{label}")
                metrics.L3_TOKENS.count(f"refused_{label}", (len(host_pages) - i) * size)
                text = "hcache: page %s from L3 is not the requested one (%s): counted as a miss"
                logger.warning(text, keys[i][:12], problem)
                return i
        return len(host_pages)

    def may_project(self, host_pages: Ids) -> bool:
        """True for K and V, and for hidden states of present weights at positions that RoPE has."""
        if not self._captured or self._weights.quarantine is not None:
            return not self._captured
        present = self._weights.page_namespaces()
        ours = all(namespace in present for namespace in self._arena.namespaces(host_pages))
        pages = self._arena.pages(host_pages, header=True)
        return ours and all(map(self._has_valid_positions, pages))

    def _has_valid_positions(self, page: Bytes) -> bool:
        """True if RoPE tables, which kernels read unchecked, have all positions of the page."""
        positions = self._layout.positions(page)
        return bool(0 <= positions.min() <= positions.max() < self._positions)
