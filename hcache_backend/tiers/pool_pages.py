"""Pages of one of SGLang's host pools, in place, or by way of a copy if a pool has no addresses to
offer. Own pages describe themselves; others are named by pool, layout and rank."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hcache_backend.config import ConfigError
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE, Parts, SegmentTable, Shard
from hcache_backend.metrics import logger
from hcache_backend.sglang.arguments import check_tp_lcm_size


class PoolMemory(NamedTuple):
    """Pieces of every page, by part of the page; ``finish`` gets a flag per page after a read."""

    parts: list[list[Parts]]
    finish: Callable[[Sequence[bool]], None] = lambda arrived: None


class PoolPages:
    """The pages of one host pool. Raises ConfigError if ``tp_lcm_size`` does not divide the heads,
    or does not match our pages, which are older than the storage."""

    def __init__(self, name: str, host_pool: Any, config: HiCacheStorageConfig) -> None:
        self.name, self.host_pool, self._config = name, host_pool, config
        self._layout: PageLayout | None = getattr(host_pool, "page_layout", None)
        layout = self._layout
        # This rank's shard of a page, and the division of a whole page of ours.
        self.shard: Shard = layout.shard if layout is not None else WHOLE
        self.table: SegmentTable | None = layout.table if layout is not None else None
        lcm, ranks, mla = config.tp_lcm_size, config.tp_size, config.is_mla_model
        has_lcm = lcm and name == PoolName.KV
        divides = layout is None and host_pool.layout == "page_head" and not mla
        self._any_ranks = bool(has_lcm and divides)
        # Pages of the store per page of the pool: more than one if it is divided by heads, so that
        # servers with more ranks can read it; 0 if the pool only counts tokens.
        self.parts = 1 if host_pool.size_per_token else 0
        if self._any_ranks:
            assert lcm is not None
            check_tp_lcm_size(lcm, ranks, host_pool.head_num, own_pages=False)
            self.parts = lcm // ranks
        self.part_bytes = host_pool.size_per_token * host_pool.page_size // max(1, self.parts)
        divided = name == PoolName.MAMBA or isinstance(host_pool, MHATokenToKVPoolHost)
        # MLA ranks hold copies of their own pages, not of states and drafts beside them.
        self._same_on_all_ranks = mla and not divided
        # Ranks read those of others if our pages divide among all ranks.
        shared = layout is not None and layout.shard.of == ranks
        own_groups = layout.head_groups if layout is not None and shared else None
        if own_groups and lcm not in (None, own_groups):
            raise ConfigError(
                f"extra config: 'tp_lcm_size' is {lcm} but the pages of this server have "
                f"{own_groups} groups of heads; it shapes pages, so it can only change at a restart"
            )
        if has_lcm and not self._any_ranks and not shared:
            only = "with --hicache-mem-layout page_head only, and not those of MLA"
            text = "hcache: 'tp_lcm_size' is ignored: KV pages can be divided by heads %s"
            logger.warning(text, only)
        if mla and ranks > 1 and divided and name != PoolName.MAMBA:
            logger.warning(
                f"hcache: pool {name} is divided over the ranks and SGLang backs up the first "
                "rank's part only: prompts that need it do not come back from L3"
            )
        self._access: Literal["in place", "copy", "none"] = "in place"

    def fields(self, part: int) -> dict[str, object]:
        """Fields of the namespace of part ``part`` of plain KV pages: form, ``[rank, size]``..."""
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
        if self.name == PoolName.MAMBA:  # options of their own decide about these types
            rank["dtypes"] = [str(pool.conv_dtype), str(pool.temporal_dtype)]
        return {
            "kind": "kv",
            "pool": str(self.name),
            "host_pool": type(pool).__name__,
            "layout": pool.layout,
            "bytes_per_token": pool.size_per_token // self.parts,
            **rank,
        }

    def ranks(self) -> list[dict[str, object]]:
        """Of each rank of the server the :meth:`fields` that tell its pages from other ranks'."""
        fields: dict[str, Any] = {**self.fields(0)}
        names = [name for name in ("pp", "cp", "dcp", "tp") if name in fields]
        values = ([[n, fields[name][1]] for n in range(fields[name][1])] for name in names)
        return [dict(zip(names, rank, strict=True)) for rank in product(*values)]

    def digests(self, pages: Sequence[Parts]) -> list[list[int]] | None:
        """Digests in sealed pages of ours; None: other pages have none."""
        if (layout := self._layout) is None:
            return None
        return [layout.unit_digests(np.frombuffer(page, np.uint8)) for [page] in pages]

    def memory(self, host_indices: torch.Tensor, pages: int, *, read: bool) -> PoolMemory | None:
        """Memory of ``pages`` pages, to ``read`` into or to write: the pool's own, or a copy, which
        ``finish`` takes back to the pool after a read. None: the pool offers neither."""
        in_place = self._in_place(host_indices, pages)
        if in_place is not None or self._access == "none":
            return in_place
        pool = self.host_pool
        if len(host_indices) != pages * pool.page_size:
            raise ValueError(f"{len(host_indices)} indices for {pages} pages of pool {self.name}")
        first = host_indices[:: pool.page_size].tolist()
        copies = [pool.get_dummy_flat_data_page() if read else pool.get_data_page(i) for i in first]
        flat = [copy.contiguous().reshape(-1).view(torch.uint8).numpy() for copy in copies]

        def copy_to_pool(arrived: Sequence[bool]) -> None:
            for index, copy, ok in zip(first, copies, arrived, strict=True):
                if ok:
                    pool.set_from_flat_data_page(index, copy)

        return PoolMemory([[[memoryview(data).cast("B")] for data in flat]], copy_to_pool)

    def _in_place(self, host_indices: torch.Tensor, pages: int) -> PoolMemory | None:
        """Views of the pool's own memory; None: it offers no addresses, as the first call finds."""
        pool = self.host_pool
        if self._access != "in place":
            return None
        if pages == 0 or self.parts == 0:
            return PoolMemory([[] for _ in range(self.parts)])
        try:
            if self.parts > 1:
                spans = pool.get_split_heads_page_buffer_meta(host_indices, self.parts)
            else:
                spans = pool.get_page_buffer_meta(host_indices)  # addresses, sizes, page by page
        except (ValueError, NotImplementedError) as error:
            try:
                pool.get_dummy_flat_data_page()
                self._access = "copy"
            except (ValueError, NotImplementedError):
                self._access = "none"
                logger.warning("hcache: pages of pool %s cannot be stored: %s", self.name, error)
            return None
        blocks = [(ctypes.c_ubyte * size).from_address(a) for a, size in zip(*spans, strict=True)]
        pieces = [memoryview(block).cast("B") for block in blocks]
        per_part, rest = divmod(len(pieces), pages * self.parts)
        if rest:
            raise ValueError(f"{len(pieces)} pieces of memory for {pages} pages of {self.name}")
        groups: list[Parts] = [pieces[i : i + per_part] for i in range(0, len(pieces), per_part)]
        return PoolMemory([groups[part :: self.parts] for part in range(self.parts)])
