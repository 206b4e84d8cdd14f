"""Models with FP8 weights, made of those of `build_model`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 128
_LARGEST = 448.0

KINDS: dict[str, dict[str, Any]] = {
    # DeepSeek's and Qwen's own checkpoints: inputs get a scale for 128 values of a token.
    "blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
    # llm-compressor's FP8_DYNAMIC: a scale for each channel of a weight, and each token.
    "tokens": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "token",
                    "symmetric": True,
                    "dynamic": True,
                },
            }
        },
    },
    # One scale for a weight, and one in the checkpoint for all its inputs.
    "static": {"quant_method": "fp8", "activation_scheme": "static"},
    # One scale for a weight, and one for all tokens of a batch.
    "batch": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


def quantised(model: Path, folder: Path, kind: str) -> Path:
    """A copy of a Llama-like `model` whose linear layers are FP8, in a folder of its own."""
    import torch
    from safetensors.torch import load_file, save_file

    def by_blocks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, _, columns, _]
        scales = blocks.abs().amax((1, 3)) / _LARGEST
        of_blocks = scales[:, None, :, None]
        return _named(name, (blocks / of_blocks).view_as(weight), weight_scale_inv=scales)

    def by_channel(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / _LARGEST
        return _named(name, weight / scales, weight_scale=scales)

    def whole(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax() / _LARGEST
        found = _named(name, weight / scale, weight_scale=scale)
        if kind == "static":  # no input of these models is larger
            largest = 256.0 if "down_proj" in name else 16.0
            found |= {f"{name}.input_scale": torch.tensor(largest / _LARGEST)}
        return found

    ways: dict[str, Callable[[str, torch.Tensor], dict[str, torch.Tensor]]] = {
        "blocks": by_blocks,
        "tokens": by_channel,
    }
    made = folder / f"{model.name}-{kind}"
    shutil.copytree(model, made)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights |= ways.get(kind, whole)(name.removesuffix(".weight"), weight)
        else:
            weights[name] = weight
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    settings = json.loads((made / "config.json").read_text())
    settings["quantization_config"] = KINDS[kind]
    (made / "config.json").write_text(json.dumps(settings, indent=2))
    return made


def _named(name: str, weight: Any, **scales: Any) -> dict[str, Any]:
    import torch

    parts = {f"{name}.{part}": scale.contiguous() for part, scale in scales.items()}
    return parts | {f"{name}.weight": weight.to(torch.float8_e4m3fn).contiguous()}
