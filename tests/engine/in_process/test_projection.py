"""Specs write to SGLang's own KV pool what its own set_kv_buffer writes."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from hcache_backend.checks import self_check
from hcache_backend.checks.self_check import LayerSpecs, ObservedPass
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.exactness import Bound, relative_difference, tolerance
from hcache_backend.projection.paged_pool import PagedPool
from hcache_backend.projection.projector import Projector
from hcache_backend.projection.search import LESS_EXACT, find_spec, gather_evidence
from hcache_backend.sglang.weights import LoadedWeights
from hcache_kernels.project_kv import ProjectionCall
from hcache_kernels.project_kv.reference import project_kv_reference
from tests.unit.attention_modules import (
    DIM,
    HEADS,
    POSITION_LIMIT,
    Attention,
    Norm,
    Rope,
    SwitchingRope,
    layer_of,
    tokens,
)


def pool_of(dtype: torch.dtype) -> MHATokenToKVPool:
    return MHATokenToKVPool(
        size=192,
        page_size=64,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def attention_layer(index: int, scales: tuple[float, float] | None) -> AttentionLayer:
    kernel = RadixAttention(HEADS, DIM, 1.0, HEADS, index)
    if scales is not None:
        kernel.k_scale, kernel.v_scale = (torch.tensor(scale) for scale in scales)
        kernel.k_scale_float, kernel.v_scale_float = scales
    return replace(layer_of(Attention(rope=Rope(), norm={})), index=index, kernel=kernel)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, (0.5, 2.0)),  # set_kv_buffer divides by them when types differ
        (torch.float8_e4m3fn, None),
        (torch.float8_e4m3fn, (0.25, 2.0)),
        (torch.float8_e5m2, (0.25, 2.0)),
    ],
)
def test_a_spec_fills_the_pool_as_the_engine_does(
    dtype: torch.dtype, scales: tuple[float, float] | None
) -> None:
    torch.manual_seed(0)
    layer = attention_layer(1, scales)
    hidden, positions = tokens()
    evidence = gather_evidence(layer, hidden, positions, POSITION_LIMIT)
    spec = find_spec(layer, evidence)
    assert spec.fused
    slots = torch.randperm(192)[: len(hidden)]
    others = torch.ones(len(pool_of(dtype).k_buffer[1]), dtype=torch.bool)
    others[slots] = False
    pools, projectors = [], []
    for specs in ([None, None], [None, spec]):
        pool = pool_of(dtype)
        projector = Projector(PagedPool(pool), 2)
        projector.specs = specs
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(1)
        projector.project_to_pool(layer, hidden, positions, slots)
        pools.append(pool)
        projectors.append(projector)
    for name in ("k_buffer", "v_buffer"):
        engine, ours = (getattr(pool, name)[1] for pool in pools)
        want, got = (buffer.view(dtype)[slots].float() for buffer in (engine, ours))
        assert relative_difference(got, want) <= tolerance(dtype) / 4
        assert torch.equal(ours[others], engine[others])
        assert (getattr(pools[1], name)[0] == 1).all()
    # What the self-check at start does with it, on a pool that the engine filled.
    projector = projectors[0]
    projector.specs = [None, spec]
    observed = ObservedPass((layer, layer), (hidden, hidden), slots, positions, positions)
    written = observed.write_exactness(layer, projector, [None])
    assert written.as_good_as(evidence.of_module, Bound.of_product(dtype))
    wrong = replace(spec, k=spec.v, v=spec.k, fused=False)
    projector.specs = [None, wrong]
    written = observed.write_exactness(layer, projector, [None])
    assert not written.as_good_as(evidence.of_module, Bound.of_product(dtype))


def test_scales_that_are_no_numbers_are_left_to_the_engine() -> None:
    pool = PagedPool(pool_of(torch.float8_e4m3fn))
    layer = attention_layer(0, (0.25, 2.0))
    assert pool.of_layer(layer) is not None
    kernel = SimpleNamespace(
        k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.5), k_scale_float=None, v_scale_float=0.5
    )
    assert pool.of_layer(replace(layer, kernel=kernel)) is None


def rotated() -> list[Attention]:
    """The modules of two layers."""
    return [Attention(rope=Rope()) for _ in range(2)]


class Projections:
    """Everything between a passed self-check and the first request, for a pool of two layers."""

    def __init__(self, modules: list[Attention]) -> None:
        layers = [
            replace(attention_layer(index, None), module=module)
            for index, module in enumerate(modules)
        ]
        self.weights = LoadedWeights(None)
        self.projector = Projector(PagedPool(pool_of(torch.float32)), 2)
        hidden, positions = tokens()
        slots = torch.arange(64, 64 + len(hidden))
        observed = ObservedPass(tuple(layers), (hidden, hidden), slots, positions, positions)
        for layer in layers:  # what the model would have written
            self.projector.project_to_pool(layer, hidden, positions, slots)
        self.specs = LayerSpecs(self.weights, observed, self.projector, None, POSITION_LIMIT)
        self.specs.find()
        self.specs.check_writing()
        self.specs.use_agreed()

    @property
    def by_spec(self) -> list[bool]:
        return [spec is not None for spec in self.projector.specs]

    @property
    def said(self) -> list[tuple[str, str]]:
        """How groups of layers are projected, and why."""
        return [(group.method, group.detail) for group in self.specs.projection]


def test_a_layer_without_a_spec_on_one_rank_has_none_on_any(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "smallest", lambda group, *flags: (flags[0], False))
    projections = Projections(rotated())
    assert projections.by_spec == [True, False]
    assert projections.said == [
        ("spec", "fused weight 128x96, RoPE neox 16"),
        ("generic", "another rank has no spec"),
    ]


def way_that(change: Callable[[ProjectionCall], None]) -> Any:
    """A way to project on a GPU that does what the reference does, and then this."""

    def run(call: ProjectionCall, product: torch.Tensor | None) -> None:
        project_kv_reference(call)
        change(call)

    return SimpleNamespace(run=run)


def rounded_once_more(call: ProjectionCall) -> None:
    call.pool.k[call.slots] = call.pool.k[call.slots].half().float()


GOOD, BAD = way_that(lambda call: None), way_that(rounded_once_more)


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        ([None], "fused weight 128x96, RoPE neox 16"),
        ([None, GOOD], "fused weight 128x96, RoPE neox 16"),
        ([GOOD, BAD], "128 columns of one module, RoPE neox 16"),
    ],
)
def test_each_way_to_project_is_tested(
    ways: list[Any], found: str, monkeypatch: MonkeyPatch
) -> None:
    """What was measured to be the fastest may not be exact; the module's own product is, then."""
    monkeypatch.setattr(self_check, "ways_in_use", lambda *_: ways)
    projections = Projections(rotated())
    assert projections.by_spec == [True, True]
    assert projections.said == [("spec", found)]


