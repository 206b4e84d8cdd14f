"""Learning how a model calls its attention, projecting through it, and telling right from wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hcache_backend.projection.attention import (
    AttentionLayer,
    ProjectionBatch,
    ProjectionFailed,
    ProjectionReached,
    UnknownCall,
    learn_call,
    project_with_module,
)
from hcache_backend.projection.exactness import relative_difference, tolerance
from hcache_backend.projection.projector import Projector
from hcache_backend.projection.search import find_spec, gather_evidence
from hcache_kernels.project_kv import KVPool
from tests.unit import attention_modules as modules

POSITIONS = torch.arange(6)
HIDDEN = torch.randn(6, 8)


class Batch:
    """Stands for the engine's batch."""


class Attention(torch.nn.Module):
    """Two KV heads of four, stopped as the engine's hook stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = torch.nn.Linear(8, 16)

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, scale: float = 1.0
    ) -> Any:
        k, v = self.kv(hidden_states).chunk(2, -1)
        if isinstance(forward_batch, ProjectionBatch):
            raise ProjectionReached((k * scale).view(-1, 2, 4), v.view(-1, 2, 4))
        return v


def layer_of(module: torch.nn.Module, *args: Any, **kwargs: Any) -> AttentionLayer:
    call = learn_call(module, args, kwargs, POSITIONS, Batch)
    return AttentionLayer(0, "layers.0.attn", module, module, module, *call)


def test_a_call_is_learned_by_what_its_arguments_are_not_by_their_names() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: Any, where: Any, b: Any = None, flag: Any = None) -> None: ...

    names, _ = learn_call(Odd(), (HIDDEN, POSITIONS.clone()), {"b": Batch()}, POSITIONS, Batch)
    assert names == {"hidden": "x", "positions": "where", "batch": "b"}
    names, _ = learn_call(Odd(), (HIDDEN, Batch()), {}, POSITIONS, Batch)
    assert names == {"hidden": "x", "batch": "where"}


def test_keywords_of_a_call_are_learned_by_name() -> None:
    class Open(torch.nn.Module):
        def forward(self, **given: Any) -> None: ...

    given = {"positions": POSITIONS, "hidden_states": HIDDEN, "batch": Batch()}
    names, _ = learn_call(Open(), (), given, POSITIONS, Batch)
    assert names == {"positions": "positions", "hidden": "hidden_states", "batch": "batch"}
    with pytest.raises(UnknownCall, match="takes no hidden states"):
        learn_call(Open(), (), {"positions": POSITIONS}, POSITIONS, Batch)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(6, 6).bool(), r"takes a tensor 'mask' of shape \(6, 6\)"),
        ([HIDDEN], "takes 'mask', a list"),
    ],
)
def test_an_argument_that_depends_on_the_tokens_is_refused(mask: Any, message: str) -> None:
    class Masked(torch.nn.Module):
        def forward(self, hidden_states: Any, mask: Any) -> None: ...

    with pytest.raises(UnknownCall, match=message):
        learn_call(Masked(), (HIDDEN, mask), {}, POSITIONS, Batch)


def test_projection_repeats_the_call_with_other_tokens_and_its_constants() -> None:
    module = Attention()
    layer = layer_of(module, POSITIONS, HIDDEN, Batch(), scale=2.0)
    hidden = torch.randn(3, 8)
    k, v = project_with_module(layer, hidden, torch.arange(3))
    want_k, want_v = module.kv(hidden).chunk(2, -1)
    torch.testing.assert_close(k, (2 * want_k).view(3, 2, 4))
    torch.testing.assert_close(v, want_v.view(3, 2, 4))


class NoAttention(torch.nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states


class SharedKV(torch.nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        raise ProjectionReached(None, None)


@pytest.mark.parametrize(
    ("module", "message"),
    [(NoAttention(), "did not call attention"), (SharedKV(), "no K and V of its own")],
)
def test_a_module_that_makes_no_k_and_v_is_an_error(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(ProjectionFailed, match=message):
        project_with_module(layer_of(module, HIDDEN), HIDDEN, POSITIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_passes_the_check_and_a_shifted_token_does_not(dtype: torch.dtype) -> None:
    exact = torch.randn(48, 4, 64, dtype=torch.float64)
    rounded = exact.to(dtype)
    # Both sides are rounded, and the sums behind them are ordered differently.
    other = (exact * (1 + torch.finfo(dtype).eps * torch.randn_like(exact))).to(dtype)
    assert relative_difference(other, rounded) < tolerance(dtype)
    assert relative_difference(rounded.roll(1, 0), rounded) > tolerance(dtype)


def test_one_wrong_head_or_one_nan_is_enough() -> None:
    want = torch.randn(48, 4, 64)
    got = want.clone()
    got[:, 2] *= 1.05
    assert relative_difference(got, want) > tolerance(torch.float32)
    got = want.clone()
    got[3, 1, 7] = float("nan")
    assert relative_difference(got, want) == float("inf")
    assert relative_difference(want[:40], want) == float("inf")


class Pool:
    """A pool whose second layer can only be written by itself."""

    dtype = torch.float32

    def __init__(self) -> None:
        shape = (300, modules.HEADS, modules.DIM)
        self.buffers = KVPool(torch.full(shape, 7.0), torch.full(shape, 7.0))

    def of_layer(self, layer: AttentionLayer) -> KVPool | None:
        return self.buffers if layer.index == 0 else None

    def store(self, kernel: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.buffers.k[slots] = k
        self.buffers.v[slots] = v


@pytest.mark.parametrize(
    "made",
    [
        {"rope": modules.Rope(), "norm": {}},
        {"layout": "separate", "rope": modules.Rope(), "bias": True},
    ],
    ids=["fused", "a module for each"],
)
@pytest.mark.parametrize("by_spec", [True, False])
@pytest.mark.parametrize("index", [0, 1])
def test_the_projector_writes_the_named_slots_and_no_others(
    made: dict[str, Any], by_spec: bool, index: int
) -> None:
    layer = replace(modules.layer_of(modules.Attention(**made)), index=index)
    hidden, positions = modules.tokens()
    pool = Pool()
    projector = Projector(pool, 2)
    if by_spec:
        evidence = gather_evidence(layer, hidden, positions, modules.POSITION_LIMIT)
        projector.specs = [find_spec(layer, evidence)] * 2
    slots = torch.randperm(300)[: len(hidden)]
    projector.project_to_pool(layer, hidden, positions, slots)
    others = torch.ones(300, dtype=torch.bool)
    others[slots] = False
    want = project_with_module(layer, hidden, positions)
    for buffer, right in zip((pool.buffers.k, pool.buffers.v), want, strict=True):
        torch.testing.assert_close(buffer[slots], right)
        assert (buffer[others] == 7).all()
    for got, right in zip(projector.project(layer, hidden, positions), want, strict=True):
        torch.testing.assert_close(got, right)
