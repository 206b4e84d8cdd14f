"""Host pool <-> device pool copies of SGLang's own pools as torch indexing (plain-KV baselines).

SGLang does these with `sgl_kernel` or JIT CUDA kernels. "Device" is CPU memory here too.
"""

import functools
import importlib.util
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


def install() -> None:
    """Give SGLang's MHA and MLA host pools torch copies for every layout they know on CUDA."""
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    pools = mha.MHATokenToKVPoolHost, mha.AsymmetricMHATokenToKVPoolHost, MLATokenToKVPoolHost
    for pool in pools:
        pool.load_to_device_per_layer = load_to_device_per_layer
        pool.backup_from_device_all_layer = backup_from_device_all_layer
    if BUS_VARIABLE in os.environ:
        _slow_down_restores()
    if L3_VARIABLE in os.environ:
        _slow_down_store()
    _wait_without_a_core()


L3_VARIABLE = "HCACHE_CPU_L3_FILE"
"""Names a file with the bytes per second that all reads of page files together may reach; 0: no
limit. Page files are those of our store and of SGLang's backends `file` and `nixl`."""

BUS_VARIABLE = "HCACHE_CPU_BUS_FILE"
"""Names a file with the bytes per second that copies to the device may reach; 0: no limit."""


@contextmanager
def _bus(size: int) -> Iterator[None]:
    """What is copied within the block takes as long as the bus of the file would."""
    start = time.perf_counter()
    yield
    rate = float(Path(os.environ[BUS_VARIABLE]).read_text() or 0)
    if rate:
        time.sleep(max(0.0, start + size / rate - time.perf_counter()))


def _slow_down_restores() -> None:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from hcache_backend.host import segments
    from hcache_backend.restore import pipeline

    gather_planes, gather_pages = segments.gather_planes, segments.gather_pages
    load = MHATokenToKVPoolHost.load_to_device_per_layer

    def slow_gather_planes(
        memory: torch.Tensor, pages: torch.Tensor, offset: int, pool: Any, *others: Any
    ) -> None:
        with _bus(len(pages) * sum(plane[0].nbytes for plane in pool)):
            gather_planes(memory, pages, offset, pool, *others)

    def slow_gather_pages(
        memory: torch.Tensor, pages: torch.Tensor, offset: int, length: int, **out: torch.Tensor
    ) -> torch.Tensor:
        with _bus(len(pages) * length):
            return gather_pages(memory, pages, offset, length, **out)

    @functools.wraps(load)
    def slow_load(self: Any, device_pool: Any, host: Any, device: Any, *a: Any, **kw: Any) -> None:
        row_bytes = device_pool.k_buffer[0][0].nbytes + device_pool.v_buffer[0][0].nbytes
        with _bus(len(device) * row_bytes):
            load(self, device_pool, host, device, *a, **kw)

    segments.gather_planes = slow_gather_planes
    segments.gather_pages = pipeline.gather_pages = slow_gather_pages
    MHATokenToKVPoolHost.load_to_device_per_layer = slow_load


def _slow_down_store() -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    from hcache_backend.store import FileOps

    read, get, lock, free_at = FileOps.read, HiCacheFile.get, threading.Lock(), 0.0

    def wait_for(size: int, start: float) -> None:
        """Return when the link would have brought what was asked for at ``start``."""
        nonlocal free_at
        while (rate := float(Path(os.environ[L3_VARIABLE]).read_text() or 0)) < 0:
            time.sleep(0.001)
        if rate:
            with lock:
                free_at = max(free_at, start) + size / rate
                until = free_at
            time.sleep(max(0.0, until - time.perf_counter()))

    def slow_read(self: Any, fd: int, buffers: Any, offset: int) -> int:
        start = time.perf_counter()
        done = read(self, fd, buffers, offset)
        wait_for(done, start)
        return done

    @functools.wraps(get)
    def slow_get(self: Any, key: str, target: torch.Tensor, *args: Any) -> Any:
        start = time.perf_counter()
        found = get(self, key, target, *args)
        if found is not None:
            wait_for(target.nbytes, start)
        return found

    FileOps.read = slow_read  # type: ignore[method-assign]
    HiCacheFile.get = slow_get
    if importlib.util.find_spec("nixl") is not None:
        _slow_down_nixl(wait_for)


def _slow_down_nixl(wait_for: Callable[[int, float], None]) -> None:
    """NIXL reads where Python does not see it: the whole batch waits."""
    from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

    get = HiCacheNixl.batch_get_v1

    @functools.wraps(get)
    def slow_get(self: Any, keys: list[str], host_indices: torch.Tensor, *args: Any) -> Any:
        start = time.perf_counter()
        found = get(self, keys, host_indices, *args)
        wait_for(self.mem_pool_host.size_per_token * len(host_indices), start)
        return found

    HiCacheNixl.batch_get_v1 = slow_get


def _wait_without_a_core() -> None:
    """A scheduler without a batch polls all the time, with a core of its own.

    Here it leaves the core to the threads that are its device, and to other servers: it looks a few
    hundred times a second, and at once when a request comes.
    """
    from sglang.srt.managers.scheduler import Scheduler

    on_idle = Scheduler.on_idle
    l3_is_slow = L3_VARIABLE in os.environ

    @functools.wraps(on_idle)
    def idle(self: Any) -> None:
        on_idle(self)
        requests = self.ipc_channels.recv_from_tokenizer
        if not self.is_fully_idle():
            time.sleep(0.001 * l3_is_slow)
        elif requests is not None:  # other ranks wait for the first one
            requests.poll(5)

    Scheduler.on_idle = idle


def host_tensors(pool: Any) -> list[torch.Tensor]:
    """The pool's buffers, each in the layout of one tensor: K and V, or MLA's joint buffer."""
    return [pool.k_buffer, pool.v_buffer] if _has_kv(pool) else [pool.kv_buffer]


def device_tensors(device_pool: Any, host_pool: Any) -> list[list[torch.Tensor]]:
    """The device pool's per-layer `[slots, heads, dim]` tensors, in the order of `host_tensors`."""
    if _has_kv(host_pool):
        return [device_pool.k_buffer, device_pool.v_buffer]
    return [device_pool.kv_buffer]


def saved_layers(host_pool: Any, device_pool: Any) -> list[Sequence[torch.Tensor]]:
    """The layers that a backup copies, in the order of `host_tensors`: the model's, then those of
    packed drafts. From 0.5.23 on the host pool knows no pools, but the buffers of all of them."""
    if hasattr(host_pool, "mtp_draft_device_pools"):
        pools = (device_pool, *host_pool.mtp_draft_device_pools)
        every = [device_tensors(pool, host_pool) for pool in pools]
        return [list(itertools.chain.from_iterable(layers)) for layers in zip(*every, strict=True)]
    if _has_kv(host_pool):
        return [host_pool.device_k_buffers, host_pool.device_v_buffers]
    return [host_pool.device_kv_buffers]


def _has_kv(pool: Any) -> bool:
    return not hasattr(pool, "kv_cache_dim")


def layer_rows(pool: Any, tensor: torch.Tensor, layer: int, indices: torch.Tensor) -> tuple:
    """An index such that `tensor[index]` are the rows `[len(indices), heads, dim]` of one layer."""
    if pool.layout == "layer_first":
        return (layer, indices)
    if pool.layout == "page_first":
        return (indices, layer)
    if pool.layout == "page_first_direct":
        return (indices // pool.page_size, layer, indices % pool.page_size)
    if pool.layout == "page_head":
        return (indices // pool.page_size, slice(None), indices % pool.page_size, layer)
    raise ValueError(f"the CPU engine has no copies for host layout {pool.layout!r}")


def load_to_device_per_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """`is_draft`: `device_pool` is of a draft, whose one layer is `layer_id` in host memory."""
    for host, device in zip(host_tensors(self), device_tensors(device_pool, self), strict=True):
        rows, layer = host[layer_rows(self, host, layer_id, host_indices)], device[0]
        if not is_draft:
            layer = device[layer_id]
        layer[device_indices] = rows.view_as(layer[device_indices])


def backup_from_device_all_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    io_backend: str,
) -> None:
    for host, layers in zip(host_tensors(self), saved_layers(self, device_pool), strict=True):
        for layer_id, layer in enumerate(layers):
            index = layer_rows(self, host, layer_id, host_indices)
            host[index] = layer[device_indices].view_as(host[index])