def test_modules_project_where_no_product_is_exact_in_the_pool(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "ways_in_use", lambda *_: [BAD])
    write, written = PagedPool.store, itertools.count()

    def store(pool: PagedPool, kernel: Any, slots: Any, k: Any, v: Any) -> None:
        write(pool, kernel, slots, k * (1 + 1e-3 * next(written)), v)

    monkeypatch.setattr(PagedPool, "store", store)
    projections = Projections(rotated())
    assert projections.by_spec == [False, False]
    [group] = projections.specs.projection
    assert group.detail == f"in the KV pool {LESS_EXACT}" and group.exactness.startswith("spec K")


def test_the_environment_leaves_every_layer_to_its_module(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setenv("HCACHE_PROJECTION", "generic")
    projections = Projections(rotated())
    assert projections.by_spec == [False, False]
    assert projections.said == [("generic", "HCACHE_PROJECTION is 'generic'")]


def test_no_spec_is_used_between_a_weight_update_and_the_flush() -> None:
    modules = [Attention(rope=Rope(), norm={}) for _ in range(2)]
    projections = Projections(modules)
    weights = projections.weights
    projections.specs.follow_weights()
    weights.caches_were_flushed()
    assert projections.by_spec == [True, True]
    weights.begin_update()
    assert projections.by_spec == [False, False]
    modules[0].norm_of_k = Norm(8)  # from now on the module cannot even be called
    modules[1].norm_of_k.kind = "layer"
    weights.caches_were_flushed()
    assert projections.by_spec == [False, False]
    assert "after a weight update: RuntimeError" in projections.specs.projection[0].detail
    modules[0].norm_of_k = Norm(DIM)
    weights.begin_update()
    weights.caches_were_flushed()
    kinds = [spec and spec.norm and spec.norm.kind for spec in projections.projector.specs]
    assert kinds == ["rms", "layer"]


def test_trust_ends_when_new_weights_make_tokens_depend_on_each_other() -> None:
    projections = Projections(modules := rotated())
    projections.specs.follow_weights()
    projections.weights.begin_update()
    modules[1].rope = SwitchingRope(by_batch=True)
    projections.weights.caches_were_flushed()
    assert projections.by_spec == [False, False]
    said = "at positions 0..47 changes when position 2047 is projected"
    assert said in str(projections.weights.quarantine)
