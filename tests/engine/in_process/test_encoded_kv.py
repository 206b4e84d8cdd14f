"""Encoded K and V in host memory: what comes back, and what becomes of units that do not fit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hcache_backend.engine.host_pool import HostPages, OwnPagesPool
from hcache_backend.engine.kv_segments import KVSegments
from hcache_backend.engine.layer_methods import LayerMethods
from hcache_backend.engine.loads import LoadQueue, QueuedLoad
from hcache_backend.engine.service_check import KVChecks
from hcache_backend.engine.startup.agreement import Refused
from hcache_backend.engine.startup.codec_choice import kv_codec
from hcache_backend.engine.startup.copy_check import check_copies
from hcache_backend.engine.startup.page_plan import PagePlan, plan_host_pages
from hcache_backend.page import RECOMPUTED, PageLayout
from hcache_backend.partition.costs import Partition
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.units import WHOLE, Share
from hcache_kernels.codecs import UnsupportedRows

LAYERS, PAGE, DEVICE_PAGES, HOST_PAGES = 2, 16, 8, 6


def kv_pool(
    heads: int = 2,
    dim: int = 16,
    page: int = PAGE,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    """What is asked of SGLang's pool."""
    slots = (DEVICE_PAGES + 1) * page
    k, v = (
        [torch.randn(slots, heads, width).to(dtype) for _ in range(LAYERS)]
        for width in (dim, v_dim or dim)
    )
    return SimpleNamespace(
        k_buffer=k,
        v_buffer=v,
        layer_num=LAYERS,
        size=DEVICE_PAGES * page,
        page_size=page,
        store_dtype=dtype,
        start_layer=0,
        end_layer=LAYERS - 1,
        device="cpu",
        layer_shard_enabled=False,
    )


def slots_of(*pages: int, size: int = PAGE) -> torch.Tensor:
    return torch.cat([torch.arange(size) + size * page for page in pages])


def bits(device: Any, *pages: int) -> torch.Tensor:
    """K and V of pages, all layers, as they stand in memory."""
    buffers = (*device.k_buffer, *device.v_buffer)
    return torch.stack([buffer[slots_of(*pages)].view(torch.int16) for buffer in buffers])


