"""A tiny random Qwen2-VL, whose positions have three dimensions, and images to ask it about."""

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

from bench.harness.models import publish
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

WORDS = 1016
SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "vision_pad")
SPECIAL_TOKENS = [f"<|{name}|>" for name in (*SPECIAL, "image_pad", "video_pad")]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for the image in a text."""


def words(count: int, seed: int) -> str:
    """A text of as many random words, each of them a token."""
    dice = random.Random(seed)
    return " ".join(f"w{dice.randrange(WORDS)}" for _ in range(count))


def image(seed: int) -> str:
    """A random picture of 112 x 112 pixels, which are 16 tokens, as SGLang takes it."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def build_vision_model(cache_dir: Path) -> Path:
    """Folder of the model with its processor, built into ``cache_dir`` unless it is there."""
    folder = cache_dir / "qwen2_vl"
    if not folder.exists():
        scratch = cache_dir / f"qwen2_vl.{random.SystemRandom().getrandbits(32)}"
        scratch.mkdir(parents=True)
        _save(scratch)
        publish(scratch, folder)
    return folder


def _save(folder: Path) -> None:
    stub_torchvision()
    import torch
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
        Qwen2VLConfig,
        Qwen2VLImageProcessor,
    )

    names = [*(f"w{number}" for number in range(WORDS)), *SPECIAL_TOKENS]
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SPECIAL_TOKENS[0], pad_token=SPECIAL_TOKENS[0]
    ).save_pretrained(folder)
    Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=224 * 224).save_pretrained(folder)
    text: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(names),
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "rope_parameters": {"rope_type": "default", "type": "mrope", "rope_theta": 10000.0},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    text["rope_parameters"]["mrope_section"] = [8, 12, 12]
    vision = {
        "depth": 2, "embed_dim": 64, "hidden_size": 256, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_chans": 3,
    }  # fmt: skip
    tokens = {
        f"{name}_token_id": ids[f"<|{token}|>"]
        for name, token in (
            *(("image", "image_pad"), ("video", "video_pad")),
            *(("vision_start", "vision_start"), ("vision_end", "vision_end")),
        )
    }
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config)
        model.float().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
