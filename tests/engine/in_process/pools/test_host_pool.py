"""Our host pool under SGLang's own base class: logical indices and their memory."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host import common as pool_host_common

from hcache_backend import streams
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.format.page import PageLayout, hidden_layer
from hcache_backend.format.units import WHOLE
from hcache_backend.host.layout import Layout
from hcache_backend.host.segments import KVSegments
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.ranks import Refused
from hcache_backend.sglang.host_pool import HostPages, OwnPagesPool
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start import page_plan
from hcache_backend.start.page_plan import (
    kv_bytes_per_token,
    plan_host_pages,
    take_staging,
)
from hcache_kernels.codecs import ExactCodec
from tests.engine.in_process.pools.host_pools import mha
from tests.engine.in_process.pools.test_pool_pages import KEYS, opened, pages
from tests.integrity import assert_sound_arena
from tests.kit.host import LAYERS, PAGE, kv_pool

WIDTH = 8
CODEC = ExactCodec.of_rows(WIDTH, torch.float32)
LAYOUT = PageLayout(PAGE, (hidden_layer(PAGE, CODEC.row_bytes, WIDTH),) * LAYERS)


SLOTS = torch.arange(3 * PAGE, 4 * PAGE)
"""Of a device page."""


def device_pool(pages: int = 8) -> Any:
    return kv_pool(1, WIDTH, dtype=torch.float32, pages=pages)


def new_pool(**options: bool) -> Any:
    device = device_pool()
    return OwnPagesPool(
        device,
        PAGE,
        "page_first",
        page_layout=LAYOUT,
        pages=HostPages(host=6, shadows=9),
        kv=KVSegments(device, (), PAGE, WHOLE, 1),
        allocator_type="default",
        **{"pin_memory": False, **options},
    )


@pytest.fixture
def pool() -> Any:
    made, staging = new_pool(), Staging(LAYERS, WIDTH, CODEC.dtype, 32, "cpu")
    capture = StagedCapture(made.arena, made.kv_buffer, staging, range(LAYERS), CODEC)
    made.connect(None, capture)
    return made


def settle(pool: Any) -> None:
    pool._capture.transfers().synchronize()
    pool._capture.ledger.settle()


def backed_up(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of layer 1 of a forward pass over a device page, and the host indices of its backup."""
    capture, hidden = pool._capture, torch.randn(LAYERS, PAGE, WIDTH)
    capture.ledger.pass_begins()
    step = capture.begin(SLOTS, SLOTS, SLOTS)
    for layer in range(LAYERS):
        capture.take(layer, hidden[layer])
    assert capture.end(step, replayed=False)
    settle(pool)
    indices = pool.alloc(PAGE)
    before = pool.get_page_buffer_meta(indices)
    capture.back_up(SLOTS.numpy(), pool.page_ids(indices))
    assert pool.get_page_buffer_meta(indices) != before
    return hidden[1], indices


