"""Both ways of ``project_kv`` on Triton: as exact as torch, and nothing else is written."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hcache_kernels.project_kv.configs import fused_configs, kind_of
from hcache_kernels.project_kv.fused import project_kv_fused
from hcache_kernels.project_kv.library import project_kv_library
from hcache_kernels.project_kv.reference import project_kv_reference
from tests.kernels.projection_cases import FACTORS, assert_as_exact_as_torch, make_call, pairwise

CASES = pairwise(FACTORS)
HOPPER = (9, 0)


def name_of(case: dict[str, Any]) -> str:
    return "-".join(
        "/".join(str(part).removeprefix("torch.") for part in value)
        if isinstance(value, tuple)
        else f"{name}:{value}".replace("torch.", "")
        for name, value in case.items()
    )


def capability(device: str) -> tuple[int, int]:
    return torch.cuda.get_device_capability() if device == "cuda" else HOPPER


@pytest.mark.parametrize("way", ["fused", "library"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[name_of(case) for case in CASES])
def test_as_exact_as_torch_and_other_slots_untouched(number: int, way: str, device: str) -> None:
    call = make_call(**CASES[number], device=device, seed=number)
    if way == "fused":
        configs = fused_configs(kind_of(call.projection), capability(device))
        run = partial(project_kv_fused, config=configs[number % len(configs)])
    else:
        run = project_kv_library
    got = call.written_by(run)
    assert_as_exact_as_torch(got, call.written_by(project_kv_reference), call)
