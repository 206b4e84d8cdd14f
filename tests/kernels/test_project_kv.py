"""``project_kv`` as others call it: right, refused when it cannot be, and nothing else written."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hcache_kernels.project_kv import check_projection, check_rows, compute_kv, project_kv
from tests.kernels.projection_cases import CASES, POSITIONS, exact_kv, make_call

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]

# Relative error (root mean square) of a value rounded up to three times.
ERROR = {
    torch.float32: 1e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3,
    torch.float8_e4m3fn: 4e-2,
    torch.float8_e5m2: 8e-2,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", range(len(CASES)))
def test_right_to_rounding_and_other_slots_untouched(number: int, device: str) -> None:
    call = make_call(**CASES[number], device=device, seed=number)
    bound = max(ERROR[dtype] for dtype in (call.hidden.dtype, call.pool.k.dtype))
    for got, exact in zip(call.written_by(project_kv), exact_kv(call), strict=True):
        assert float((got - exact).norm() / exact.norm()) < bound


@pytest.mark.parametrize("device", DEVICES)
def test_computed_k_and_v_are_those_that_are_stored(device: str) -> None:
    call = make_call(norm=("rms", "head", "weight"), rope=("neox", None), device=device)
    k, v = compute_kv(call.hidden, call.positions, call.projection)
    stored_k, stored_v = call.written_by(project_kv)
    assert torch.equal(k.double(), stored_k)
    assert torch.equal(v.double(), stored_v)


@pytest.mark.parametrize("device", DEVICES)
def test_no_tokens_write_nothing(device: str) -> None:
    k, v = make_call(n=0, device=device).written_by(project_kv)
    assert len(k) == len(v) == 0


@pytest.mark.parametrize(
    ("field", "row", "value", "message"),
    [
        ("slots", 3, 16, "slots go from .* to 16: must be from 0 to 15, the pool's slots"),
        ("slots", 0, -1, "slots go from -1 to .*: must be from 0 to 15"),
        ("positions", 6, POSITIONS, "positions go from .* to 97: must be from 0 to 96, .*cos_sin"),
        ("positions", 2, -5, "positions go from -5 to"),
    ],
)
def test_rows_outside_are_refused_and_nothing_is_written(
    field: str, row: int, value: int, message: str
) -> None:
    call = make_call(rope=("neox", None))
    getattr(call, field)[row] = value
    before = call.memory.clone()
    with pytest.raises(ValueError, match=message):
        project_kv(call)
    with pytest.raises(ValueError, match=message):
        check_rows(call)
    assert torch.equal(call.memory, before)


def changed(value: Any, field: str, new: object) -> Any:
    """A copy with another ``field``, which may be one of a part: ``pool.k``."""
    part, _, rest = field.partition(".")
    return replace(value, **{part: changed(getattr(value, part), rest, new) if rest else new})


BAD_PROJECTIONS = [
    ("projection.kv_heads", 0, "kv_heads: 0 is not at least 1"),
    ("projection.head_dim", 60, "head_dim: 60 is not a multiple of 8, at most 256"),
    ("projection.head_dim", 512, "head_dim: 512 is not"),
    ("projection.kv_heads", 3, r"weight: \(256, 64\) is not \[384, hidden\]"),
    ("projection.weight", torch.zeros(256, 64).double(), "weight: torch.float64 is not float32"),
    ("projection.weight", torch.zeros(64, 256).T, "weight: strides .* is not last stride 1"),
    ("projection.bias", torch.zeros(128), r"bias: \(128,\) is not \[256\]"),
    ("projection.bias", torch.zeros(512)[::2], "bias: strides .* is not contiguous"),
    ("projection.norm.epsilon", -1.0, "norm.epsilon: -1.0 is not at least 0"),
    ("projection.norm.weight", torch.ones(7), r"norm.weight: \(7,\) is not \[64 or 128\]"),
    ("projection.norm.over", "all", r"norm.weight: \(64,\) is not \[128\]"),
    ("projection.rotary.rotary_dim", 33, "rotary.rotary_dim: 33 is not even, at most head_dim 64"),
    ("projection.rotary.rotary_dim", 128, "rotary.rotary_dim: 128 is not even"),
    ("projection.rotary.rotary_dim", 32, r"rotary.cos_sin: \(97, 64\) is not \[positions, 32\]"),
    (
        "projection.rotary.cos_sin",
        torch.ones(9, 64, device="meta"),
        "rotary.cos_sin: meta is not on cpu",
    ),
]

BAD_CALLS = [
    ("hidden", torch.zeros(7, 32, dtype=torch.bfloat16), r"hidden: \(7, 32\) is not \[n, 64\]"),
    ("hidden", torch.zeros(7, 64), "hidden: torch.float32 is not bfloat16"),
    ("hidden", torch.zeros(64, 7).bfloat16().T, "hidden: strides .* is not last stride 1"),
    ("hidden", torch.zeros(7, 64, device="meta").bfloat16(), "hidden: meta is not on cpu"),
    ("positions", torch.arange(6), r"positions: \(6,\) is not \[7\]"),
    ("positions", torch.arange(7.0), "positions: torch.float32 is not int32 or int64"),
    ("slots", torch.arange(7).view(7, 1), r"slots: \(7, 1\) is not \[7\]"),
    ("slots", torch.arange(14)[::2], "slots: strides .* is not contiguous"),
    ("slots", torch.arange(7, device="meta"), "slots: meta is not on cpu"),
    ("pool.k", torch.zeros(16, 64, 2), r"pool.k: \(16, 64, 2\) is not \[slots, 2, 64\]"),
    ("pool.k", torch.zeros(16, 64, 2).bfloat16().mT, "pool.k: strides"),
    ("pool.v", torch.zeros(15, 2, 64).bfloat16(), r"pool.v: \(15, 2, 64\) is not \[16, 2, 64\]"),
    ("pool.v", torch.zeros(16, 2, 64), "pool.v: torch.float32 is not bfloat16"),
    ("pool.k", torch.zeros(16, 2, 64).double(), "pool.k: torch.float64 is not float32"),
    ("pool.k_scale", 0.0, "pool.k_scale: 0.0 is not more than 0"),
    ("pool.v_scale", 0.5, "pool.v_scale: 0.5 is not 1.0 for a pool of torch.bfloat16"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD_PROJECTIONS + BAD_CALLS)
def test_arguments_that_do_not_fit_are_refused(field: str, value: object, message: str) -> None:
    call = changed(make_call(norm=("rms", "head", "weight"), rope=("neox", None)), field, value)
    with pytest.raises(ValueError, match=message):
        project_kv(call)
    if field.startswith("projection"):
        with pytest.raises(ValueError, match=message):
            check_projection(call.projection)
