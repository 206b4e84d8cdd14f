"""A host pool of own pages over a stand-in for SGLang's pool, and the check of it in service."""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

from hcache_backend.capture.staging import Capture
from hcache_backend.checks.service import KVChecks
from hcache_backend.format.units import WHOLE
from hcache_backend.host.loads import LoadQueue, QueuedLoad
from hcache_backend.host.node_backups import CapturedBackups, NodeBackups
from hcache_backend.host.page_headers import PageHeaders
from hcache_backend.host.segments import KVSegments
from hcache_backend.krul.segments import PairedSegments
from hcache_backend.plan.restore import Partition, Restore
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.sglang.controller import OwnPagesController, Stack
from hcache_backend.sglang.host_pool import HostPages, OwnPagesPool
from tests.kit.turns import turn_of_checks

LAYERS, PAGE, DEVICE_PAGES, HOST_PAGES = 2, 16, 8, 6


def kv_pool(
    heads: int = 2,
    dim: int = 16,
    page: int = PAGE,
    v_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    layers: int = LAYERS,
    pages: int = DEVICE_PAGES,
) -> Any:
    """What is asked of SGLang's pool."""
    slots = (pages + 1) * page
    k, v = (
        [torch.randn(slots, heads, width).to(dtype) for _ in range(layers)]
        for width in (dim, v_dim or dim)
    )
    return SimpleNamespace(
        k_buffer=k,
        v_buffer=v,
        layer_num=layers,
        size=pages * page,
        page_size=page,
        store_dtype=dtype,
        start_layer=0,
        end_layer=layers - 1,
        device="cpu",
        layer_shard_enabled=False,
    )


def slots_of(*pages: int, size: int = PAGE) -> torch.Tensor:
    return torch.cat([torch.arange(size) + size * page for page in pages])


def bits(device: Any, *pages: int) -> torch.Tensor:
    buffers = (*device.k_buffer, *device.v_buffer)
    return torch.stack([buffer[slots_of(*pages)].view(torch.int16) for buffer in buffers])


def make_unfit(device: Any, page: int, layer: int) -> None:
    """Any bits at all: infinities and NaNs, too."""
    values = device.v_buffer[layer]
    values[slots_of(page)] = (
        torch.randint(-(1 << 15), 1 << 15, values[:PAGE].shape).to(torch.int16).view(torch.bfloat16)
    )


class Host:
    """A host pool over a device's of eight pages; ``pairs`` of layers are for codec ``krul``."""

    def __init__(
        self,
        host_pages: int = HOST_PAGES,
        codec: str = "exp4",
        dtype: torch.dtype = torch.bfloat16,
        heads: int = 2,
        layers: int = LAYERS,
        pairs: int = 1,
    ) -> None:
        every = range(layers)
        self.device = kv_pool(heads, dtype=dtype, layers=layers)
        self.kv = (
            PairedSegments(self.device, every, PAGE, 1, pairs)
            if codec == "krul"
            else KVSegments(self.device, every, PAGE, WHOLE, 1, codec)
        )
        layout = self.kv.layout([*map(self.kv.stored_layer, every)], WHOLE)
        self.pool = OwnPagesPool(
            self.device,
            PAGE,
            "page_first",
            page_layout=layout,
            pages=HostPages(host_pages, 0),
            kv=self.kv,
            pin_memory=False,
            allocator_type="default",
        )
        restored = [self.kv.restored_layer(layer) for layer in every]
        self.pipeline = RestorePipeline(self.pool.kv_buffer, layout, restored, 8 * PAGE, "cpu")
        methods = Restore(None, None, Partition(0, 0, layers), chunk_tokens=8 * PAGE)
        self.loads = LoadQueue(self.pool.arena, self.pipeline, methods, None, "cpu")
        self.pool.connect(self.loads, Capture(self.pool.arena))

    def back_up(self, *pages: int) -> torch.Tensor:
        host = self.pool.alloc(PAGE * len(pages))
        assert host is not None
        self.pool.arena.expect(self.pool.page_ids(host))
        self.pool.divide(self.pool.page_ids(host), self.pool.page_layout)
        self.pool.backup_from_device_all_layer(self.device, host, slots_of(*pages), "kernel")
        return host

    def backed_up(self, *pages: int) -> torch.Tensor:
        host = self.back_up(*pages)
        self.pool.mark_arrived()
        return host

    def load(self, host: torch.Tensor, *pages: int) -> torch.Tensor:
        self.loads.add_load(QueuedLoad(self.pool.page_ids(host)))
        for layer in range(len(self.device.k_buffer)):
            self.pool.load_to_device_per_layer(self.device, host, slots_of(*pages), layer, "kernel")
        return bits(self.device, *pages)

    def unfit(self, host: torch.Tensor) -> list[bool]:
        assert self.settled(host)
        unfit: list[bool] = self.pool.arena.unfit(self.pool.page_ids(host)).tolist()
        return unfit

    def settled(self, host: torch.Tensor) -> bool:
        return self.pool.arena.usable(self.pool.page_ids(host)) is not None


