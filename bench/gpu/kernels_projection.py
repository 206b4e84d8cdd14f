"""``project_kv`` on the shapes of five models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.program import Results
from hcache_kernels.launch import gpu_microseconds
from hcache_kernels.project_kv import KeyNorm, KVPool, KVProjection, ProjectionCall, Rotary
from hcache_kernels.project_kv.reference import compute_kv_reference, project_kv_reference
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import LIBRARY, possible_ways

ROWS = (256, 512, 1024, 2048, 4096, 8192, 16384)
CHECKED_ROWS = 256
OTHER_SLOTS = 64
INTERPRETED_AS = (9, 0)


@dataclass(frozen=True)
class Model:
    """What a model's layers need to make K and V."""

    name: str
    hidden: int
    kv_heads: int
    head_dim: int = 128
    bias: bool = False
    norm: str | None = None
    rotary: bool = True


MODELS = (
    Model("Llama-2-7B", 4096, 32),
    Model("Llama-2-13B", 5120, 40),
    Model("OPT-30B", 7168, 56, bias=True, rotary=False),
    Model("Qwen3-8B", 4096, 8, norm="head"),
    Model("OLMo-2-7B", 4096, 32, norm="all"),
)


def measure(
    dry_run: bool, models: Sequence[str] | None, rows: Sequence[int] | None, results: Results
) -> None:
    """Times in microseconds and errors, one row per model and number of tokens.

    Args:
        dry_run: On the CPU, with small layers of the same kinds and few tokens.
        models: Only these; None: all.
        rows: Only these numbers of tokens; None: the usual ones.
        results: Where rows go.
    """
    for model in MODELS:
        if models and model.name not in models:
            continue
        if dry_run:
            model = replace(model, hidden=64, kv_heads=2, head_dim=32)  # noqa: PLW2901
        projection = random_projection(model, dry_run)
        for n in rows or ((7, 64) if dry_run else ROWS):
            row = {"model": model.name, "n": n, **measure_one(projection, n, dry_run)}
            results.add(row, f"{model.name}, {n} tokens", "projection")


def random_projection(model: Model, dry_run: bool) -> KVProjection:
    """A layer of the model's kind with random weights."""
    # Triton's interpreter miscalculates bfloat16.
    dtype, device = (torch.float16, "cpu") if dry_run else (torch.bfloat16, "cuda")
    width = model.kv_heads * model.head_dim
    weight = torch.randn(2 * width, model.hidden, device=device) * model.hidden**-0.5
    norm = None
    if model.norm is not None:
        size = width if model.norm == "all" else model.head_dim
        scale = 1 + 0.1 * torch.randn(size, device=device)
        norm = KeyNorm("rms", model.norm, scale.to(dtype), None, 1e-6)  # type: ignore[arg-type]
    rotary = None
    if model.rotary:
        frequencies = 1e4 ** (-torch.arange(0, model.head_dim, 2, device=device) / model.head_dim)
        angles = torch.outer(torch.arange(max(ROWS), device=device), frequencies)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        rotary = Rotary(cos_sin, "neox", model.head_dim)
    bias = torch.randn(2 * width, device=device).to(dtype) if model.bias else None
    return KVProjection(weight.to(dtype), bias, model.kv_heads, model.head_dim, norm, rotary)


def measure_one(projection: KVProjection, n: int, dry_run: bool) -> dict[str, Any]:
    """Every way on the same fresh random data."""
    weight = projection.weight
    device, dtype = weight.device, weight.dtype
    microseconds = cpu_microseconds if dry_run else gpu_microseconds
    capability = INTERPRETED_AS if dry_run else torch.cuda.get_device_capability(device)
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

    ways = []
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


def cpu_microseconds(work: Callable[[], object]) -> float:
    """One run: only for the dry run, where no time means anything."""
    start = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - start)
