"""Layers with FP8 weights in PyTorch: inputs are quantised as on GPUs.

SGLang loads weights and chooses layouts as ever; the kernels below are replaced. Inputs get scales
by group (block-wise weights), by token (weights with a scale for each channel), from the checkpoint
(static ones), or one for all tokens of a batch (other weights with one scale, as on AMD's GPUs).

Products are float32. `reordering` says when their sums depend on the number of rows.
"""

import importlib
from typing import Any

import torch

_FP8 = torch.float8_e4m3fn
_LARGEST = 448.0
_SMALLEST_SCALE = 1e-10 / _LARGEST

_LAYERS = "sglang.srt.layers.quantization"
_WITH_SCALED_PRODUCTS = (
    "fp8_utils",
    "fp8",
    "w8a8_fp8",
    "compressed_tensors.schemes.compressed_tensors_w8a8_fp8",
)


def install() -> None:
    """Put the operators in their places, and let go of the demand for AMX."""
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.layers.quantization import fp8, fp8_utils
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.cpu_has_amx_support = lambda: True  # it is asked about FP8 KV only
    fp8._is_cpu = False  # plain layouts, as on GPUs, instead of those of AMX
    fp8_kernel.per_token_group_quant_fp8 = quantise_groups
    fp8_kernel.sgl_per_tensor_quant_fp8 = quantise_by_scale
    fp8_utils.per_token_group_quant_fp8 = quantise_groups
    fp8_utils.w8a8_block_fp8_matmul_triton = product_of_blocks
    for name in _WITH_SCALED_PRODUCTS:
        vars(importlib.import_module(f"{_LAYERS}.{name}"))["apply_fp8_linear"] = scaled_linear
    schemes = compressed_tensors.CompressedTensorsConfig
    schemes._check_scheme_supported = lambda *_, **_choices: True  # it asks CUDA
    for config in (fp8.Fp8Config, schemes):
        # With float32 between them, tests can ask for equal tokens.
        config.get_supported_act_dtypes = lambda *_: [torch.float32, torch.bfloat16, torch.half]


def quantise_groups(
    rows: torch.Tensor, group_size: int, **_layout: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 of rows `[n, k]`, and their scales by group, float32 `[n, k / group_size]`."""
    groups = rows.reshape(len(rows), -1, group_size)
    scales = _scales(groups.float().abs().amax(-1))
    return _to_fp8(groups, scales[..., None]).view_as(rows), scales


def quantise_by_scale(
    rows: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, *, is_static: bool
) -> None:
    """Write FP8 of `rows` to `output`; a scale that is not static is written, too."""
    if not is_static:
        scale.copy_(_scales(rows.float().abs().amax()))
    output.copy_(_to_fp8(rows, scale))


def product_of_blocks(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """`rows @ weight.T`, `[n, m]`.

    Args:
        rows: FP8 `[n, k]`, a scale for `block_size[1]` values of a row.
        weight: FP8 `[m, k]`, a scale for each block of `block_size`; the last may be cut off.
    """
    size = weight.shape
    by_row = row_scales.repeat_interleave(block_size[1], 1)[:, : size[1]]
    for dim, length in enumerate(block_size):
        weight_scales = weight_scales.repeat_interleave(length, dim)
    by_weight = weight_scales[: size[0], : size[1]]
    return _product(rows.float() * by_row, weight.float() * by_weight).to(output_dtype)


def scaled_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    **_choices: Any,
) -> torch.Tensor:
    """`input @ weight + bias`, in the type of `input`.

    Args:
        input: `[..., k]`.
        weight: FP8 `[k, m]`.
        weight_scale: One, or one for each of the `m` channels.
        input_scale: The static one. None: the largest value of a token decides, or of all tokens.
    """
    rows = input.reshape(-1, input.shape[-1]).float()
    if input_scale is None:
        by_token = use_per_token_if_dynamic or weight_scale.numel() > 1
        input_scale = _scales(rows.abs().amax(1, keepdim=True) if by_token else rows.abs().amax())
    taken = _to_fp8(rows, input_scale).float() * input_scale
    by_channel = weight.t().float() * weight_scale.reshape(-1, 1)
    product = _product(taken, by_channel, None if bias is None else bias.float())
    return product.to(input.dtype).view(*input.shape[:-1], -1)


def _product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """By the function that `reordering` replaces."""
    return torch.nn.functional.linear(rows, weight, bias)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Scales that take values of this size to the largest number of FP8."""
    return (largest / _LARGEST).clamp_min(_SMALLEST_SCALE)


def _to_fp8(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8)
