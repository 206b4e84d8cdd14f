"""Pages of latents from SGLang's pool of MLA: what each rank keeps, and the start's checks."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from hcache_backend.checks.round_trip import check_copies
from hcache_backend.config import HCacheConfig
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE, Shard, units_of
from hcache_backend.host.segments import KVSegments
from hcache_backend.ranks import Refused
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.sglang import weights
from hcache_backend.start.build import OwnPagesStrategy
from hcache_backend.start.capabilities import Server
from hcache_backend.start.page_plan import encoded_share, kv_bytes_per_token, kv_codec
from hcache_kernels.codecs import LATENT, Cut, make_segment_codec

LAYERS, PAGE, RANK, ROPE = 3, 16, 40, 24
SHARES = [Shard(number, of) for of in (1, 2, 4, 8) for number in range(of)]
CODECS = [("none", torch.float32), ("none", torch.uint8), ("exp4", torch.bfloat16)]
KEYS = 64 * (128 + 4)  # bytes of index keys and scales of a page
SKIPS = [False, True, False]  # layers that choose no tokens of their own


def latents(dtype: torch.dtype = torch.bfloat16, page: int = PAGE) -> Any:
    """SGLang's pool, with latents of ordinary size, and a few channels of a hundred times that."""
    asked = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    pool = MLATokenToKVPool(8 * page, page, asked, RANK, ROPE, LAYERS, "cpu", False)
    for rows in pool.kv_buffer:
        values = torch.randn(rows.shape)
        values[..., ::13] *= 100
        rows[:] = values.to(asked).view(rows.dtype)
    return pool


def sparse(dtype: torch.dtype = torch.bfloat16) -> Any:
    """SGLang's pool of DSA, with latents as above (in FP8 packed with scales and RoPE part), and
    index keys of random bytes."""
    of_latents = latents(dtype, 64)
    asked, width = of_latents.dtype, 16 if dtype == torch.uint8 else 0
    pool = DSATokenToKVPool(
        size=8 * 64,
        page_size=64,
        kv_lora_rank=RANK,
        dtype=asked,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=RANK + ROPE + width,
        index_buf_size=8 * 64,
        skip_topk_layers=SKIPS,
    )
    for rows, others in zip(pool.kv_buffer, of_latents.kv_buffer, strict=True):
        rows[..., : RANK + ROPE] = others
    for keys in pool.index_k_with_scale_buffer:
        keys[:] = torch.randint_like(keys, 256)
    return pool


POOLS = [latents, sparse]


def buffers(pool: Any) -> list[torch.Tensor]:
    return [*pool.kv_buffer, *getattr(pool, "index_k_with_scale_buffer", ())]


def pages_of(pool: Any, shard: Shard, codec: str) -> tuple[PageLayout, KVSegments, torch.Tensor]:
    """All pages of the pool but the first, as a rank keeps them; the last one stays empty."""
    kv = KVSegments(pool, range(LAYERS), pool.page_size, shard, shard.of, codec)
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], shard)
    memory = torch.zeros((9, layout.stride), dtype=torch.uint8)
    slots = torch.arange(pool.page_size, 9 * pool.page_size)
    fits = kv.save(layout, memory, torch.arange(8), slots)
    assert fits is None or fits.all()
    return layout, kv, memory


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize(
    "make", [latents, partial(latents, page=64), sparse], ids=["short", "long", "keys"]
)
def test_units_of_ranks_are_those_of_the_page(codec: str, dtype: torch.dtype, make: Any) -> None:
    """So any number of ranks reads what another number wrote."""
    pool = make(dtype)
    of_page = 8 * (LAYERS + SKIPS.count(False) * (make is sparse))
    whole, _, want = pages_of(pool, WHOLE, codec)
    for shard in SHARES:
        layout, _, kept = pages_of(pool, shard, codec)
        assert layout.table == whole.table and layout.form == whole.form
        units = units_of(layout.table, shard)[1:]
        assert len(units) == of_page // shard.of
        for _, _, there, here, length in units:
            part = kept[:, here : here + length]
            assert torch.equal(part, want[:, there : there + length])


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize("of", [1, 2, 8])
@pytest.mark.parametrize("make", POOLS)
def test_latents_of_all_ranks_come_back(codec: str, dtype: torch.dtype, of: int, make: Any) -> None:
    pool = make(dtype)
    page, before = pool.page_size, [rows.clone() for rows in buffers(pool)]
    ranks = [pages_of(pool, Shard(number, of), codec) for number in range(of)]
    layout, kv, memory = ranks[0]

    def gather(shards: torch.Tensor, fetch: Any) -> None:
        """The same part of a restore, from the pages of every rank."""
        for (_, _, pages), own in zip(ranks, shards, strict=True):
            memory[:] = pages
            fetch(own)

    mine = memory.clone()
    exchange: Any = SimpleNamespace(number=0, shards=of, on_scheduler_thread=False, gather=gather)
    restored = [kv.restored_layer(layer) for layer in kv.layers]
    pipeline = RestorePipeline(
        *(memory, layout, restored, 2 * page, "cpu"), exchange=exchange if of > 1 else None
    )
    ranks[0] = layout, kv, mine
    order = torch.tensor([5, 2, 7, 1])
    slots = (order[:, None] * page + torch.arange(page)).flatten()
    for rows in buffers(pool):
        if len(rows):
            rows[slots if rows.dim() == 3 else order] = 0
    pipeline.start((order - 1).numpy(), slots).synchronize()
    for rows, held in zip(buffers(pool), before, strict=True):
        assert torch.equal(rows.view(torch.uint8), held.view(torch.uint8))


