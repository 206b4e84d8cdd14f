"""Layers, inputs and pools for the tests of ``project_kv``, and what is right in float64."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import torch

from hcache_kernels.project_kv import (
    KeyNorm,
    KVPool,
    KVProjection,
    ProjectionCall,
    Rotary,
    Rounding,
)

POSITIONS = 97
SPARE_SLOTS = 9

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

ROUNDINGS = {
    "results": Rounding(),
    "all but the normed K": Rounding(table=True, cos_products=True, sin_products=True),
    "cosines and sines": Rounding(table=True),
    "products with sines": Rounding(table=True, sin_products=True),
    "products with cosines": Rounding(table=True, cos_products=True),
    "the normed K too": Rounding(normed=True),
    "no norm": Rounding(norm=False),
}

FACTORS: dict[str, Sequence[Any]] = {
    # Of the model and of the pool.
    "dtypes": [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, E4M3), (FP16, E5M2), (BF16, FP32)],
    # Kind, over what, with which parameters.
    "norm": [
        None,
        ("rms", "head", "weight"),
        ("rms", "head", "weight of each head"),
        ("layer", "head", "weight, bias"),
        ("rms", "all", "weight"),
        ("layer", "all", "none"),
    ],
    # Style and how much of a head; None: all of it.
    "rope": [None, ("neox", None), ("neox", 32), ("interleaved", None), ("interleaved", 32)],
    "rounding": list(ROUNDINGS.values()),
    "bias": [False, True],
    "head_dim": [64, 80, 96, 128, 256],
    "n": [1, 7, 64, 130],  # tiles have 64 or 128 tokens, or fewer
    "kv_heads": [1, 3, 4],
    "depth": [64, 144],
    "index": [torch.int32, torch.int64],
    "strided": [False, True],
}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few combinations in which every pair of values of two factors occurs.

    Greedy: of some candidates that each start with a pair that is still missing, the one that has
    the most missing pairs.
    """
    chance = random.Random(0)

    def pairs_of(row: Mapping[str, int]) -> set[tuple[tuple[str, int], ...]]:
        return set(combinations(row.items(), 2))

    every = [[(name, i) for i in range(len(values))] for name, values in factors.items()]
    missing = {pair for one, other in combinations(every, 2) for pair in product(one, other)}
    rows = []
    while missing:
        candidates = [
            {name: chance.randrange(len(values)) for name, values in factors.items()} | dict(pair)
            for pair in chance.sample(sorted(missing), min(50, len(missing)))
        ]
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append({name: factors[name][index] for name, index in best.items()})
    return rows


CASES = pairwise(FACTORS)
"""Arguments of :func:`make_call`."""


