"""Keys of the indexer of models with sparse attention (DSA), beside latents in pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from hcache_kernels.launch import alignment
from hcache_kernels.pages import gather_pages, gather_planes, scatter_pages
from hcache_kernels.pages.kernel import LayerTable, gather_launch, gather_planes_launch


class IndexKeys:
    """Copies index keys between SGLang's pool (DSATokenToKVPool) and pages, as they are: in a page
    of the pool the keys of all tokens come before all scales. If ranks share a page's tokens, each
    keeps a part of these bytes. Layers that choose no tokens of their own have no keys.

    Args:
        pools: Index keys by layer, uint8 ``[pages, bytes]``.
        page_size: Tokens of a page.
        ranks: Number of parts of a page.
    """

    def __init__(self, pools: Mapping[int, torch.Tensor], page_size: int, ranks: int) -> None:
        self._part_tokens = page_size // ranks
        self._pools = {layer: pool.view(len(pool) * ranks, -1) for layer, pool in pools.items()}
        self._tables: dict[tuple[int, int, int], LayerTable] = {}

    def bytes_of(self, layer: int) -> int:
        """Bytes of a layer in this rank's part of a page."""
        return self._pools[layer].shape[1] if layer in self._pools else 0

    def layers_with_keys(self, layers: Sequence[int]) -> list[int]:
        """Those of ``layers`` that have keys: without any, nothing else is to be called."""
        return [layer for layer in layers if layer in self._pools]

    def copy(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        pool_parts: torch.Tensor,
        *,
        save: bool = False,
    ) -> None:
        """Copy keys of ``layers`` (at least one has some) from ``offsets``, by layer, in ``pages``
        of ``memory`` to ``pool_parts``, int64 ``[p]`` each; ``save``: the other way."""
        offset_of = dict(zip(layers, offsets, strict=True))
        keyed = self.layers_with_keys(layers)
        if pool_parts.is_cuda:  # by one launch
            table = self._table(keyed, [offset_of[layer] for layer in keyed])
            pool = [table.planes[0][:, None, None]]
            gather_planes_launch(memory, pages, 0, pool, pool_parts, table, save=save).run()
            return
        for layer in keyed:
            pool = self._pools[layer]
            if save:
                scatter_pages(pool[pool_parts], memory, pages, offset_of[layer])
            else:
                gather_planes(memory, pages, offset_of[layer], [pool[:, None, None]], pool_parts)

    def gather(
        self,
        layers: Sequence[int],
        memory: torch.Tensor,
        pages: torch.Tensor,
        offsets: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Copy keys of ``layers`` (at least one has some) from ``offsets``, by layer, in ``pages``
        of ``memory`` to ``out``: uint8, flat, in the order ``[layer with keys, page, byte]``."""
        offset_of = dict(zip(layers, offsets, strict=True))
        keyed = self.layers_with_keys(layers)
        rows = out.view(len(keyed), len(pages), -1)
        if out.is_cuda:
            table = self._table(keyed, [offset_of[layer] for layer in keyed])
            gather_launch(memory, pages, 0, rows, layers=table).run()
            return
        for layer, row in zip(keyed, rows, strict=True):
            gather_pages(memory, pages, offset_of[layer], row.shape[1], out=row)

    def fill(self, layers: Sequence[int], parts: torch.Tensor, pool_parts: torch.Tensor) -> None:
        """Write ``parts``, what :meth:`gather` gave on each rank (``[ranks, layers * p * bytes]``),
        to ``pool_parts``, parts of the pool's pages (int64 ``[ranks * p]``, rank after rank)."""
        keyed = self.layers_with_keys(layers)
        by_layer = parts.unflatten(1, (len(keyed), -1)).transpose(0, 1)
        rows = by_layer.reshape(len(keyed), len(pool_parts), -1).contiguous()
        if not pool_parts.is_cuda:
            for layer, row in zip(keyed, rows.view(torch.int64), strict=True):
                self._pools[layer].view(torch.int64).index_copy_(0, pool_parts, row)
            return
        # For the kernel each layer's rows are at an offset in pages of one row.
        planes, addresses, _, aligned = self._table(keyed, [0] * len(keyed))
        pages = torch.arange(len(pool_parts), device=rows.device)
        offsets = torch.arange(len(keyed), device=rows.device) * rows[0].numel()
        aligned = alignment(aligned, rows.shape[2])
        table = LayerTable(planes, addresses, offsets, aligned)
        pool = [planes[0][:, None, None]]
        gather_planes_launch(rows.flatten(0, 1), pages, 0, pool, pool_parts, table).run()

    def rows(self, layer: int) -> Iterator[torch.Tensor]:
        """Yields a layer's pool with a row for each slot, uint8 ``[slots, bytes]``; nothing without
        keys. The rows of all slots of a page together are its keys and scales."""
        if layer in self._pools:
            yield self._pools[layer].unflatten(1, (self._part_tokens, -1)).flatten(0, 1)

    def read_parts(self, layer: int, pool_parts: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yields a layer's keys in ``pool_parts``, uint8 ``[p, bytes]``; nothing without keys."""
        if layer in self._pools:
            yield self._pools[layer][pool_parts]

    def _table(self, layers: Sequence[int], offsets: Sequence[int]) -> LayerTable:
        """Addresses of the pools of ``layers`` and their offsets in pages, for kernels; cached."""
        key = layers[0], len(layers), offsets[0]
        if key not in self._tables:
            self._tables[key] = LayerTable.of([(self._pools[one],) for one in layers], offsets)
        return self._tables[key]
