"""A tiny random LoRA adapter in PEFT's file format, written without PEFT."""

import json
from pathlib import Path

RANK = 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def build_lora(model: Path, cache_dir: Path, *, seed: int = 0) -> Path:
    """Folder of an adapter to the attention projections of the Llama-like `model`.

    Its product is about as large as the weights it adds to, so that the output changes.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder = cache_dir / f"lora-{seed}-of-{model.name}"
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    with safe_open(model / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - no mapping
            if name.removesuffix(".weight").endswith(TARGETS):
                rows, columns = weights.get_slice(name).get_shape()
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                    drawn = torch.randn(shape, generator=generator) * 0.15
                    adapter[f"{stem}.{part}.weight"] = drawn
    save_file(adapter, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    return folder
