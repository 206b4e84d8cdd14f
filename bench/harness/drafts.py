"""Models and their drafts, for speculative decoding: some of the drafts are accepted."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.models import build_model
from bench.harness.server import Reply

_CHANGED: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"] * 4},
    # In FP8 its rows are multiples of 8 bytes then, as those of real models.
    "glm_5": {"kv_lora_rank": 256},
}
"""What models with a draft layer have otherwise than those without."""


@dataclass(frozen=True)
class Drafting:
    """The model that is served, which decides every token, and SGLang's arguments for drafts."""

    model: Path
    arguments: Sequence[str]


def drafting(algorithm: str, models: Path, folder: Path, *, seed: int = 0) -> Drafting:
    """A Llama of four layers with SGLang's `algorithm`; drafts of another `seed` are others.
    `MTP NAME`: another model, whose checkpoint has a draft layer."""
    if algorithm.startswith("MTP "):
        model = mtp(algorithm.removeprefix("MTP "), models, folder, seed)
        return Drafting(
            model, [*drafting_arguments("EAGLE", model), "--mem-fraction-static", "0.3"]
        )
    model = build_model("llama", models)
    draft: Path | None = None
    if algorithm == "STANDALONE":
        draft = build_model("llama", models, seed=seed)
    elif algorithm == "EAGLE":
        model, draft = eagle(model, folder, seed)
    elif algorithm == "EAGLE3":
        draft = _eagle3(model, folder, seed)
    # Drafts take memory, of which others on this machine may leave little.
    arguments = [*drafting_arguments(algorithm, draft), "--mem-fraction-static", "0.3"]
    return Drafting(model, arguments)


def drafting_arguments(algorithm: str, draft: Path | None) -> list[str]:
    """Arguments for three drafts at a time, one after the other; NGRAM has no draft model."""
    arguments: list[object] = ["--speculative-algorithm", algorithm]
    arguments += ["--speculative-num-draft-tokens", 4]
    if draft is None:
        arguments += ["--speculative-ngram-max-bfs-breadth", 1]
    else:
        arguments += ["--speculative-num-steps", 3, "--speculative-eagle-topk", 1]
        arguments += ["--speculative-draft-model-path", draft]
    return [str(argument) for argument in arguments]


def accepted(reply: Reply) -> list[int]:
    """How many verifications accepted 0, 1, 2... drafts."""
    counts: list[int] = reply.meta_info["spec_correct_drafts_histogram"]
    return counts


def eagle(model: Path, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """A model that is little more than its first layer, and a draft that is this layer.

    EAGLE's layer has no norm before it: rows of the embedding have the norm already.
    """
    import torch

    weights = _little_but_the_first_layer(model)
    weights["model.norm.weight"].fill_(1.0)
    embedding = weights["model.embed_tokens.weight"]
    width = embedding.shape[1]
    draft = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    draft["embed_tokens.weight"] = embedding
    draft["fc.weight"] = torch.eye(width, 2 * width) * (1 + seed)
    draft["fc.bias"] = torch.zeros(width)
    target = _save(folder / "eagle-target", model, weights)
    one_layer = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    return target, _save(folder / f"eagle-{seed}", model, draft, one_layer)


def mtp(name: str, models: Path, folder: Path, seed: int = 0) -> Path:
    """A model that is little more than its first layer, whose draft layer (MTP) is this layer."""
    import torch

    # The draft layer has experts, and so has the first one then.
    model = build_model(name, models, first_k_dense_replace=0, **_CHANGED.get(name, {}))
    weights = _little_but_the_first_layer(model)
    first, width = "model.layers.0.", weights["model.embed_tokens.weight"].shape[1]
    count = 1 + max(int(key.split(".")[2]) for key in weights if ".layers." in key)
    draft = {key.removeprefix(first): w.clone() for key, w in weights.items() if first in key}
    draft["eh_proj.weight"] = torch.eye(width, 2 * width) * (1 + seed)
    draft |= {f"{norm}.weight": torch.ones(width) for norm in ("enorm", "hnorm")}
    draft["shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    weights |= {f"model.layers.{count}.{key}": weight for key, weight in draft.items()}
    return _save(folder / f"mtp-{name}-{seed}", model, weights, {"num_nextn_predict_layers": 1})


def _little_but_the_first_layer(model: Path) -> dict[str, Any]:
    """Weights of a model whose other layers add little, with embeddings of norm one."""
    from safetensors.torch import load_file

    weights: dict[str, Any] = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(1, keepdim=True).sqrt()
    for name, weight in weights.items():
        if ("o_proj" in name or "down_proj" in name) and ".layers.0." not in name:
            weight.mul_(0.01)
    weights["model.layers.0.input_layernorm.weight"].fill_(1.0)
    return weights


def _eagle3(model: Path, folder: Path, seed: int) -> Path:
    """A random draft: next to none of its tokens are accepted."""
    import torch
    from safetensors.torch import load_file

    first = {
        name.removeprefix("model.layers.0."): weight
        for name, weight in load_file(model / "model.safetensors").items()
        if ".layers.0." in name
    }
    width = len(first["input_layernorm.weight"])
    dice = torch.Generator().manual_seed(seed)
    draft = {f"midlayer.{name}": weight for name, weight in first.items()}
    for part in ("q", "k", "v"):
        weight = first[f"self_attn.{part}_proj.weight"]
        draft[f"midlayer.self_attn.{part}_proj.weight"] = torch.cat((weight, weight), 1)
    draft["midlayer.hidden_norm.weight"] = torch.ones(width)
    draft["norm.weight"] = torch.ones(width)
    draft["fc.weight"] = torch.randn(width, 3 * width, generator=dice) / width**0.5
    changes = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    return _save(folder / f"eagle3-{seed}", model, draft, changes)


def _save(
    folder: Path,
    model: Path,
    weights: Mapping[str, Any],
    changes: Mapping[str, object] | None = None,
) -> Path:
    """A model like `model` with other weights and settings, unless it is there."""
    from safetensors.torch import save_file

    if not folder.exists():
        shutil.copytree(model, folder)
        save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors")
        settings = json.loads((model / "config.json").read_text()) | (changes or {})
        (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return folder