@dataclass(frozen=True)
class Call(ProjectionCall):
    """A call with a pool full of noise.

    Attributes:
        memory: All bytes that the pool is a view of, its gaps too.
    """

    memory: torch.Tensor

    def written_by(
        self, way: Callable[[ProjectionCall], None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let ``way`` write; K and V of the named slots ``[n, kv_heads, head_dim]`` in float64.

        Fails when another byte of the pool changed. The pool is then as it was before.
        """
        before = self.memory.clone()
        way(self)
        results = [part[self.slots.long()] for part in self._bits()]
        for part in self._bits():
            part[self.slots.long()] = 0
        after = self.memory.clone()
        self.memory.copy_(before)
        for part in self._bits():
            part[self.slots.long()] = 0
        assert torch.equal(after, self.memory), "something else was written"
        self.memory.copy_(before)
        k, v = (result.view(self.pool.k.dtype).double() for result in results)
        return k * self.pool.k_scale, v * self.pool.v_scale

    def _bits(self) -> list[torch.Tensor]:
        """The pool as integers: noise is not always a number, and torch cannot index fp8."""
        return [part.view(_BITS[part.itemsize]) for part in (self.pool.k, self.pool.v)]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def make_call(
    dtypes: tuple[torch.dtype, torch.dtype] = (BF16, BF16),
    norm: tuple[str, str, str] | None = None,
    rope: tuple[str, int | None] | None = None,
    rounding: Rounding | None = None,
    bias: bool = False,
    head_dim: int = 64,
    n: int = 7,
    kv_heads: int = 2,
    depth: int = 64,
    index: torch.dtype = torch.int64,
    strided: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> Call:
    """A random call; ``strided``: hidden states and pool are views of something larger."""
    random_ = torch.Generator().manual_seed(seed)
    model, kept = dtypes
    width = kv_heads * head_dim

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = mean + scale * torch.randn(*shape, generator=random_)
        return values.to(model).to(device)

    projection = KVProjection(
        weight=normal(2 * width, depth, scale=depth**-0.5),
        bias=normal(2 * width) if bias else None,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm=_norm(norm, width, head_dim, normal) if norm else None,
        rotary=_rotary(rope, head_dim, device) if rope else None,
        rounding=rounding or Rounding(),
    )
    hidden = normal(n, depth + 16 * strided)[:, :depth]
    positions = torch.randint(POSITIONS, (n,), generator=random_).to(index).to(device)
    slots = torch.randperm(n + SPARE_SLOTS, generator=random_)[:n].to(index).to(device)
    shape = (n + SPARE_SLOTS, 2, kv_heads + strided, head_dim * kept.itemsize)
    memory = torch.randint(256, shape, generator=random_, dtype=torch.uint8).to(device)
    # Strided: K and V of a slot side by side, and a head's room between slots.
    if not strided:
        memory = memory.transpose(0, 1).contiguous()
    k, v = memory.view(kept).unbind(1 if strided else 0)
    scales = (0.37, 1.9) if kept in (E4M3, E5M2) else (1.0, 1.0)
    pool = KVPool(k[:, :kv_heads], v[:, :kv_heads], *scales)
    return Call(hidden, positions, slots, projection, pool, memory)


def _norm(
    norm: tuple[str, str, str], width: int, head_dim: int, normal: Callable[..., torch.Tensor]
) -> KeyNorm:
    kind, over, parameters = norm
    size = width if over == "all" or "each head" in parameters else head_dim
    return KeyNorm(
        kind=kind,  # type: ignore[arg-type]
        over=over,  # type: ignore[arg-type]
        weight=normal(size, scale=0.2, mean=1.0) if "weight" in parameters else None,
        bias=normal(size, scale=0.2) if "bias" in parameters else None,
        epsilon=1e-6,
    )


def _rotary(rope: tuple[str, int | None], head_dim: int, device: str) -> Rotary:
    style, dim = rope[0], rope[1] or head_dim
    angles = torch.outer(torch.arange(POSITIONS), 1e4 ** (-torch.arange(0, dim, 2) / dim))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(device)
    return Rotary(cos_sin, style, dim)  # type: ignore[arg-type]


def exact_kv(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V ``[n, kv_heads, head_dim]`` in float64, written without a look at the product."""
    projection, norm, rotary = call.projection, call.projection.norm, call.projection.rotary
    kv = torch.einsum("nd,od->no", call.hidden.double(), projection.weight.double())
    if projection.bias is not None:
        kv += projection.bias.double()
    k, v = kv.reshape(len(kv), 2, projection.kv_heads, projection.head_dim).unbind(1)
    if norm is not None:
        shape = k.shape
        k = k.flatten(1) if norm.over == "all" else k
        if norm.kind == "layer":
            k = k - k.mean(-1, keepdim=True)
        k = k / (k.pow(2).mean(-1, keepdim=True) + norm.epsilon).sqrt()
        k = k.reshape(shape)
        weight, bias = (
            torch.broadcast_to(p.double().reshape(-1, shape[2]), shape[1:]) if p is not None else p
            for p in (norm.weight, norm.bias)
        )
        k = k if weight is None else k * weight
        k = k if bias is None else k + bias
    if rotary is not None:
        cos, sin = rotary.cos_sin.double()[call.positions.long()].chunk(2, -1)
        turn = torch.complex(cos, sin)[:, None]
        half = rotary.rotary_dim // 2
        order = torch.arange(rotary.rotary_dim, device=k.device)
        pairs = order.view(2, half).T if rotary.style == "neox" else order.view(half, 2)
        turned = torch.view_as_real(torch.view_as_complex(k[..., pairs].contiguous()) * turn)
        k = k.clone()
        k[..., pairs] = turned
    return k, v


def assert_as_exact_as_torch(
    got: Sequence[torch.Tensor], torchs: Sequence[torch.Tensor], call: Call
) -> None:
    """K's and V's error against float64 is at most torch's in the same types.

    The root mean square decides. Two right results differ in which of two neighbours a value
    halfway rounds to, and in the order of float32 sums: that is what the slack is for.
    """
    for name, ours, theirs, exact in zip("kv", got, torchs, exact_kv(call), strict=True):
        error, allowed = (float((x - exact).square().mean().sqrt()) for x in (ours, theirs))
        noise = 2.0**-22 * float(exact.square().mean().sqrt())
        assert error <= 1.02 * allowed + noise, f"{name}: error {error}, torch's is {allowed}"
