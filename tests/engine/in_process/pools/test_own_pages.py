"""Our own pages through the store: K and V of any rank's heads, hidden states of its tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hcache_backend import HCacheStorage
from hcache_backend.config import ConfigError
from hcache_backend.format.envelope import key_bytes
from hcache_backend.format.page import RECOMPUTED, PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE, Shard
from hcache_backend.host.segments import KVSegments, head_groups, shard_of_heads
from hcache_backend.sglang.arguments import check_tp_lcm_size
from hcache_backend.sglang.runtime import Runtime
from tests.engine.in_process.storage_config import storage_config

PAGE, PAGES, HEADS, DIM, WIDTH = 8, 6, 4, 16, 32
KEYS = [f"{i:064x}" for i in range(PAGES)]
K, V = torch.randn(2, PAGES * PAGE, HEADS, DIM)
HIDDEN = torch.randn(PAGES * PAGE, WIDTH)


class Server:
    """One tensor-parallel rank: its KV pool, and a host pool of own pages.

    Layer 0 is recomputed, of layer 1 hidden states are stored (where there are any), of layer 2
    K and V.
    """

    layout = "page_first"
    size = PAGES * PAGE

    def __init__(self, shard: Shard, groups: int, *, hidden: bool) -> None:
        heads = slice(shard.number * HEADS // shard.of, (shard.number + 1) * HEADS // shard.of)
        self.k, self.v = K[:, heads], V[:, heads]
        self.kvcache = SimpleNamespace(
            k_buffer=[torch.zeros_like(self.k) for _ in range(3)],
            v_buffer=[torch.zeros_like(self.v) for _ in range(3)],
        )
        self.kv = KVSegments(self.kvcache, (2,), PAGE, shard, groups)
        stored = hidden_layer(PAGE, 4 * WIDTH, WIDTH) if hidden else RECOMPUTED
        layers = (RECOMPUTED, stored, self.kv.stored_layer(2))
        self.page_layout = PageLayout(PAGE, layers, shard)
        self.page_size = PAGE
        self.size_per_token = -(-self.page_layout.page_bytes // PAGE)
        self.memory = torch.zeros((PAGES, self.page_layout.stride), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        length, numbers = self.page_layout.page_bytes, (indices[::PAGE] // PAGE).tolist()
        pages = [self.memory[page, :length] for page in numbers]
        return [page.data_ptr() for page in pages], [page.numel() for page in pages]

    def compute(self, pages: Sequence[int], namespace: bytes) -> None:
        """Put the model's K, V and hidden states into pages, and seal them."""
        self.kvcache.k_buffer[2].copy_(self.k)
        self.kvcache.v_buffer[2].copy_(self.v)
        layout, at = self.page_layout, torch.tensor(pages)
        for page in pages:
            here = self.memory[page].numpy()
            layout.token_ids(here)[:] = page
            if layout.segment_bytes[1]:
                rows = HIDDEN[page * PAGE :][list(layout.kept)]
                self.memory[page, layout.segment(1)] = rows.view(torch.uint8).flatten()
        slots = indices(pages)
        self.kv.save(layout, self.memory, at, slots)
        for page in pages:
            layout.seal(self.memory[page].numpy(), namespace, key_bytes(KEYS[page]), b"writer-1")

    def assert_restored(self, pages: Sequence[int], namespace: bytes) -> None:
        """What was read is the model's, and its header proves whose it is."""
        layout, at = self.page_layout, torch.tensor(pages)
        slots = indices(pages)
        copy = self.kv.restored_layer(2).copy
        assert copy is not None
        for buffer in (self.kvcache.k_buffer[2], self.kvcache.v_buffer[2]):
            buffer.fill_(-1)
        copy([2], self.memory, at, layout.segment_offsets[2:3], slots)
        assert torch.equal(self.kvcache.k_buffer[2][slots], self.k[slots])
        assert torch.equal(self.kvcache.v_buffer[2][slots], self.v[slots])
        for page in pages:
            here = self.memory[page].numpy()
            key, ids = key_bytes(KEYS[page]), np.full(PAGE, page, np.int32)
            assert layout.problem(here, namespace, key, ids, segments=False) is None
            held = self.kv.read_plain((2,), indices([page]))
            assert self.kv.holds(self.memory[page, layout.segment(2)], held, 0, layout, 2)
            if layout.segment_bytes[1]:
                rows = HIDDEN[page * PAGE :][list(layout.kept)].flatten()
                there = self.memory[page, layout.segment(1)].view(torch.float32)
                assert torch.equal(there, rows)


def indices(pages: Sequence[int]) -> torch.Tensor:
    return (torch.tensor(pages)[:, None] * PAGE + torch.arange(PAGE)).flatten()


