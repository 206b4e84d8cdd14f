"""Models that bench/gpu/serve.sh serves: shapes of published ones, random weights.

Shapes, vocabularies and constants are those of the published models. Positions go further than
theirs (8192 at most), for histories of the workloads do. Weights are so large that attention is
peaked: the output depends on the KV cache, and a wrong row changes tokens.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu.shapes import LLAMA_7B, LLAMA_8B, LLAMA_13B, OLMO_7B, Shape
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

POSITIONS = 32_768
GAIN = 2.0  # standard deviation of a product of values whose standard deviation is 1
_ALL = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "max_position_embeddings": POSITIONS,
}
_LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
_LLAMA_3 = _LLAMA_2 | {
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "torch_dtype": "bfloat16",
}
_OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "bos_token_id": None,
    "eos_token_id": 100_257,
    "pad_token_id": 100_277,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, tuple[Shape, dict[str, Any]]] = {
    LLAMA_8B.name: (LLAMA_8B, _LLAMA_3),
    LLAMA_7B.name: (LLAMA_7B, _LLAMA_2),
    LLAMA_13B.name: (LLAMA_13B, _LLAMA_2),
    OLMO_7B.name: (OLMO_7B, _OLMO_2),
}


def config(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """The config.json of a model, or of a tiny one of its architecture.

    Raises:
        KeyError: There is no model of that name.
    """
    shape, family = MODELS[name]
    if tiny:
        shape = shape.tiny()
    return {
        **_ALL,
        **family,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
    }


def write_model(folder: Path, content: dict[str, Any], device: str) -> None:
    """Write config.json and model.safetensors to a new folder; weights are drawn on ``device``."""
    from safetensors.torch import save_file

    stub_torchvision()
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content, indent=1) + "\n")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"device": device, "dtype": getattr(torch, content["torch_dtype"])}
    weights = {}
    for name, parameter in empty.named_parameters():
        drawn = torch.randn(parameter.shape, **kinds)
        if parameter.dim() > 1:
            drawn *= GAIN * parameter.shape[-1] ** -0.5
        else:  # a norm. Unscaled, q and k of OLMo-2 average over the whole history
            drawn = (4 if "q_norm" in name else 1) + 0.1 * drawn
        weights[name] = drawn.cpu()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="a tiny one of its architecture")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_model(options.folder, config(options.model, tiny=options.dry_run), device)
    size = (options.folder / "model.safetensors").stat().st_size
    print(f"{options.model}: {size / 1e9:.2f} GB of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