def make_unfit(device: Any, page: int, layer: int) -> None:
    """Any bits at all: infinities and NaNs, too."""
    values = device.v_buffer[layer]
    values[slots_of(page)] = (
        torch.randint(-(1 << 15), 1 << 15, values[:PAGE].shape).to(torch.int16).view(torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("page", "heads", "dim", "share", "groups"),
    [
        (16, 2, 16, WHOLE, 1),
        (16, 2, 16, WHOLE, 2),
        (64, 2, 16, Share(1, 4), 8),  # a quarter of the heads, in two groups
        (128, 2, 512, WHOLE, 1),  # two units
    ],
)
def test_encoded_segments_come_back_to_other_slots_bit_for_bit(
    page: int, heads: int, dim: int, share: Share, groups: int
) -> None:
    device = kv_pool(heads, dim, page)
    kv = KVSegments(device, (1,), page, share, groups, "exp4")
    stored = kv.stored_layer(1)
    plain = KVSegments(device, (1,), page, share, groups).stored_layer(1)
    assert stored.codec == "exp4.2"
    for encoded, segment in zip(stored.segments, plain.segments, strict=True):
        assert encoded.length <= 0.775 * segment.length
        assert encoded[1:] == segment[1:]
    layout = PageLayout(page, (RECOMPUTED, stored), share)
    memory = torch.zeros((5, layout.page_bytes), dtype=torch.uint8)
    pages, slots = torch.tensor([4, 2]), slots_of(3, 1, size=page)
    fits = kv.save(layout, memory, pages, slots)
    assert fits is not None and fits.tolist() == [[True, True]]
    assert not memory[[0, 1, 3]].any()
    assert kv.differs(layout, memory[2], kv.layers, kv.held(kv.layers, slots[page:])) is None
    assert kv.differs(layout, memory[4], kv.layers, kv.held(kv.layers, slots[page:])) == 1
    want = [buffer[slots].clone() for buffer in (device.k_buffer[1], device.v_buffer[1])]
    others = [device.k_buffer[0].clone(), device.k_buffer[1][: 4 * page].clone()]
    copy = kv.restored_layer(1).copy
    assert copy is not None
    target = slots_of(6, 5, size=page)
    copy(memory, pages, layout.segment_offsets[1], target)
    assert torch.equal(device.k_buffer[1][target], want[0])
    assert torch.equal(device.v_buffer[1][target], want[1])
    assert torch.equal(device.k_buffer[0], others[0])
    assert torch.equal(device.k_buffer[1][: 4 * page], others[1])


class Ack(NamedTuple):
    """The parts of SGLang's ``HiCacheAck`` that are ours."""

    start_event: Any
    finish_event: Any


class Transferred:
    """SGLang's events of a transfer."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, later: Transferred) -> float:
        return 2.0


class Host:
    """A host pool of six pages over a device's of eight, with ``overflow`` pages of overflow."""

    def __init__(self, overflow: int = 2) -> None:
        self.device = kv_pool()
        self.kv = KVSegments(self.device, range(LAYERS), PAGE, WHOLE, 1, "exp4")
        layout = PageLayout(PAGE, tuple(map(self.kv.stored_layer, range(LAYERS))))
        self.pool = OwnPagesPool(
            self.device,
            PAGE,
            "page_first",
            page_layout=layout,
            pages=HostPages(HOST_PAGES, 0, overflow),
            kv=self.kv,
            pin_memory=False,
            allocator_type="default",
        )
        assert self.pool.overflow is not None
        self.overflow = self.pool.overflow
        layers = [self.kv.restored_layer(layer) for layer in range(LAYERS)]
        self.pipeline = RestorePipeline(self.pool.kv_buffer, layout, layers, 8 * PAGE, "cpu")
        methods = LayerMethods(Partition(0, 0, LAYERS), None, None, 8 * PAGE)
        self.loads = LoadQueue(self.pool.arena, self.pipeline, methods, None, "cpu")
        self.pool.use(self.loads)

    def back_up(self, *pages: int) -> tuple[torch.Tensor, Ack]:
        """Launch the backup of device pages; where to, and what HiCache waits for."""
        host = self.pool.alloc(PAGE * len(pages))
        assert host is not None
        self.pool.backup_from_device_all_layer(self.device, host, slots_of(*pages), "kernel")
        return host, self.overflow.awaited(Ack(Transferred(), Transferred()))

    def backed_up(self, *pages: int) -> torch.Tensor:
        host, ack = self.back_up(*pages)
        ack.finish_event.synchronize()
        return host

    def load(self, host: torch.Tensor, *pages: int) -> torch.Tensor:
        """Load host pages to device pages; what these hold then."""
        self.loads.add(QueuedLoad(self.pool.page_ids(host)), slots_of(*pages))
        for layer in range(LAYERS):
            self.pool.load_to_device_per_layer(self.device, host, slots_of(*pages), layer, "kernel")
        return bits(self.device, *pages)

    def rows_in_use(self) -> int:
        return len(self.overflow.pages._all) - len(self.overflow.pages._free)


def test_layers_that_do_not_fit_come_back_bit_for_bit_beside_those_that_do() -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    make_unfit(server.device, 3, 1)
    want = bits(server.device, 1, 2, 3)
    host = server.backed_up(1, 2, 3)
    assert server.rows_in_use() == 2
    for page in (1, 2, 3):
        make_unfit(server.device, page, 0)
    assert torch.equal(server.load(host, 7, 5, 6), want)
    assert [int(page) in server.overflow.pages for page in server.pool.page_ids(host)] == [
        False,
        True,
        True,
    ]


def test_a_backup_has_ended_only_when_what_did_not_fit_is_kept() -> None:
    """Until then HiCache leaves its tokens on the device."""
    server = Host()
    make_unfit(server.device, 2, 0)
    _, ack = server.back_up(1, 2)
    assert not ack.finish_event.query()
    assert server.rows_in_use() == 0
    real = ack.finish_event._finish
    real.done = True
    assert ack.finish_event.query()
    assert server.rows_in_use() == 1
    assert ack.finish_event.query()  # asked again, nothing more happens
    ack.finish_event.synchronize()
    assert server.rows_in_use() == 1
    assert ack.start_event.elapsed_time(ack.finish_event) == 2.0


def test_a_freed_page_gives_its_rows_back_and_leaves_nothing_to_its_successor() -> None:
    server = Host(overflow=1)
    for page in range(12):
        make_unfit(server.device, 2, page % LAYERS)
        host = server.backed_up(2)
        assert server.overflow.pages.lost == set()
        server.pool.free(host)
        assert server.rows_in_use() == 0
    server.device.v_buffer[0][slots_of(2)] = 1.0
    server.device.v_buffer[1][slots_of(2)] = 1.0
    want = bits(server.device, 2)
    assert torch.equal(server.load(server.backed_up(2), 5), want)
    make_unfit(server.device, 2, 0)
    server.backed_up(2)
    server.pool.clear()
    assert server.rows_in_use() == 0


def test_without_room_in_the_overflow_a_page_is_lost_until_it_is_freed() -> None:
    server = Host(overflow=1)
    rows = len(server.overflow.pages._all)
    hosts = []
    for page in range(rows + 1):
        make_unfit(server.device, page, 0)
        hosts.append(server.backed_up(page))
    lost = {int(page) for page in server.pool.page_ids(hosts[-1])}
    assert server.overflow.pages.lost == lost
    assert all(page in server.overflow.pages for page in lost)
    want = bits(server.device, 0)
    assert torch.equal(server.load(hosts[0], 5), want)  # others are not
    server.pool.free(hosts[0])
    server.pool.free(hosts[-1])
    assert server.overflow.pages.lost == set()
    server.backed_up(0)
    assert server.overflow.pages.lost == set()


def test_what_cannot_be_copied_to_the_overflow_is_lost_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Host()
    make_unfit(server.device, 2, 0)
    monkeypatch.setattr(server.kv, "save_plain", lambda *_: 1 / 0)
    host = server.backed_up(1, 2)
    assert server.overflow.pages.lost == {int(server.pool.page_ids(host)[1])}
    assert server.rows_in_use() == 0


def test_pages_with_overflow_pass_the_check_in_service_and_spoiled_ones_do_not() -> None:
    server, lost = Host(), []
    runtime = SimpleNamespace(config=SimpleNamespace(check_every_pages=1), lose_trust=lost.append)
    checks = KVChecks(runtime, server.pool, server.kv, None)  # type: ignore[arg-type]
    server.pool.on_backed_up.append(checks.transferred)
    server.pool.on_loaded.append(checks.transferred)
    make_unfit(server.device, 2, 0)
    host = server.backed_up(2)
    server.load(host, 5)
    checks.run()
    assert lost == []
    server.pool.kv_buffer[int(server.pool.page_ids(host)[0]), -1] += 1
    server.load(host, 6)
    checks.run()
    assert lost == [
        "the self-check in service failed: K and V of layer 1 in a page are not the pool's"
    ]


# ---- at the start ----


def plan_of(device: Any, codec: str) -> PagePlan:
    methods = LayerMethods(Partition(0, 0, device.layer_num), None, None, 8192)
    return PagePlan(device, methods, WHOLE, 1, kv_codec=codec)


@pytest.mark.parametrize("page_size", [16, 64])
def test_host_memory_holds_at_least_1_28_times_the_tokens(page_size: int) -> None:
    """With Llama-3-8B: 32 layers, 8 heads of 128 values, with headers and overflow."""
    slots = 1 << 16
    buffers = [
        torch.empty(slots + page_size, 8, 128, dtype=torch.bfloat16, device="meta")
        for _ in range(32)
    ]
    kvcache = SimpleNamespace(
        k_buffer=buffers, v_buffer=buffers, layer_num=32, size=slots, page_size=page_size
    )
    plan = plan_of(kvcache, "exp4")
    pages = plan_host_pages(
        kvcache,
        plan.layout,
        0,
        2.0,
        1e12,
        with_shadows=False,
        overflow_row=plan.kv.plain_bytes,
    )
    assert 1.28 * 2 * slots <= pages.host * page_size <= 1.31 * 2 * slots
    assert pages.overflow * plan.layout.page_bytes >= plan.kv.plain_bytes
    taken = sum(pages) * plan.layout.page_bytes
    assert taken <= 2 * slots * 32 * 2 * 8 * 128 * 2


def test_the_smallest_memory_that_is_named_will_do() -> None:
    device = kv_pool()
    plan = plan_of(device, "exp4")

    def pages(ratio: float) -> HostPages:
        row = plan.kv.plain_bytes
        return plan_host_pages(
            device, plan.layout, 0, ratio, 1e12, with_shadows=False, overflow_row=row
        )

    with pytest.raises(Refused, match="is the least that will do") as refused:
        pages(0.01)
    enough = float(str(refused.value).split("--hicache-ratio ")[-1].split()[0])
    assert pages(enough).host >= 1
    with pytest.raises(Refused):
        pages(enough - 0.02)


def test_copies_are_tried_with_and_without_the_codec() -> None:
    for codec in ("none", "exp4"):
        device = kv_pool()
        check_copies(plan_of(device, codec))
        assert not any(buffer[slots_of(1, 2, 3, 4)].any() for buffer in device.k_buffer)


@pytest.mark.parametrize("broken", ["load_plain", "_encoded"])
def test_an_overflow_or_a_codec_that_brings_something_else_is_refused(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(kv_pool(), "exp4")
    real = getattr(plan.kv, broken)

    def wrong(layer: int, *args: Any) -> Any:
        result = real(layer, *args)
        if result is not None:
            result[0][:, 0] ^= 1
        elif layer == 1:
            plan.kvcache.k_buffer[1][args[0] * PAGE] += 1
        return result

    monkeypatch.setattr(plan.kv, broken, wrong)
    layer = "1" if broken == "load_plain" else "0"
    with pytest.raises(Refused, match=f"K or V of layer {layer} come back"):
        check_copies(plan)


@pytest.mark.parametrize(
    ("codec", "change", "stages", "used", "why"),
    [
        ("exp4", {}, 1, "exp4", ""),
        ("none", {}, 1, "none", ""),
        ("int8", {}, 1, "none", ""),
        ("exp4", {}, 2, "none", "codec 'exp4' takes no K and V of pipeline stages"),
        ("exp4", {"dtype": torch.float32}, 1, "none", "one shape in bfloat16, not (2, 16) of"),
        ("exp4", {"v_dim": 8}, 1, "none", "one shape in bfloat16, not (2, 8), (2, 16) of"),
        ("exp4", {"heads": 1, "dim": 3}, 1, "none", "even number of values per token and group"),
        ("exp4", {"heads": 1, "dim": 2, "page": 4}, 1, "none", "multiple of 16"),
    ],
)
def test_form_alone_decides_on_the_codec_of_k_and_v(
    codec: str,
    change: dict[str, Any],
    stages: int,
    used: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = kv_pool(**change)
    runtime = SimpleNamespace(config=SimpleNamespace(codec=codec))
    with caplog.at_level("WARNING", "hcache"):
        assert kv_codec(runtime, device, WHOLE, 1, stages) == used  # type: ignore[arg-type]
    assert why in caplog.text
    assert bool(caplog.text) == bool(why)


def test_a_codec_is_told_apart_from_others_by_the_form_of_pages() -> None:
    device = kv_pool()
    forms = {plan_of(device, codec).layout.form for codec in ("none", "exp4")}
    assert len(forms) == 2
    with pytest.raises(UnsupportedRows):
        plan_of(kv_pool(v_dim=8), "exp4")


def test_every_bit_of_an_encoded_page_counts_for_its_digests() -> None:
    """Codes, window, starts and exceptions of a unit: all stand in it."""
    server = Host()
    host = server.backed_up(3)
    layout = server.pool.page_layout
    page = server.pool.kv_buffer[int(server.pool.page_ids(host)[0])].numpy()
    namespace, key = bytes(range(16)), bytes(32)
    layout.begin(page, namespace, bytes(8))
    layout.seal(page, key)
    assert layout.problem(page, namespace, key) is None
    first = layout.segment(1)
    for at, bit in itertools.product(range(first.start, first.stop), range(8)):
        page[at] ^= np.uint8(1 << bit)
        assert layout.problem(page, namespace, key) == "checksum"
        page[at] ^= np.uint8(1 << bit)
    assert layout.problem(page, namespace, key) is None
