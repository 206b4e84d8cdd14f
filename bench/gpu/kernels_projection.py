"""``project_kv`` on the shapes of five models."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.program import Device, GpuRun
from bench.gpu.restore_models import rotary_of
from bench.gpu.shapes import Shape
from hcache_kernels.project_kv import KeyNorm, KVPool, KVProjection, ProjectionCall
from hcache_kernels.project_kv.reference import compute_kv_reference, project_kv_reference
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import LIBRARY, possible_ways

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CHECKED_ROWS = 256
OTHER_SLOTS = 64
INTERPRETED_AS = (9, 0)


def measure(run: GpuRun, shapes: Sequence[Shape], rows: Sequence[int] | None) -> None:
    """Times in microseconds and errors, one row per model and number of tokens; ``rows``: only
    these numbers of tokens."""
    device = run.device
    for shape in shapes:
        projection = random_projection(shape.tiny() if device.dry_run else shape, device)
        for n in rows or ((7,) if device.dry_run else ROWS):
            row = {"model": shape.name, "n": n, **measure_one(projection, n, device)}
            run.add(row, f"{shape.name}, {n} tokens", "projection")


def random_projection(shape: Shape, on: Device) -> KVProjection:
    """A layer of the model's kind with random weights."""
    dtype, device, width = on.scaled_dtype, on.kind, shape.width
    weight = torch.randn(2 * width, shape.hidden, device=device) * shape.hidden**-0.5
    norm, rotary, bias = None, None, None
    if shape.key_norm is not None:
        size = width if shape.key_norm == "all" else shape.head_dim
        scale = 1 + 0.1 * torch.randn(size, device=device)
        norm = KeyNorm("rms", shape.key_norm, scale.to(dtype), None, 1e-6)
    if shape.gated:
        rotary = rotary_of(shape.head_dim, max(ROWS), device)
    else:
        bias = torch.randn(2 * width, device=device).to(dtype)
    return KVProjection(weight.to(dtype), bias, shape.kv_heads, shape.head_dim, norm, rotary)


def measure_one(projection: KVProjection, n: int, on: Device) -> dict[str, Any]:
    """Every way on the same fresh random data."""
    weight = projection.weight
    device, dtype = weight.device, weight.dtype
    microseconds = on.microseconds
    capability = INTERPRETED_AS if on.dry_run else torch.cuda.get_device_capability(device)
    hidden = torch.randn(n, weight.shape[1], device=device).to(dtype)
    positions = torch.randint(max(ROWS), (n,), device=device)
    slots = torch.randperm(n + OTHER_SLOTS, device=device)[:n]
    shape = (n + OTHER_SLOTS, projection.kv_heads, projection.head_dim)
    pool = KVPool(*(torch.randn(shape, device=device).to(dtype) for _ in "kv"))
    call = ProjectionCall(hidden, positions, slots, projection, pool)

    product = torch.empty(n, len(weight), dtype=dtype, device=device)
    other_layout = weight.t().contiguous()
    gemms = {
        "[out, in]": microseconds(partial(torch.mm, hidden, weight.t(), out=product)),
        "[in, out]": microseconds(partial(torch.mm, hidden, other_layout, out=product)),
    }
    del product, other_layout
    composed = partial(project_kv_reference, call)
    torch_error, _ = error_of(composed, call)
    composed_us = microseconds(composed)

    ways: list[dict[str, Any]] = []
    for way in possible_ways(kind_of(projection), dtype, capability):
        run = partial(way.run, call)
        error, untouched = error_of(run, call)
        ways.append(
            {
                "way": "library" if way == LIBRARY else "fused",
                "config": asdict(way.config) if way.config else None,
                "microseconds": microseconds(run),
                "error": error,
                # Two right results differ in how values halfway between two numbers round.
                "right": untouched and error <= 1.02 * torch_error,
            }
        )
    gemm_us = min(gemms.values())
    fastest = {
        name: min(way["microseconds"] for way in ways if way["way"] == name)
        for name in ("fused", "library")
    }
    return {
        "gemm_us": gemms,
        "gemm_tflops": 2e-6 * n * weight.numel() / gemm_us,
        "composed_us": composed_us,
        "fused_us": fastest["fused"],
        "library_us": fastest["library"],
        "fused_share": gemm_us / fastest["fused"],
        "library_share": gemm_us / fastest["library"],
        "times_composed": composed_us / min(fastest.values()),
        "torch_error": torch_error,
        "right": all(way["right"] for way in ways),
        "ways": ways,
    }


def error_of(run: Callable[[], object], call: ProjectionCall) -> tuple[float, bool]:
    """Relative error (root mean square, K and V) of some rows against a product in float64, and
    whether the other slots are as they were."""
    slots, projection, pool = call.slots, call.projection, call.pool
    named = torch.zeros(len(pool.k), dtype=torch.bool, device=slots.device)
    named[slots] = True
    before = [part[~named].clone() for part in (pool.k, pool.v)]
    pool.k[slots] = pool.v[slots] = float("nan")  # a row that is not written shows
    run()
    untouched = all(
        torch.equal(part[~named], was) for part, was in zip((pool.k, pool.v), before, strict=True)
    )
    some = torch.randperm(len(call.hidden), device=slots.device)[:CHECKED_ROWS]
    exact_projection = replace(
        projection,
        weight=projection.weight.double(),
        bias=projection.bias.double() if projection.bias is not None else None,
    )
    exact = compute_kv_reference(call.hidden[some].double(), call.positions[some], exact_projection)
    got = (pool.k[slots[some]].double(), pool.v[slots[some]].double())
    finite = bool(pool.k[slots].isfinite().all() and pool.v[slots].isfinite().all())
    error = sum(float((x - y).norm() / y.norm()) for x, y in zip(got, exact, strict=True)) / 2
    return error, untouched and finite
