"""Tiny random models, built on the spot with transformers: no downloads, a second each.

Weights are drawn with a large `initializer_range`, so that attention is peaked and the output
really depends on what is in the KV cache: a wrong row changes the tokens.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

VOCAB = 1024
MAX_POSITIONS = 16384
LAYERS = 4
HIDDEN = 256
HEADS = 4
BUILDER_VERSION = 1  # part of the cache key: raise it when a builder's code changes its output

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_DECODER = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


def _gated(kv_heads: int, **extra: Any) -> dict[str, Any]:
    """Configuration of a Llama-like decoder with a gated MLP."""
    return {**_DECODER, "intermediate_size": 512, "num_key_value_heads": kv_heads, **extra}


# name -> (transformers model type, configuration, what the architecture is there to show)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    # MHA, the case HCache is for.
    "llama": ("llama", _gated(HEADS)),
    # GQA with a bias on q, k and v.
    "qwen2": ("qwen2", _gated(2)),
    # GQA with a norm on each head of q and k.
    "qwen3": ("qwen3", _gated(2, head_dim=64)),
    # MHA with a norm over all heads of q and k together; post-norm residuals.
    "olmo2": ("olmo2", _gated(HEADS)),
    # MHA with biases, learned positions and an attention module without a positions argument.
    "opt": (
        "opt",
        {**_DECODER, "ffn_dim": 512, "word_embed_proj_dim": HIDDEN, "init_std": 0.12},
    ),
    # MHA whose projection is called `c_attn`; learned positions.
    "gpt2": (
        "gpt2",
        {
            **_COMMON,
            "tie_word_embeddings": True,  # SGLang's GPT-2 always uses the embedding as its head
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": MAX_POSITIONS,
            "n_inner": 512,
        },
    ),
}


def build_model(name: str, cache_dir: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Folder of the float32 model `name`, built into `cache_dir` unless it is there already.

    `overrides` change configuration values (`num_hidden_layers=8`). Another `seed` gives other
    weights in another folder; `replace_weights` puts them under a name that is already served.
    """
    model_type, config = ARCHITECTURES[name]
    config = {**config, **overrides}
    content = json.dumps([BUILDER_VERSION, model_type, config, seed], sort_keys=True)
    folder = cache_dir / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if not folder.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache_dir))
        _save_random(model_type, config, seed, scratch)
        _publish(scratch, folder)
    return folder


def replace_weights(model: Path, other: Path) -> None:
    """Give the folder `model` the weights of `other` (same architecture, another seed)."""
    for weights in other.glob("*.safetensors"):
        fresh = model / f"{weights.name}.new"
        shutil.copyfile(weights, fresh)
        fresh.replace(model / weights.name)


def _publish(scratch: Path, folder: Path) -> None:
    """Move a finished folder to its name; another process that was faster has made the same one."""
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)


def _save_random(model_type: str, config: dict[str, Any], seed: int, folder: Path) -> None:
    import torch

    stub_torchvision()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
        _randomise_norms_and_biases(model)
        model.float().save_pretrained(folder)


def _randomise_norms_and_biases(model: Any) -> None:
    """Fresh models have unit norms and zero biases: a projection that skips them would pass."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 1:
                continue
            parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.1)