def try_copies(
    shard: Shard, codec: str, dtype: torch.dtype, broken: str = "", make: Any = latents
) -> None:
    pool = make(dtype)
    kv = KVSegments(pool, range(LAYERS), pool.page_size, shard, shard.of, codec)
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], shard)
    if broken == "save":
        kv.save = lambda *_: None  # type: ignore[method-assign]
    elif broken == "fill":
        fill = kv._fill
        kv._fill = lambda layer, segments, at, slots: fill(layer, segments, at, slots.flip(0))  # type: ignore[method-assign]
    elif broken == "keys":
        kv.keys.copy = lambda *_, **how: None  # type: ignore[method-assign]
        kv.keys.fill = lambda *_: None  # type: ignore[method-assign]
    before = [rows.clone() for rows in buffers(pool)]
    try:
        check_copies(layout, kv)
    finally:
        for rows, held in zip(buffers(pool), before, strict=True):
            assert torch.equal(rows.view(torch.uint8), held.view(torch.uint8))


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize("shard", SHARES[:7:2], ids=str)
def test_a_start_tries_this_ranks_tokens(shard: Shard, codec: str, dtype: torch.dtype) -> None:
    try_copies(shard, codec, dtype)
    with pytest.raises(Refused, match="K or V of layer 0 come back"):
        try_copies(shard, codec, dtype, "save")
    if shard.of > 1:
        with pytest.raises(Refused, match="K or V of layer 0 come back"):
            try_copies(shard, codec, dtype, "fill")


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize("shard", SHARES[:7:2], ids=str)
def test_a_start_tries_index_keys(shard: Shard, codec: str, dtype: torch.dtype) -> None:
    try_copies(shard, codec, dtype, make=sparse)
    with pytest.raises(Refused, match="K or V of layer 0 come back"):
        try_copies(shard, codec, dtype, "save", make=sparse)
    with pytest.raises(Refused, match="an indexer's keys come back from host memory as something"):
        try_copies(shard, codec, dtype, "keys", make=sparse)


@pytest.mark.parametrize(("codec", "dtype"), CODECS)
@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2)], ids=str)
def test_a_check_in_service_compares_index_keys(
    shard: Shard, codec: str, dtype: torch.dtype
) -> None:
    pool = sparse(dtype)
    layout, kv, memory = pages_of(pool, shard, codec)
    slots = torch.arange(64, 128)
    for layer in kv.layers:
        held, segment = kv.read_plain([layer], slots), memory[0, layout.segment(layer)].clone()
        assert len(held) == kv.bytes_of(layer)
        assert all(kv.holds(segment, held, part, layout, layer) for part in range(kv.parts))
        if not kv.keys.bytes_of(layer):
            continue  # of this one the last byte may stand for nothing
        segment[-1] ^= 1
        right = [kv.holds(segment, held, part, layout, layer) for part in range(kv.parts)]
        assert not all(right)


def test_bytes_of_a_token_with_index_keys() -> None:
    pool, layers = sparse(), LAYERS * (RANK + ROPE) * 2
    assert kv_bytes_per_token(pool) == layers + SKIPS.count(False) * KEYS // 64
    server = Server(None, HCacheConfig(codec="none"), pool)
    assert encoded_share(server, 1) == 1.0
    assert kv_codec(replace(server, config=HCacheConfig()), WHOLE, 1, 1) == "exp4"


