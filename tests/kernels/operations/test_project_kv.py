"""Both ways of ``project_kv`` on Triton: as exact as torch, and nothing else is written."""

from typing import Any

import pytest
import torch

from hcache_kernels.project_kv.reference import project_kv_reference
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import LIBRARY, Way, fused_configs, possible_ways
from tests.kernels.operations.conftest import ON_CPU, capability
from tests.kernels.projection_cases import (
    CASES,
    ROUNDINGS,
    Call,
    assert_as_exact_as_torch,
    make_call,
)


def find_way(name: str, call: Call, number: int = 0) -> Way:
    """The library way, or the fused one with one of the device's configurations."""
    if not possible_ways(kind_of(call.projection), call.pool.k.dtype, capability()):
        pytest.skip("the device has no way for this type of pool")
    if name == "library":
        return LIBRARY
    configs = fused_configs(kind_of(call.projection), capability())
    return Way(configs[number % len(configs)])


def check(case: dict[str, Any], way: str, device: str, number: int = 0) -> None:
    call = make_call(**case, device=device, seed=number)
    got = call.written_by(find_way(way, call, number).run)
    assert_as_exact_as_torch(got, call.written_by(project_kv_reference), call)


RARE = [pytest.mark.long] if ON_CPU else []

BOTH_WAYS = [
    pytest.param(number, way, marks=RARE if number % 2 == odd else ())
    for number in range(len(CASES))
    for odd, way in enumerate(("fused", "library"))
]
"""Every case both ways; interpreted, one of them in long runs only."""


@pytest.mark.parametrize(("number", "way"), BOTH_WAYS)
def test_as_exact_as_torch_and_other_slots_untouched(number: int, way: str, device: str) -> None:
    check(CASES[number], way, device, number)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        *(("fused", torch.bfloat16), ("library", torch.float16)),
        pytest.param("fused", torch.float16, marks=RARE),
        pytest.param("library", torch.bfloat16, marks=RARE),
    ],
)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_numbers_are_rounded_where_torch_rounds_them_and_nowhere_else(
    rounding: str, dtype: torch.dtype, way: str, device: str
) -> None:
    calls = {
        name: make_call(
            dtypes=(dtype, dtype),
            norm=("rms", "head", "weight"),
            rope=("neox", None),
            rounding=one,
            n=64,
            device=device,
        )
        for name, one in ROUNDINGS.items()
    }
    call = calls[rounding]
    k, _ = call.written_by(find_way(way, call).run)
    equal = {
        name: float((k == other.written_by(project_kv_reference)[0]).double().mean())
        for name, other in calls.items()
    }
    # Norms sum in another order: now and then a number falls to the other side of a half.
    assert equal.pop(rounding) > 0.995
    assert max(equal.values()) < 0.98, equal


@pytest.mark.parametrize("way", ["fused", "library"])
def test_heads_smaller_than_a_tile(way: str, device: str) -> None:
    case = {"head_dim": 24, "kv_heads": 5, "norm": ("rms", "head", "weight"), "rope": ("neox", 16)}
    check(case, way, device)


def test_hidden_states_of_an_odd_width_go_to_the_library(device: str) -> None:
    case = {"depth": 100, "norm": ("layer", "all", "weight, bias"), "rope": ("interleaved", 32)}
    kind = kind_of(make_call(**case).projection)
    assert fused_configs(kind, capability()) == ()
    check(case, "library", device)


@pytest.mark.parametrize("way", ["fused", "library", "reference"])
@pytest.mark.parametrize("pool_type", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_fp8_cannot_hold_saturates_and_nan_stays(
    way: str, pool_type: torch.dtype, device: str
) -> None:
    call = make_call(dtypes=(torch.bfloat16, pool_type), n=4, device=device)
    call.hidden[1] = 1e30
    call.hidden[2] = float("nan")
    run = project_kv_reference if way == "reference" else find_way(way, call).run
    written = call.written_by(run)
    # For 8.0 Triton itself rounds to e5m2, and carries the bits of NaN into the sign: -0.
    lost = way != "reference" and pool_type == torch.float8_e5m2 and capability() == (8, 0)
    for part, scale in zip(written, (call.pool.k_scale, call.pool.v_scale), strict=True):
        assert part[[0, 3]].isfinite().all()
        largest = torch.finfo(pool_type).max * scale
        torch.testing.assert_close(part[1].abs(), torch.full_like(part[1], largest))
        assert (part[2] == 0 if lost else part[2].isnan()).all()
