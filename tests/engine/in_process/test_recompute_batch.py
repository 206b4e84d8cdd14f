"""A pass of a recomputation, as SGLang's attention sees it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_context import get_attn_backend, has_forward_context

from hcache_backend.ranks import Refused
from hcache_backend.restore.recompute import RecomputeRefused, TokenSpan
from hcache_backend.sglang.passes import (
    ATTENTION_BACKENDS,
    NO_REQUEST,
    attending_by,
    make_attention,
    make_recomputer,
)

CHUNK = 4


def kv_table(pages: Any, batch: Any) -> Any:
    """The pages of a batch, as the default backend of Blackwell asks SGLang for them."""
    if hasattr(pages, "read_table"):
        return pages.read_table(batch.kv_loc_plan, rows=batch.batch_size)
    return pages.index_table_for_batch(batch)


class Backend:
    """Notes what it plans: the slots of the sequence, and how many of its tokens are new."""

    def __init__(self, pages: KVIndexTranslator) -> None:
        self.pages = pages
        self.planned: list[tuple[list[int], list[int], int]] = []

    def init_forward_metadata(self, batch: Any) -> None:
        table = kv_table(self.pages, batch)
        [row], [seen] = table.row_ids.tolist(), batch.seq_lens.tolist()
        [before], [new] = batch.extend_prefix_lens.tolist(), batch.extend_seq_lens.tolist()
        assert (batch.seq_lens_cpu.tolist(), batch.seq_lens_sum) == ([seen], seen)
        assert (batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu) == ([before], [new])
        assert batch.extend_start_loc.tolist() == [0] and before + new == seen
        assert batch.extend_num_tokens == new and batch.forward_mode.is_extend()
        assert row == NO_REQUEST
        self.planned.append((table.ids[row, :seen].tolist(), batch.out_cache_loc.tolist(), new))


@pytest.mark.parametrize("substitute", [None, "other"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("chunk", "prefill"), [(CHUNK, -1), (CHUNK, 100), (100, CHUNK)])
def test_attention_finds_a_sequence_in_the_row_of_no_request(
    chunk: int, prefill: int, broken: bool, substitute: str | None, monkeypatch: MonkeyPatch
) -> None:
    pool = ReqToTokenPool(4, 32, "cpu", enable_memory_saver=False)
    assert NO_REQUEST not in pool.free_slots
    pool.req_to_token[1:] = 77  # of requests
    pages = KVIndexTranslator(
        req_to_token=pool.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )
    backend = Backend(pages)
    monkeypatch.setitem(ATTENTION_BACKENDS, "other", lambda of: backend)

    def forward(token_ids: torch.Tensor, positions: torch.Tensor, batch: Any) -> None:
        assert get_attn_backend() is backend
        assert positions.tolist() == [len(keys) - len(token_ids) + i for i in range(len(token_ids))]
        if broken:
            raise MemoryError

    runner = SimpleNamespace(
        attn_backend=backend if substitute is None else None,
        kv_index_translator=pages,
        req_to_token_pool=pool,
        server_args=SimpleNamespace(chunked_prefill_size=prefill),
        model=SimpleNamespace(forward=forward),
    )
    kvcache = SimpleNamespace(start_layer=0, layer_num=2, dtype=torch.float32)
    other = None if substitute is None else make_attention(runner, substitute)
    recomputer = make_recomputer(runner, kvcache, chunk, other)
    prefix, slots = torch.arange(16, 20), torch.arange(8, 14)
    keys = prefix.tolist() + slots.tolist()[:CHUNK]
    span = TokenSpan(np.arange(6), prefix)
    with pytest.raises(MemoryError if broken else RecomputeRefused):  # this model never attends
        recomputer.recompute(2, slots, [span])
    assert backend.planned == [(keys, slots.tolist()[:CHUNK], CHUNK)]
    assert not pool.req_to_token[NO_REQUEST].any() and (pool.req_to_token[1:] == 77).all()
    assert not has_forward_context()
    assert vars(backend).get("prefill_attention_backend_str") == substitute


def test_a_backend_that_has_no_memory_is_refused_with_its_size(monkeypatch: MonkeyPatch) -> None:
    def make(runner: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", make)
    with pytest.raises(Refused, match=r"'triton' cannot be made: .* Tried to allocate 2\.00 MiB"):
        make_attention(SimpleNamespace(), "triton")


def test_only_passes_of_the_check_attend_by_another_backend() -> None:
    runner = SimpleNamespace(attn_backend="own")
    with pytest.raises(MemoryError), attending_by(runner, "other"):
        assert runner.attn_backend == "other"
        raise MemoryError
    with attending_by(runner, None):
        assert runner.attn_backend == "own"
    assert runner.attn_backend == "own"
