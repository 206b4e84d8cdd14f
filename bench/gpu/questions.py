"""Predictions about a GPU that only a GPU can confirm. Needs only torch and triton.

- slices: K and V by a product of their own (N = 2W) against K and V out of that of the whole QKV
  (N = 3W): whether they have the same bits, and how long both take. A difference is no fault: a
  server then finds it at its start.
- host: how long the scheduler's thread takes to launch a backup and a load of own pages of K and V,
  by the product's methods, and how long the GPU takes for them
- register: how long it takes to register host memory, small sizes first. At most half of the memory
  that is free is taken, and no size that would take longer than ``--register-s``.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.nn import functional

from bench.gpu.program import Device, GpuProgram, GpuRun, Row, registered
from bench.gpu.shapes import LLAMA_7B, LLAMA_8B, PAGE, Shape
from bench.harness.program import Setting
from bench.harness.report import Results, Table
from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE
from hcache_backend.host.segments import KVSegments

ROWS = (1, 16, 48, 96, 816)  # tokens of a product: decode steps, and the prefill of a start's probe
HOST_PAGES = (1, 16, 64)  # pages of a backup or a load, 64 tokens each
CODECS = ("exp4", "none")
REPEATS = 10
REGISTERED_GB = (1, 8, 50)
CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with the bytes that a container may take, and takes."""


def measure(run: GpuRun) -> None:
    device, shapes = run.device, (LLAMA_7B, LLAMA_8B)
    for row in slices(device, shapes):
        run.add(row, f"slices, {row['model']}, {row['rows']} rows", "slices")
    for row in host(device, shapes[1]):
        run.add(row, f"host, {row['codec']}, {row['pages']} pages", "host")
    most = 1e-3 if device.dry_run else run.given.register_gb
    for row in register(device, most, run.given.register_s, free_bytes()):
        run.add(row, f"register, {row['gb']} GB", "register")
    device.release()


def slices(device: Device, shapes: Iterable[Shape]) -> Iterator[Row]:
    """K and V of one layer by both products, as SGLang has their weights: Q, then K, then V."""
    for full in shapes:
        shape = full.tiny() if device.dry_run else full
        own, kinds = 2 * shape.width, {"device": device.kind, "dtype": device.dtype}
        outer = shape.heads * shape.head_dim + own
        weight = torch.randn(outer, shape.hidden, **kinds) * shape.hidden**-0.5
        for n in ROWS:
            hidden = torch.randn(n, shape.hidden, **kinds)
            sliced = partial(functional.linear, hidden, weight[-own:])
            whole = partial(functional.linear, hidden, weight)
            kv, again, qkv = sliced(), sliced(), whole()[:, -own:]
            yield {
                "model": full.name,
                "rows": n,
                "slice_n": own,
                "qkv_n": outer,
                "equal_bits": torch.equal(kv, qkv),
                "equal_share": float((kv == qkv).double().mean()),
                "slice_repeats": torch.equal(kv, again),
                "slice_us": device.microseconds(sliced),
                "qkv_us": device.microseconds(whole),
                "right": torch.allclose(kv, qkv, rtol=0.02, atol=0.02),
            }


def host(device: Device, full: Shape) -> Iterator[Row]:
    """Backups and loads of all layers of a model between a pool and pages in pinned memory."""
    shape = full.tiny() if device.dry_run else full
    counts = (2,) if device.dry_run else HOST_PAGES
    size = (2 * max(counts) * PAGE, shape.kv_heads, shape.head_dim)
    kinds = {"device": device.kind, "dtype": torch.bfloat16}
    k, v = ([torch.randn(size, **kinds) for _ in range(shape.layers)] for _ in "kv")
    pool = SimpleNamespace(k_buffer=k, v_buffer=v)
    layers = range(shape.layers)
    for codec in CODECS:
        kv = KVSegments(pool, layers, PAGE, WHOLE, 1, codec)
        layout = kv.layout([kv.stored_layer(layer) for layer in layers], WHOLE)
        memory = device.pinned(max(counts), layout.page_bytes)
        for count in counts:
            row = {"model": full.name, "layers": shape.layers, "codec": codec, "pages": count}
            yield row | save_and_load(device, kv, layout, memory, count)
        device.release()


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
    tables=tuple(Table(kind, partial(columns, kind)) for kind in ("slices", "host", "register")),
)

if __name__ == "__main__":
    PROGRAM.run()
