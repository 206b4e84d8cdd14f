"""Pages of one of SGLang's host pools, as the store sees them.

Own pages are one piece that describes itself. Pages of SGLang's own pools (plain KV, MLA, sliding
window, state space, indexers, drafts) are named by pool, layout and rank. They are read and written
in place, or by way of a copy if a pool has no addresses to offer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hcache_backend.config import ConfigError
from hcache_backend.format.envelope import key_bytes
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE, Parts, SegmentTable, Share
from hcache_backend.sglang.arguments import check_tp_lcm_size

logger = logging.getLogger("hcache")


class PageKeys(Sequence[bytes]):
    """SGLang's keys of pages as those of the store, each converted when it is read: the scheduler's
    thread passes on thousands of them with every request, and reads none."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: Any) -> Any:
        texts = self._texts[place]
        return PageKeys(texts) if isinstance(place, slice) else key_bytes(texts)


class PoolMemory(NamedTuple):
    """Pieces of every page, by part of the page; ``finish`` gets a flag per page after a read."""

    parts: list[list[Parts]]
    finish: Callable[[Sequence[bool]], None] = lambda found: None


class PoolPages:
    """The pages of one host pool. Raises ConfigError if ``tp_lcm_size`` does not divide the heads,
    or does not match our pages, which are older than the storage."""

    def __init__(self, name: str, host_pool: Any, config: HiCacheStorageConfig) -> None:
        self.name = name
        self.host_pool = host_pool
        self._layout: PageLayout | None = getattr(host_pool, "page_layout", None)
        self._any_ranks = bool(
            config.tp_lcm_size
            and name == PoolName.KV
            and host_pool.layout == "page_head"
            and self._layout is None  # hidden states do not divide by heads
            and not config.is_mla_model
        )
        # Pages of the store per page of the pool: more than one if it is divided by heads, so that
        # servers with more ranks can read it. None if the pool only counts tokens (the anchor of
        # pools that hold the data).
        self.parts = 1 if host_pool.size_per_token else 0
        if self._any_ranks and self.parts:
            assert config.tp_lcm_size is not None
            check_tp_lcm_size(
                config.tp_lcm_size, config.tp_size, host_pool.head_num, own_pages=False
            )
            self.parts = config.tp_lcm_size // config.tp_size
        divided = name == PoolName.MAMBA or isinstance(host_pool, MHATokenToKVPoolHost)
        # MLA ranks hold copies of their own pages, not of states and drafts beside them.
        self._same_on_all_ranks = config.is_mla_model and not divided
        # Ranks read those of others if our pages divide among all ranks.
        layout = self._layout
        shared = layout is not None and layout.share.of == config.tp_size
        own_groups = layout.head_groups if layout is not None and shared else None
        if own_groups and config.tp_lcm_size not in (None, own_groups):
            raise ConfigError(
                f"extra config: 'tp_lcm_size' is {config.tp_lcm_size} but the pages of this server "
                f"have {own_groups} groups of heads; it shapes pages, so it can only change at a "
                "restart"
            )
        if config.tp_lcm_size and name == PoolName.KV and not self._any_ranks and not shared:
            logger.warning(
                "hcache: 'tp_lcm_size' is ignored: KV pages can be divided by heads with "
                "--hicache-mem-layout page_head only, and not those of MLA"
            )
        if config.is_mla_model and config.tp_size > 1 and divided and name != PoolName.MAMBA:
            logger.warning(
                "hcache: pool %s is divided over the ranks and SGLang backs up the first rank's "
                "part only: prompts that need it do not come back from L3",
                name,
            )
        self._config = config
        self._access: Literal["in place", "copy", "none"] = "in place"

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a page."""
        pool = self.host_pool
        return int(pool.size_per_token * pool.page_size) // max(1, self.parts)

    def fields(self, part: int) -> dict[str, object]:
        """Fields of the namespace of plain KV pages (of a part of them)."""
        pool, config = self.host_pool, self._config
        rank: dict[str, object] = {"pp": [config.pp_rank, config.pp_size]}
        if config.attn_cp_size > 1:
            rank["cp"] = [config.attn_cp_rank, config.attn_cp_size]
        if getattr(pool, "dcp_size", 1) > 1:
            rank["dcp"] = [pool.dcp_rank, pool.dcp_size]
        if self._any_ranks:
            rank["any_ranks"] = True
            rank["tp"] = [config.tp_rank * self.parts + part, config.tp_size * self.parts]
        elif not self._same_on_all_ranks:
            rank["tp"] = [config.tp_rank, config.tp_size]
        return {
            "kind": "kv",
            "pool": str(self.name),
            "host_pool": type(pool).__name__,
            "layout": pool.layout,
            "bytes_per_token": pool.size_per_token // self.parts,
            **rank,
        }

    def table(self) -> SegmentTable | None:
        """Division of a whole page of ours; None if the pages are not ours."""
        return self._layout.table if self._layout is not None else None

    @property
    def share(self) -> Share:
        """This rank's share of a page, as other ranks can complete it."""
        return self._layout.share if self._layout is not None else WHOLE

    def digests(self, pages: Sequence[Parts]) -> list[list[int]] | None:
        """Digests in sealed pages of ours; None: other pages have none."""
        layout = self._layout
        if layout is None:
            return None
        return [layout.unit_digests(np.frombuffer(page, np.uint8)) for [page] in pages]

    def memory(self, host_indices: torch.Tensor, pages: int, *, read: bool) -> PoolMemory | None:
        """Memory of ``pages`` pages at ``host_indices``, to ``read`` into it or to write it; None
        if SGLang cannot store this pool."""
        found = self._in_place(host_indices, pages)
        if found is not None or self._access == "none":
            return found
        pool = self.host_pool
        if len(host_indices) != pages * pool.page_size:
            raise ValueError(f"{len(host_indices)} indices for {pages} pages of pool {self.name}")
        first = host_indices[:: pool.page_size].tolist()
        copies = [pool.get_dummy_flat_data_page() if read else pool.get_data_page(i) for i in first]
        flat = [copy.contiguous().reshape(-1).view(torch.uint8).numpy() for copy in copies]

        def finish(arrived: Sequence[bool]) -> None:
            for index, copy, ok in zip(first, copies, arrived, strict=True):
                if ok and read:
                    pool.set_from_flat_data_page(index, copy)

        return PoolMemory([[[memoryview(data).cast("B")] for data in flat]], finish)

    def _in_place(self, host_indices: torch.Tensor, pages: int) -> PoolMemory | None:
        """The pages in place, or None if the pool has no addresses to offer."""
        if self._access != "in place":
            return None
        if pages == 0 or self.parts == 0:
            return PoolMemory([[] for _ in range(self.parts)])
        try:
            if self.parts > 1:
                pointers, sizes = self.host_pool.get_split_heads_page_buffer_meta(
                    host_indices, self.parts
                )
            else:
                pointers, sizes = self.host_pool.get_page_buffer_meta(host_indices)
        except (ValueError, NotImplementedError) as error:
            self._access = self._other_access(error)
            return None
        if len(pointers) % (pages * self.parts):
            raise ValueError(
                f"{len(pointers)} pieces of memory for {pages} pages of pool {self.name}"
            )
        pieces = [_memory(*piece) for piece in zip(pointers, sizes, strict=True)]
        each = len(pieces) // (pages * self.parts)
        groups: list[Parts] = [pieces[i : i + each] for i in range(0, len(pieces), each)]
        return PoolMemory([groups[part :: self.parts] for part in range(self.parts)])

    def _other_access(self, refused: Exception) -> Literal["copy", "none"]:
        try:
            self.host_pool.get_dummy_flat_data_page()
        except (ValueError, NotImplementedError):
            logger.warning("hcache: pages of pool %s cannot be stored: %s", self.name, refused)
            return "none"
        logger.debug("hcache: pages of pool %s are copied: %s", self.name, refused)
        return "copy"


def _memory(pointer: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")