def test_memory_is_pinned_in_whole_pages_and_the_log_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One copy may not span two registrations (SGLang makes one each 256 GB)."""
    pinned: list[int | None] = []

    def pin(memory: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
        while "so far" not in caplog.text:
            threading.Event().wait(0.01)
        pinned.append(registration_granularity_bytes)

    monkeypatch.setattr(pool_host_common, "_cuda_host_register", pin)
    monkeypatch.setattr(streams, "_PROGRESS_SECONDS", 0.01)
    with caplog.at_level("INFO", "hcache"):
        new_pool(pin_memory=True)
    assert pinned == [LAYOUT.stride]
    assert "hcache: pinning 0.0 GB: 0 s so far" in caplog.messages


def test_hicache_gets_exactly_the_pages_that_are_its_own(pool: Any) -> None:
    assert pool.available_size() == 6 * PAGE
    assert pool.kv_buffer.shape == (15, LAYOUT.stride)
    assert pool.alloc(7 * PAGE) is None


def test_a_logical_index_stays_while_its_memory_moves(pool: Any) -> None:
    rows, indices = backed_up(pool)
    pointers, lengths = pool.get_page_buffer_meta(indices)
    page = pool.get_data_page(int(indices[0]))
    assert ([page.data_ptr()], [LAYOUT.page_bytes]) == (pointers, lengths)
    assert torch.equal(page[LAYOUT.segment(1)].view(torch.float32).view(PAGE, WIDTH), rows)
    other = torch.arange(LAYOUT.page_bytes, dtype=torch.int64).to(torch.uint8)
    pool.set_from_flat_data_page(int(indices[0]), other)
    assert torch.equal(pool.get_data_page(int(indices[0])), other)


def test_pieces_of_a_page_follow_each_other(pool: Any) -> None:
    indices = pool.alloc(2 * PAGE)
    whole, _ = pool.get_page_buffer_meta(indices)
    pool.pieces_per_page = 2
    pointers, sizes = pool.get_page_buffer_meta(indices)
    assert pointers[::2] == whole
    assert pointers[1::2] == [page + size for page, size in zip(whole, sizes[::2], strict=True)]
    assert [sum(sizes[:2]), sum(sizes[2:])] == [LAYOUT.page_bytes] * 2


def test_freeing_a_host_page_gives_rows_back_to_the_device(pool: Any) -> None:
    _, indices = backed_up(pool)
    slots = SLOTS.numpy()
    assert pool.arena.problem(slots) == "rows backed up already"
    pool.free(indices)
    assert pool.arena.problem(slots) is None
    pool.clear()
    assert pool.arena.problem(slots) == "rows not valid"
    assert pool.available_size() == 6 * PAGE
    assert_sound_arena(pool.arena)


@pytest.mark.parametrize("fits", [True, False])
def test_recomputed_rows_are_there_before_they_are_taken(fits: bool, pool: Any) -> None:
    indices = pool.alloc(PAGE)
    host_pages = pool.page_ids(indices)
    pool.arena.expect_recomputed(host_pages, np.arange(PAGE), np.arange(PAGE))
    rows = SimpleNamespace(save_rows=lambda pages: torch.tensor([fits]))
    pool.save_recomputed(host_pages, SLOTS, rows)
    pool.on_freed.append(lambda pages: pool.mark_arrived())
    pool._capture.ledger.note_loaded(SLOTS, host_pages)
    pool.free(indices)
    assert pool.arena.problem(SLOTS.numpy()) == (None if fits else "rows not valid")


def test_a_flush_waits_for_rows_that_are_on_their_way_to_pages(pool: Any) -> None:
    arrive = threading.Event()
    pool._capture._transfer.run(arrive.wait)
    on_their_way = pool._capture.transfers()
    assert not on_their_way.query()
    threading.Timer(0.1, arrive.set).start()
    pool.clear()
    assert on_their_way.query()


@pytest.mark.parametrize("pages", [8, 24, 1000])
@pytest.mark.parametrize("share", [0.1, 0.999, 1.0])
def test_too_little_host_memory_is_told_with_what_will_do(pages: int, share: float) -> None:
    device = device_pool(pages)
    alone = (int(device.k_buffer[0].shape[0]) // LAYOUT.page_size) * LAYOUT.stride
    ratio = share * alone / (device.size * kv_bytes_per_token(device))
    for size_gb, option in ((0.0, "ratio"), (share * alone / 1e9, "size")):
        with pytest.raises(Refused) as refused:
            plan_host_pages(device, LAYOUT, size_gb, ratio, 1e12, with_shadows=True)
        told = re.fullmatch(
            r"--hicache-(.*) gives (.*) GB of host memory, and the hidden states of the tokens on "
            r"the device alone take (.*) GB; --hicache-(.*) (.*) is the least that will do",
            str(refused.value),
        )
        assert told is not None, refused.value
        assert told[4] == option
        assert share == 1.0 or told[2] != told[3]
        enough = float(told[5])
        sizes = (0.0, enough) if option == "ratio" else (enough, 0.0)
        assert plan_host_pages(device, LAYOUT, *sizes, 1e12, with_shadows=True).host >= 1
        if option == "ratio":
            with pytest.raises(Refused):
                plan_host_pages(device, LAYOUT, 0, enough - 0.02, 1e12, with_shadows=True)


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Staging]:
    """Staging of a server whose longest step has so many tokens."""
    monkeypatch.setattr(page_plan, "resolved", lambda args: args)

    def take(longest: int, layers: int, recorded: int = 0, requests: int = 1) -> Staging:
        chunk = {"chunked_prefill_size": longest - requests, "speculative_algorithm": None}
        sizes = {"max_running_requests": requests, "max_total_num_tokens": 1 << 20}
        runner = SimpleNamespace(server_args=SimpleNamespace(**chunk), **sizes)
        return take_staging(runner, layers, CODEC.hidden_size, CODEC.dtype, "cpu", recorded)

    return take


class Gpu(streams.Door):
    """A CPU that has so many bytes of device memory left."""

    def __init__(self, free: float) -> None:
        self.free = free

    def free_memory(self, device: torch.device) -> float:
        return self.free


@pytest.mark.parametrize(
    ("requests", "longest", "recorded", "free", "capacity"),
    [
        pytest.param(64, 8192, 0, 8192, 512, id="two layers of a prefill"),
        pytest.param(64, 1024, 0, 8192, 128, id="two decode steps"),
        pytest.param(64, 1024, 8192, 8192, 8192, id="the largest graph"),
        pytest.param(1, 512, 32, 64, 64, id="two graphs"),
        pytest.param(1, 512, 32, 63, 32, id="room for one graph"),
    ],
)
def test_staging_holds_what_is_written_at_a_time(
    requests: int,
    longest: int,
    recorded: int,
    free: int,
    capacity: int,
    staging: Callable[..., Staging],
) -> None:
    """``free``: tokens that a quarter of the device memory holds that SGLang left."""
    with streams.through(Gpu(4 * Staging.bytes_for(32, CODEC.row_bytes, free))):
        assert staging(longest, 32, recorded=recorded, requests=requests).capacity == capacity


def test_staging_takes_a_quarter_of_what_is_left(staging: Callable[..., Staging]) -> None:
    wanted = Staging.bytes_for(LAYERS, CODEC.row_bytes, 32)
    with streams.through(Gpu(4 * wanted)):
        staged = staging(16 * LAYERS, LAYERS).staged
    assert staged.rows.nbytes + staged.marks.nbytes == wanted
    refused = "staging of 32 tokens takes .* GB of device memory that SGLang left, more than 1/4"
    with streams.through(Gpu(4 * wanted - 1)), pytest.raises(Refused, match=refused):
        staging(16 * LAYERS, LAYERS)


@pytest.mark.parametrize("tokens_only", [False, True])
def test_embeddings_that_tokens_do_not_tell_are_not_recomputed(
    tokens_only: bool, pool: Any
) -> None:
    """So where first layers are, they are not backed up."""
    model = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS)]
    capture = HiddenCapture([(layer, [layer[0]]) for layer in model])
    capture.use(pool._capture, tokens_only=tokens_only)
    hidden = torch.randn(PAGE, WIDTH)
    tokens = dict.fromkeys(("out_cache_loc", "input_ids", "positions"), SLOTS)
    batch = SimpleNamespace(**tokens, input_embeds=hidden, replace_embeds=None)

    def forward() -> SimpleNamespace:
        for layer in model:
            layer(hidden)
        return SimpleNamespace(can_run_graph=False)

    with torch.no_grad():
        capture.forward(batch, forward)
    settle(pool)
    problem = "rows not valid" if tokens_only else None
    assert pool.arena.problem(SLOTS.numpy()) == problem


def test_scales_of_fp8_tell_own_and_plain_pages_apart(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set as SGLang's models set those of ``--quantization-param-path``: as numbers, which are not
    among the weights."""
    monkeypatch.setattr(
        page_plan, "attention_ranks", lambda: SimpleNamespace(world_size=1, rank_in_group=0)
    )
    attention = runtime.runner.model.attention = RadixAttention(4, 8, 1.0, 4, layer_id=0)
    methods = Restore(None, None, Partition(0, 0, LAYERS), chunk_tokens=64)
    kvcache = kv_pool(4, 8, dtype=torch.float8_e4m3fn)
    kv = KVSegments(kvcache, range(LAYERS), kvcache.page_size, WHOLE, 1)
    layout = Layout(kvcache, methods, WHOLE, kv)
    plain, own = mha("page_first"), set()
    for scale, found in ((None, 0), (1.5, 0), (2.0, 0), (1.5, 1), (None, 1)):
        attention.k_scale = attention.v_scale = scale
        fields = page_plan.namespace_fields(layout, runtime.runner)
        own.add(runtime.weights.namespace_of(runtime.weights.present, **fields))
        with opened(tmp_path, plain, PoolName.KV) as storage:
            assert storage.batch_exists(KEYS[:1]) == found
            storage.batch_set_v1(KEYS[:1], pages(plain, 0, 1))
    assert len(own) == 3
