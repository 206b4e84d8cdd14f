"""Codec kernels give the reference's bytes and values for rows of any kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("hypothesis", reason="hypothesis is not installed")
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_kernels.codecs import make_codec
from tests.kernels.codec_rows import bfloat16
from tests.kernels.exponent_rows import exponent_rows
from tests.kernels.operations.test_codecs import same_as_reference


@settings(max_examples=30, deadline=None)
@given(exponents=exponent_rows(64), seed=st.integers(0, 2**32))
def test_exp4_of_any_mix_of_exponents(exponents: np.ndarray, seed: int) -> None:
    same_as_reference(make_codec("exp4", 64, torch.bfloat16), bfloat16(exponents[None], seed))


@settings(max_examples=30, deadline=None)
@given(data=st.binary(min_size=128, max_size=128))
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_codecs_of_any_bytes(name: str, dtype: torch.dtype, data: bytes) -> None:
    rows = torch.frombuffer(bytearray(data), dtype=dtype)[None]
    same_as_reference(make_codec(name, rows.shape[1], dtype), rows)
