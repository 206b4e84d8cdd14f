"""Tiny random models, built on the spot: no downloads, a few seconds each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a Llama with random float32 weights.

    As many KV heads as heads means multi-head attention (MHA), where hidden states are half the
    size of KV.
    """

    layers: int = 4
    hidden: int = 256
    heads: int = 4
    kv_heads: int = 4
    intermediate: int = 512
    vocabulary: int = 1024
    positions: int = 16384
    initializer_range: float = 0.12  # large, so that the output really depends on K and V

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers, in float32."""
        return 2 * 4 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def describe(self) -> dict[str, object]:
        """What a report says about the model."""
        return {"architecture": "llama", "dtype": "float32", "weights": "random", **asdict(self)}


def build(shape: TinyLlama, folder: Path, seed: int = 0) -> Path:
    """Write the model to ``folder`` in Hugging Face's format; returns ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        initializer_range=shape.initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder
