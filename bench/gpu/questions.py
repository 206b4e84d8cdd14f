"""Predictions about a GPU that only a GPU can confirm. Needs only torch and triton.

- start: how long a digest of weights takes, and a page of K and V through a codec's reference
- host: how long the scheduler's thread takes to launch a backup and a load of own pages of K and V,
  by the product's methods, and how long the GPU takes for them. The first call of a codec compiles
  its kernels, because Triton's cache is empty. Beside backups a decode step's matrix products keep
  a share of their speed (``products``); ``saves`` is that of backups.
- register: how long it takes to register host memory, small sizes first. At most half of the memory
  that is free is taken, and no size that would take longer than ``--register-s``.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from bench.gpu.overlap import alone, beside
from bench.gpu.program import Device, GpuProgram, GpuRun, Row, registered
from bench.gpu.shapes import LLAMA_8B, PAGE, Shape
from bench.harness.program import Setting, scratch
from bench.harness.report import Results, Table
from hcache_backend.fingerprint import digest_tensors
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments
from hcache_backend.streams import new_stream

HOST_PAGES = (1, 16, 128)  # pages of a backup or a load, 64 tokens each
CODECS = ("exp3", "exp4", "none")
REPEATS = 10
REQUESTS, LAYERS = 64, 4  # of a decode step; more weights than an L2 cache holds
BESIDE_S = 0.2  # backups and products together
PIECE = 1 << 21  # values of weights
REGISTERED_GB = (1, 8, 50)
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the bytes that a container may take, and takes."""


def measure(run: GpuRun) -> None:
    device = run.device
    for row in start(device, LLAMA_8B):
        run.add(row, f"start, {row['step']}", "start")
    with scratch() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for row in host(device, LLAMA_8B):
            run.add(row, f"host, {row['codec']}, {row['pages']} pages", "host")
    most = 1e-3 if device.dry_run else run.given.register_gb
    for row in register(device, most, run.given.register_s, free_bytes()):
        run.add(row, f"register, {row['gb']} GB", "register")
    device.release()


def start(device: Device, full: Shape) -> Iterator[Row]:
    """Parts of a server's start: microseconds of 2,097,152 values, and of a layer's page."""
    shape = full.tiny() if device.dry_run else full
    pieces, kinds = 1 if device.dry_run else 128, {"dtype": torch.bfloat16}
    weight = torch.randn(pieces * PIECE // shape.hidden, shape.hidden, **kinds, device=device.kind)
    digest = partial(digest_tensors, [("weight", weight)])
    took = host_times(device, digest)["done_us"] / pieces
    yield {"step": "digest of 2M values", "us": took, "right": digest() == digest()}
    size = (PAGE, shape.kv_heads, shape.head_dim)
    pool = SimpleNamespace(k_buffer=[torch.randn(size, **kinds)])
    pool.v_buffer = pool.k_buffer
    for codec in CODECS[:2]:
        kv = KVSegments(pool, range(1), PAGE, WHOLE, 1, codec)
        through = partial(kv.through_codec, kv.layout([kv.stored_layer(0)], WHOLE), [kv.planes(0)])
        fits = bool(through()[1].all())
        yield {"step": f"reference of {codec}", **host_times(device, through), "right": fits}


def host(device: Device, full: Shape) -> Iterator[Row]:
    """Backups and loads of all layers of a model between a pool and pages in pinned memory."""
    shape = full.tiny() if device.dry_run else full
    counts = (2,) if device.dry_run else HOST_PAGES
    size = (2 * max(counts) * PAGE, shape.kv_heads, shape.head_dim)
    kinds = {"device": device.kind, "dtype": torch.bfloat16}
    k, v = ([torch.randn(size, **kinds) for _ in range(shape.layers)] for _ in "kv")
    pool = SimpleNamespace(k_buffer=k, v_buffer=v)
    layers, copying = range(shape.layers), new_stream(device.kind, "copy")
    products = new_stream(device.kind, "compute"), decode_products(device, shape)
    at, share = torch.device(device.kind), 0.01 if device.dry_run else BESIDE_S
    one = alone(at, products, share)
    for codec in CODECS:
        kv = KVSegments(pool, layers, PAGE, WHOLE, 1, codec)
        layout = kv.layout([kv.stored_layer(layer) for layer in layers], WHOLE)
        memory = device.pinned(max(counts), layout.page_bytes)
        for count in counts:
            row = {"model": full.name, "layers": shape.layers, "codec": codec, "pages": count}
            row |= save_and_load(device, kv, layout, memory, count)
            pages, slots = (torch.arange(n, device=device.kind) for n in (count, count * PAGE))
            save = copying, partial(kv.save, layout, memory, pages, slots)
            saves, kept = beside(at, (save, products), (alone(at, save, share), one), share)
            yield row | {"saves": saves, "products": kept, "products_us": 1e6 * one}
        device.release()


def decode_products(device: Device, shape: Shape) -> Callable[[], None]:
    """The matrix products of some layers in a decode step."""
    kinds: dict[str, Any] = {"device": device.kind, "dtype": torch.bfloat16}
    heads, wide = shape.heads * shape.head_dim, (1 + shape.gated) * shape.mlp
    sizes = [(heads + 2 * shape.width, shape.hidden), (shape.hidden, heads)]
    sizes += [(wide, shape.hidden), (shape.hidden, shape.mlp)]
    weights = [torch.randn(size, **kinds) for size in LAYERS * sizes]
    rows = {inner: torch.randn(REQUESTS, inner, **kinds) for _, inner in sizes}

    def products() -> None:
        for weight in weights:
            functional.linear(rows[weight.shape[1]], weight)

    return products


def save_and_load(
    device: Device, kv: KVSegments, layout: PageLayout, memory: torch.Tensor, count: int
) -> Row:
    """Times of one size, and whether K and V come back to the bit in other slots."""
    pages, slots = (torch.arange(n, device=device.kind) for n in (count, count * PAGE))
    others = slots + count * PAGE
    groups = [kv.layers] if kv.codec == "none" else [kv.layers[::2], kv.layers[1::2]]
    fits: list[torch.Tensor | None] = []

    def save() -> None:
        fits[:] = [kv.save(layout, memory, pages, slots)]

    def load() -> None:
        for layers in groups:
            offsets = [layout.segment_offsets[layer] for layer in layers]
            kv.load(layers, memory, pages, offsets, others)

    timed = {"save": host_times(device, save), "load": host_times(device, load)}
    planes = [plane for layer in kv.layers for plane in kv.planes(layer)]
    back = all(torch.equal(plane[slots], plane[others]) for plane in planes)
    return {
        **{f"{name}_{key}": us for name, times in timed.items() for key, us in times.items()},
        "right": back and all(fit is None or bool(fit.all()) for fit in fits),
    }


def host_times(device: Device, launch: Callable[[], object]) -> Row:
    """Microseconds until the caller goes on, and until the device is done; the first call apart."""

    def timed() -> tuple[float, float]:
        start = time.perf_counter()
        launch()
        launched = time.perf_counter()
        device.synchronize()
        return 1e6 * (launched - start), 1e6 * (time.perf_counter() - start)

    device.synchronize()
    first = timed()[0]
    rounds = [timed() for _ in range(1 if device.dry_run else REPEATS)]
    on_host, done = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {"host_us": on_host, "done_us": done, "first_host_us": first}


def register(device: Device, most_gb: float, seconds: float, free: float) -> Iterator[Row]:
    """Register memory as a server does for its host pool: sizes that grow up to ``most_gb``.

    Args:
        seconds: Most of a size, predicted by the size before.
        free: Bytes of host memory; half of them are the limit.
    """
    limit, rate = 0.5 * free / 1e9, 0.0
    smaller = [gb for gb in REGISTERED_GB if gb < min(most_gb, limit)]
    for gb in [*smaller, min(most_gb, limit)]:
        row: Row = {"gb": round(gb, 4), "asked_gb": most_gb, "free_gb": round(free / 1e9, 1)}
        if gb == limit < most_gb:
            row["said"] = f"less than {most_gb:g} GB: half of what is free here"
        if rate and gb / rate > seconds:
            yield row | {"skipped": f"{gb / rate:.0f} s predicted, {seconds:g} allowed"}
            return
        memory = torch.empty(int(gb * 1e9), dtype=torch.uint8)  # no page of it is there yet
        start = time.perf_counter()
        with registered(memory, device.kind):
            took, start = time.perf_counter() - start, time.perf_counter()
        rate = gb / took
        yield row | {
            "register_s": took,
            "unregister_s": time.perf_counter() - start,
            "gb_s": rate,
            "right": True,  # otherwise it raised
        }
        del memory


def free_bytes() -> float:
    """Host memory that this process may still take, in its container too."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    free = 1024.0 * int(fields["MemAvailable"].split()[0])
    for limit, used in CGROUPS:
        try:
            allowed = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
        free = min(free, max(0.0, allowed))
    return free


def columns(kind: str, results: Results) -> list[str]:
    return list(dict.fromkeys(key for row in results[kind] for key in row))


PROGRAM = GpuProgram(
    name="questions",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--register-gb", float, 50.0, "largest size"),
        Setting("--register-s", float, 25.0, "for one size"),
    ),
    tables=tuple(Table(kind, partial(columns, kind)) for kind in ("start", "host", "register")),
)

if __name__ == "__main__":
    PROGRAM.run()