def bare_controller(
    pool: Any,
    loads: Any = None,
    *,
    runtime: Any = None,
    eager: Any = None,
    kv_checks: Any = None,
    capture: Any = None,
    checks: Any = None,
    layouts: Any = None,
    **fields: Any,
) -> Any:
    """A controller without SGLang's part, for one rank, whose prompts begin with its pages.
    ``fields`` are SGLang's."""
    nothing = SimpleNamespace(
        failed=False,
        propose_checks=lambda turn: None,
        apply_checks=lambda: None,
        drop_waiting=lambda: None,
    )
    stages = SimpleNamespace(
        alone=True,
        exchange_messages=lambda: None,
        have=lambda pages: True,
        decide=lambda verdict: verdict,
        backed_up=lambda pages: None,
        brought=lambda pages: None,
    )
    served = SimpleNamespace(model_config=SimpleNamespace(context_len=1 << 20))
    runtime = runtime or SimpleNamespace(
        weights=SimpleNamespace(quarantine=None, present=None),
        runner=served,
        writer=b"",
        l3=L3Progress(),
        prefetches=Prefetches(),
    )
    lacking = [name for name in ("arena", "page_layout", "page_size") if not hasattr(pool, name)]
    for name in lacking:
        setattr(pool, name, None)
    captured, kv_checks = capture is not None, kv_checks or nothing
    capture, weights = capture or Capture(pool.arena), runtime.weights
    kind = CapturedBackups if captured else NodeBackups
    positions, writer = runtime.runner.model_config.context_len, runtime.writer
    with patch.object(HybridCacheController, "__init__", lambda *_, **__: None):
        stack = Stack(
            runtime=runtime,
            pool=pool,
            loads=loads,
            eager=eager,
            stages=stages,
            kv_checks=kv_checks,
            judge=lambda name: None,
            capture=capture,
            headers=PageHeaders(weights, pool.arena, pool.page_layout, captured, positions, writer),
            backups=partial(kind, pool, capture, layouts, True),
            trusts=lambda: weights.quarantine is None if captured else not kv_checks.failed,
            checks=checks,
        )
        made: Any = OwnPagesController(stack)
    usual = {
        "prefix": lambda: torch.empty(0, dtype=torch.int64),
        "write_queue": [],
        "write_policy": "write_through",
        "page_size": PAGE,
        "tp_group": None,
    }
    for name, value in (usual | fields).items():
        setattr(made, name, value)
    return made


WRONG = "the self-check in service failed: K and V of layer {} in a page are not the pool's"


def checked(server: Host, every: int = 1) -> tuple[KVChecks, list[str]]:
    """Let one page of so many be checked; the checks, and why trust was lost."""
    lost: list[str] = []
    weights: Any = SimpleNamespace(begin_quarantine=lost.append, quarantine=None)
    checks, pool = KVChecks(weights, server.pool, every, server.kv), server.pool
    pool.on_freed.append(checks.on_freed)
    pool.on_backed_up.append(checks.on_transfer)
    pool.on_loaded.append(checks.on_transfer)
    return checks, lost


def compare_all(checks: KVChecks) -> None:
    for _ in range(1 + sum(len(page.remaining) for page in checks._waiting)):
        turn_of_checks(checks)
    assert checks.failed or not checks._waiting