@contextmanager
def opened(folder: Path, runtime: Runtime, server: Server, **rank: Any) -> Iterator[HCacheStorage]:
    shard = server.page_layout.shard
    rank = {"tp_rank": shard.number, "tp_size": shard.of} | rank
    storage = HCacheStorage(storage_config(folder, **rank))
    runtime.pages.kind = "kv"
    runtime.weights.page_fields = {"any_ranks": True, "layout": server.page_layout.form}
    try:
        storage.register_mem_pool_host(server)
        storage.register_mem_host_pool_v2(server, PoolName.KV)
        yield storage
    finally:
        storage.close()


@pytest.mark.parametrize("hidden", [False, True], ids=["K and V", "mixed"])
def test_any_number_of_ranks_reads_any_others(
    hidden: bool, tmp_path: Path, runtime: Runtime
) -> None:
    for number, ranks in enumerate((1, 2, 4, 1)):
        for rank in range(ranks):
            shard = shard_of_heads(rank, ranks)
            groups = head_groups(4, shard, ranks)
            server = Server(shard, groups, hidden=hidden)
            with opened(tmp_path, runtime, server, tp_lcm_size=4) as storage:
                namespace = runtime.weights.page_namespace()
                before = list(range(number))
                if before:
                    assert storage.batch_exists(KEYS[: number + 1]) == number
                    assert storage.batch_get_v1(KEYS[:number], indices(before)) == [True] * number
                    server.assert_restored(before, namespace)
                server.compute([number], namespace)
                storage.batch_set_v1([KEYS[number]], indices([number]))
    assert len(list(tmp_path.glob("pages/??/*.page"))) == 1 + 2 + 4 + 1, "nothing twice"


@pytest.mark.parametrize(
    ("wanted", "ranks", "heads", "groups"),
    [(None, 1, 8, 1), (None, 2, 4, 2), (8, 2, 4, 8), (4, 4, 2, 4), (3, 3, 2, 1), (None, 16, 1, 1)],
)
def test_pages_have_a_group_of_heads_for_each_rank_or_as_many_as_tp_lcm_size(
    wanted: int | None, ranks: int, heads: int, groups: int
) -> None:
    shards = [shard_of_heads(rank, ranks) for rank in range(ranks)]
    assert shards == [Shard(rank, ranks) for rank in range(ranks)] or set(shards) == {WHOLE}
    assert {head_groups(wanted, shard, ranks) for shard in shards} == {groups}
    if wanted is not None:
        check_tp_lcm_size(wanted, ranks, heads, own_pages=True)


@pytest.mark.parametrize(
    ("asked", "ranks", "heads", "of_own_pages", "of_plain_pages"),
    [
        (3, 1, 6, "1, 2", ""),
        (16, 1, 16, "1, 2, 4, 8", ""),
        (6, 3, 2, "3", ""),
        (4, 2, 1, "2", "2"),
        (2, 4, 8, "4, 8", "4, 8, 16, 32"),
        (3, 1, 16, "1, 2, 4, 8", "1, 2, 4, 8, 16"),
        (4, 3, 2, "3", "3, 6"),
        (0, 1, 4, "1, 2, 4", "1, 2, 4"),
        ("2", 1, 4, "1, 2, 4", "1, 2, 4"),
        (2.0, 1, 4, "1, 2, 4", "1, 2, 4"),
    ],
)
def test_groups_that_do_not_divide_the_heads_are_refused_with_those_that_do(
    asked: object, ranks: int, heads: int, of_own_pages: str, of_plain_pages: str
) -> None:
    """Plain pages divide into any number that divides the heads."""
    for pages, allowed in (("own", of_own_pages), ("plain", of_plain_pages)):
        if not allowed:
            check_tp_lcm_size(asked, ranks, heads, own_pages=pages == "own")
            continue
        with pytest.raises(ConfigError) as refused:
            check_tp_lcm_size(asked, ranks, heads, own_pages=pages == "own")
        assert str(refused.value) == (
            f"extra config: 'tp_lcm_size' is {asked!r}; for {pages} pages with tensor-parallel "
            f"size {ranks} and {heads} KV heads per rank it can be {allowed}"
        )


def test_groups_cannot_change_while_a_server_runs(tmp_path: Path, runtime: Runtime) -> None:
    server = Server(WHOLE, 2, hidden=False)
    with opened(tmp_path, runtime, server, tp_lcm_size=2):
        pass
    with (
        pytest.raises(ConfigError, match=r"'tp_lcm_size' is 4 but the pages .* have 2 groups"),
        opened(tmp_path, runtime, server, tp_lcm_size=4),
    ):
        pass
