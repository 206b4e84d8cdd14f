"""How the pages of one of SGLang's host pools look to the store.

Hidden-state pages are one piece that says itself what it is. Pages of SGLang's own pools (plain
KV, MLA, sliding window, state space, indexers, drafts) are named by pool, layout and rank, and are
read and written where they are, or, where a pool has no addresses to offer, by way of a copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

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
    """SGLang's keys of pages as those of the store, each converted when it is read.

    The scheduler's thread passes on thousands of them with every request, and reads none.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, place: int) -> bytes: ...

    @overload
    def __getitem__(self, place: slice) -> PageKeys: ...

    def __getitem__(self, place: int | slice) -> bytes | PageKeys:
        if isinstance(place, slice):
            return PageKeys(self._texts[place])
        return key_bytes(self._texts[place])


class PoolMemory(NamedTuple):
    """The pieces of every page, for each share of the heads; and what to call, with whether each
    page was found, when pages were read into it."""

    shares: list[list[Parts]]
    finish: Callable[[Sequence[bool]], None] = lambda found: None


class PoolPages:
    """The pages of one host pool.

    Attributes:
        empty: The pool only counts tokens (the anchor of pools that hold the data).
        shares: How many pages of the store a page of the pool is: more than one where it is
            divided by heads, so that servers with more ranks can read it.

    Raises:
        ConfigError: ``tp_lcm_size`` does not divide the heads, or is not what our pages, which
            there were before the storage, go by.
    """

    def __init__(self, name: str, host_pool: Any, config: HiCacheStorageConfig) -> None:
        self.name = name
        self.host_pool = host_pool
        self.empty = host_pool.size_per_token == 0
        self._layout: PageLayout | None = getattr(host_pool, "page_layout", None)
        self._any_ranks = bool(
            config.tp_lcm_size
            and name == PoolName.KV
            and host_pool.layout == "page_head"
            and self._layout is None  # hidden states do not divide by heads
            and not config.is_mla_model
        )
        self.shares = 1
        if self._any_ranks:
            assert config.tp_lcm_size is not None
            check_tp_lcm_size(
                config.tp_lcm_size, config.tp_size, host_pool.head_num, own_pages=False
            )
            self.shares = config.tp_lcm_size // config.tp_size
        divided = name == PoolName.MAMBA or isinstance(host_pool, MHATokenToKVPoolHost)
        # MLA ranks hold copies of their own pages, not of states and drafts beside them.
        self._same_on_all_ranks = config.is_mla_model and not divided
        # Ranks read those of others where pages of ours divide among all ranks.
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

    def fields(self, share: int) -> dict[str, object]:
        """What the namespace says about pages of plain KV (of a share of their heads)."""
        pool, config = self.host_pool, self._config
        rank: dict[str, object] = {"pp": [config.pp_rank, config.pp_size]}
        if config.attn_cp_size > 1:
            rank["cp"] = [config.attn_cp_rank, config.attn_cp_size]
        if getattr(pool, "dcp_size", 1) > 1:
            rank["dcp"] = [pool.dcp_rank, pool.dcp_size]
        if self._any_ranks:
            rank["any_ranks"] = True
            rank["tp"] = [config.tp_rank * self.shares + share, config.tp_size * self.shares]
        elif not self._same_on_all_ranks:
            rank["tp"] = [config.tp_rank, config.tp_size]
        return {
            "kind": "kv",
            "pool": str(self.name),
            "host_pool": type(pool).__name__,
            "layout": pool.layout,
            "bytes_per_token": pool.size_per_token // self.shares,
            **rank,
        }

    def table(self) -> SegmentTable | None:
        """How a whole page of ours divides; None: nobody knows what is inside."""
        return self._layout.table if self._layout is not None else None

    @property
    def share(self) -> Share:
        """The share of a page that this rank holds, as other ranks can complete it."""
        return self._layout.share if self._layout is not None else WHOLE

    def digests(self, pages: Sequence[Parts]) -> list[list[int]] | None:
        """The digests that sealed pages of ours hold; None: pages of another kind have none."""
        layout = self._layout
        if layout is None:
            return None
        return [layout.unit_digests(np.frombuffer(page, np.uint8)) for [page] in pages]

    def to_write(self, host_indices: torch.Tensor, pages: int) -> PoolMemory | None:
        """Memory that holds ``pages`` pages at ``host_indices`` (``[pages * page_size]``).

        None: SGLang offers no way to store pages of this pool.
        """
        found = self._in_place(host_indices, pages)
        if found is not None or self._access == "none":
            return found
        first = self._first(host_indices, pages)
        return self._copies([self.host_pool.get_data_page(index) for index in first])

    def to_read(self, host_indices: torch.Tensor, pages: int) -> PoolMemory | None:
        """Memory into which ``pages`` pages at ``host_indices`` are to be read, or None."""
        found = self._in_place(host_indices, pages)
        if found is not None or self._access == "none":
            return found
        copies = [self.host_pool.get_dummy_flat_data_page() for _ in range(pages)]
        first = self._first(host_indices, pages)

        def finish(arrived: Sequence[bool]) -> None:
            for index, copy, ok in zip(first, copies, arrived, strict=True):
                if ok:
                    self.host_pool.set_from_flat_data_page(index, copy)

        return self._copies(copies)._replace(finish=finish)

    def _in_place(self, host_indices: torch.Tensor, pages: int) -> PoolMemory | None:
        """The pages where they are, or None where the pool has no addresses to offer."""
        if self._access != "in place":
            return None
        if pages == 0:
            return PoolMemory([[] for _ in range(self.shares)])
        try:
            if self.shares > 1:
                pointers, sizes = self.host_pool.get_split_heads_page_buffer_meta(
                    host_indices, self.shares
                )
            else:
                pointers, sizes = self.host_pool.get_page_buffer_meta(host_indices)
        except (ValueError, NotImplementedError) as error:
            self._access = self._other_access(error)
            return None
        if len(pointers) % (pages * self.shares):
            raise ValueError(
                f"{len(pointers)} pieces of memory for {pages} pages of pool {self.name}"
            )
        pieces = [_memory(*piece) for piece in zip(pointers, sizes, strict=True)]
        each = len(pieces) // (pages * self.shares)
        groups: list[Parts] = [pieces[i : i + each] for i in range(0, len(pieces), each)]
        return PoolMemory([groups[share :: self.shares] for share in range(self.shares)])

    def _other_access(self, refused: Exception) -> Literal["copy", "none"]:
        """How to get at pages that have no addresses."""
        try:
            self.host_pool.get_dummy_flat_data_page()
        except (ValueError, NotImplementedError):
            logger.warning("hcache: pages of pool %s cannot be stored: %s", self.name, refused)
            return "none"
        logger.debug("hcache: pages of pool %s are copied: %s", self.name, refused)
        return "copy"

    def _copies(self, copies: Sequence[torch.Tensor]) -> PoolMemory:
        return PoolMemory([[tensor_parts(copy.contiguous()) for copy in copies]])

    def _first(self, host_indices: torch.Tensor, pages: int) -> list[int]:
        size = self.host_pool.page_size
        if len(host_indices) != pages * size:
            raise ValueError(f"{len(host_indices)} indices for {pages} pages of pool {self.name}")
        return [int(index) for index in host_indices[::size]]


def tensor_parts(tensor: torch.Tensor) -> Parts:
    """The bytes of a contiguous tensor on the CPU, as one piece of memory."""
    return [memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")]


def _memory(pointer: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(pointer)).cast("B")
