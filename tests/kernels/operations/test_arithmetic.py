"""What the kernels rely on: casts and products give what torch gives, to the bit."""

import pytest
import torch
import triton
import triton.language as tl

SIDE = 32


@triton.jit
def cast_kernel(x, out, n: tl.constexpr):
    rows = tl.arange(0, n)
    tl.store(out + rows, tl.load(x + rows).to(tl.float32).to(out.dtype.element_ty))


@triton.jit
def product_kernel(a, b, out, side: tl.constexpr):
    at = tl.arange(0, side)[:, None] * side + tl.arange(0, side)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee")
    tl.store(out + at, product)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    cast_kernel[(1,)](x, out, x.numel())
    return out


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    numbers = ~want.isnan()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[numbers].float(), want[numbers].float())
    assert torch.equal(got[numbers].float().signbit(), want[numbers].float().signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_number_of_a_short_type_survives(device: str, dtype: torch.dtype) -> None:
    size = dtype.itemsize
    bits = torch.arange(1 << (8 * size), dtype=torch.int32)
    codes = bits.to(torch.uint8 if size == 1 else torch.uint16).view(dtype).to(device)
    same_bits(cast(codes, torch.float32), codes.float())
    same_bits(cast(codes, dtype).float(), codes.float())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_rounding_is_to_nearest_even(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    limit = min(torch.finfo(dtype).max, 1e30)
    x = torch.randn(2048) * 10.0 ** torch.randint(-9, 9, (2048,))
    # Exactly between two numbers, at both kinds of last bit.
    ties = torch.arange(2048).float() + 0.5
    exact = torch.cat((x, ties)).clamp(-limit, limit).to(device)
    same_bits(cast(exact, dtype).float(), exact.to(dtype).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_summed_in_float32(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in "ab")
    out = torch.empty(SIDE, SIDE, device=device)
    product_kernel[(1,)](a, b, out, SIDE)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
