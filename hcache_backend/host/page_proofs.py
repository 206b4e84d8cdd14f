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
from hcache_backend.host.ports import Server
from hcache_backend.metrics import logger


@dataclass(eq=False)
class PageProofs:
    """Pages with hidden states (``_captured``) have their header when their rows are proven."""

    _server: Server
    _arena: Arena
    _layout: PageLayout
    _captured: bool
    _positions: int  # with a row in RoPE tables

    def seal(self, host_pages: Ids, keys: Sequence[str], token_ids: Ints, first: int | None) -> int:
        """Seal pages (int64 ``[p]``) of ``keys``, up to one that must not be stored; returns how
        many. ``token_ids`` (int32 ``[p * page_size]``) begin at position ``first``; None: unknown.
        HiCache's backup thread."""
        arena, size = self._arena, self._layout.page_size
        arena.host_access(arena.physical(host_pages), write=True, header=True)
        unfit = arena.unfit(host_pages)
        for i, (key, page) in enumerate(zip(keys, arena.pages(host_pages), strict=False)):
            own = token_ids[i * size : (i + 1) * size]
            at = None if first is None else first + i * size
            problem: str | None = "page_not_encodable"
            if not unfit[i]:
                problem = self._header_problem(page, key_bytes(key), own, at)
            if problem is not None:
                metrics.PROBLEMS.count(problem)
                if "other" in problem:
                    logger.warning("hcache: %s: not stored", problem.replace("_", " "))
                return i
            self._layout.seal(page, key_bytes(key))
        return len(host_pages)

    def _header_problem(
        self, page: Bytes, key: bytes, token_ids: Ints, position: int | None
    ) -> str | None:
        """Reason why a page (uint8 ``[page_bytes]``) must not be stored, or None; then its header
        is complete except its seal. ``token_ids``: int32 ``[page_size]``, from ``position`` on."""
        server = self._server
        if self._captured:
            if server.quarantine is not None:
                return "page_in_quarantine"
            if not self._layout.is_stamped(page):
                return "page_with_lost_rows"
            if self._layout.namespace_of(page) != server.page_namespace():
                return "host_page_of_other_namespace"
            same = np.array_equal(self._layout.token_ids(page), token_ids)
            return None if same else "host_page_of_other_tokens"
        layout, weights = self._layout.of_page(page), server.weights
        if layout is None:
            return "page_of_another_form"
        if weights is None or weights.suspended is not None:
            return "page_of_other_weights"
        if position is None:
            return "page_without_position"
        namespace = server.page_namespace(weights)
        if self._layout.problem(page, namespace, key, token_ids, segments=False) is None:
            return None  # it was sealed before, and a load may be reading its positions
        layout.begin_header(page, namespace, server.writer)
        layout.positions(page)[:] = np.arange(position, position + self._layout.page_size)
        layout.token_ids(page)[:] = token_ids
        return None

    def proven(
        self, host_pages: Ids, keys: Sequence[str], token_ids: Ints, *, verified: bool
    ) -> int:
        """Number of the first of these pages (int64 ``[p]``), which came from L3, that are those of
        ``keys`` and ``token_ids`` (int32 ``[p * page_size]``). ``verified``: L3 has checked their
        units. HiCache's storage thread."""
        namespace, size = self._server.page_namespace(), self._layout.page_size
        for i, page in enumerate(self._arena.pages(host_pages)):
            wanted = token_ids[i * size : (i + 1) * size]
            asked = page, namespace, key_bytes(keys[i]), wanted
            problem = self._layout.problem(*asked, segments=not verified)
            if problem is None and not self._has_known_positions(page):
                problem = "positions"
            if problem is not None:
                why = problem.replace(" ", "_")
                metrics.PROBLEMS.count(f"page_{why}")
                metrics.L3_TOKENS.count(f"refused_{why}", (len(host_pages) - i) * size)
                text = "hcache: page %s from L3 is not the requested one (%s): counted as a miss"
                logger.warning(text, keys[i][:12], problem)
                return i
        return len(host_pages)

    def may_project(self, host_pages: Ids) -> bool:
        """True if all captured pages are of the present weights, and have positions of RoPE."""
        if not self._captured or self._server.quarantine is not None:
            return not self._captured
        namespaces = self._server.page_namespaces()
        pages = self._arena.pages(host_pages, header=True)
        known = all(self._layout.namespace_of(page) in namespaces for page in pages)
        return known and all(map(self._has_known_positions, pages))

    def _has_known_positions(self, page: Bytes) -> bool:
        """Kernels look positions up in RoPE tables, and cannot check them."""
        positions = self._layout.positions(page)
        return bool(0 <= positions.min() <= positions.max() < self._positions)
