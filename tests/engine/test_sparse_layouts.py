"""The CPU engine writes index keys and FP8 latents as SGLang's own kernels do, to the byte.

Triton interprets these. Its interpreter rounds to FP8 without a carry to the exponent, so the
values here are exact in FP8.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env

pytestmark = pytest.mark.engine

PAGE, ROWS = 64, 70


def test_rows_and_pages_are_those_of_sglangs_kernels() -> None:
    interpreted = {"HCACHE_CPU_ENGINE_TRITON": "real", "TRITON_INTERPRET": "1"}
    env = os.environ | cpu_engine_env() | interpreted
    command = [sys.executable, "-m", __name__]
    subprocess.run(command, env=env, check=True, cwd=Path(__file__).parents[2])


def compare() -> None:
    """In a process of the CPU engine, in which no plugin has replaced the kernels."""
    from types import SimpleNamespace

    import torch
    from hcache_cpu_engine import dsa
    from sglang.kernels.ops.kvcache.dsa_index_k_cache import _set_k_and_s_triton
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_triton
    from sglang.kernels.ops.quantization.act_quant_triton import act_quant
    from sglang.kernels.ops.quantization.dsa_quant_k_cache import quantize_k_cache_separate

    def exact(groups: int) -> torch.Tensor:
        """Rows of groups of 128 values, the largest of which is 448 times a power of two."""
        values = torch.randn(ROWS, groups, 128).mul(30).to(torch.float8_e4m3fn).float()
        values[..., 5] = -448
        return (values * 2.0 ** torch.randint(-6, 7, (ROWS, groups, 1))).flatten(1)

    torch.manual_seed(0)
    for form in ("ue8m0", None):
        keys = exact(1)
        ours, theirs = dsa.quantise(keys, form), act_quant(keys, 128, form)
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8)), form
    pages = torch.zeros(2, 4, PAGE * 132, dtype=torch.uint8)
    slots = torch.randperm(4 * PAGE)[:ROWS]
    pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer: pages[layer])
    dsa.write_index_keys(pool, 0, slots, *ours)
    _set_k_and_s_triton(pages[1], slots, *ours, PAGE)
    assert torch.equal(*pages) and pages[0].any()

    latents = exact(4).bfloat16()[:, None], torch.randn(ROWS, 1, 64).bfloat16()
    packed, others = dsa.pack_latents(*latents), quantize_k_cache_separate(*latents)
    assert all(map(torch.equal, packed, others))
    for parts in (packed, latents):
        width = sum(part.shape[-1] for part in parts)
        rows = torch.zeros(2, 4 * PAGE, 1, width, dtype=parts[0].dtype)
        slots = 1 + torch.randperm(4 * PAGE - 1)[:ROWS]
        dsa.write_latents(rows[0], slots, *parts)
        set_mla_kv_buffer_triton(rows[1], slots, *parts)
        assert torch.equal(*rows) and rows[0].any()


if __name__ == "__main__":
    compare()