@pytest.mark.parametrize(
    ("codec", "dtype", "used", "why"),
    [
        ("auto", torch.bfloat16, "exp4", ""),
        ("auto", torch.float32, "none", ""),
        ("auto", torch.uint8, "none", ""),
        ("exp4", torch.float16, "none", "latents in bfloat16, not torch.float16"),
        ("int8", torch.bfloat16, "none", "'int8' takes no latents of MLA"),
        ("krul", torch.bfloat16, "none", "'krul' takes no latents of MLA"),
    ],
)
def test_the_codec_of_latents(
    codec: str, dtype: torch.dtype, used: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = latents(dtype)
    server = Server(None, HCacheConfig(codec=codec), pool)
    assert kv_codec(server, WHOLE, 1, 1) == used
    assert why in caplog.text
    shard = encoded_share(replace(server, kvcache=latents(dtype, 64)), 1)
    assert shard == pytest.approx(0.77 if used == "exp4" else 1.0, abs=0.01)
    assert kv_bytes_per_token(pool) == LAYERS * (RANK + ROPE) * dtype.itemsize


def test_a_latent_that_no_code_holds_makes_its_page_unfit() -> None:
    pool = latents()
    pool.kv_buffer[1][3 * PAGE + 9] = (
        torch.randint(-(1 << 15), 1 << 15, (1, RANK + ROPE)).to(torch.int16).view(torch.bfloat16)
    )
    for shard, lost in ((WHOLE, True), (Shard(0, 2), False), (Shard(1, 2), True)):
        kv = KVSegments(pool, range(LAYERS), PAGE, shard, shard.of, "exp4")
        layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], shard)
        memory = torch.zeros((8, layout.stride), dtype=torch.uint8)
        fits = kv.save(layout, memory, torch.arange(8), torch.arange(8 * PAGE))
        assert fits is not None
        want = torch.ones_like(fits)
        want[1, 3] = not lost
        assert torch.equal(fits, want)


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_latents_with_a_few_loud_channels_fit(spread: float) -> None:
    """As wide as DeepSeek's: 512 values behind a norm, and 64 with RoPE."""
    torch.manual_seed(0)
    scales = (spread * torch.randn(512)).exp()
    scales[::100] *= 100
    rows = torch.cat((torch.randn(64 * 200, 512) * scales, 4 * torch.randn(64 * 200, 64)), 1)
    codec = make_segment_codec("exp4", Cut(576, 8, 1, 8), 576, torch.bfloat16, LATENT)
    _, fits = codec.encode_reference([rows.bfloat16().view(-1, 1, 576)], torch.arange(200))
    assert fits.all()


def test_ranks_share_no_page_that_eight_does_not_divide() -> None:
    pool = latents(page=12)
    kv = KVSegments(pool, range(LAYERS), 12, WHOLE, 1, "none")
    [segment] = kv.stored_layer(0).segments
    assert segment.groups == 1 and not kv.shares_tokens


@pytest.mark.parametrize(
    ("kind", "components", "own"),
    [
        (MLATokenToKVPool, {ComponentType.FULL}, True),
        (DSATokenToKVPool, {ComponentType.FULL}, True),
        (DSATokenToKVPool, {ComponentType.FULL, ComponentType.SWA}, False),
    ],
)
def test_which_latents_have_own_pages(
    kind: type, components: Any, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    strategy = OwnPagesStrategy(SimpleNamespace(), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(strategy, "_keep_plain", lambda why, expected: said.append(why))
    assert strategy.matches(object.__new__(kind), components) == own
    assert said == ([] if own else ["the KV pool is a DSATokenToKVPool (FULL, SWA)"])


@pytest.mark.parametrize("device", ["cuda", "cpu", "xpu", "hip"])
def test_devices_that_write_index_keys_by_other_rules_share_no_pages(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if device == "hip" else None)
    runner = SimpleNamespace(device="cuda" if device == "hip" else device, server_args=None)
    found = weights._index_keys({"index_topk": 64}, runner)
    other = {"index_keys": {"device": device, "fused": "None"}}
    assert found == ({} if device in ("cuda", "cpu") else other)
    assert weights._index_keys({}, runner) == {}
