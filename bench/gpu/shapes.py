"""Shapes of published models, of which programs make layers with random weights; and of pages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PAGE = 64  # tokens of a page


@dataclass(frozen=True)
class Shape:
    """Shape of a model on one of its tensor-parallel ranks.

    Attributes:
        heads: Attention heads of this rank.
        mlp: Width of the MLP on this rank.
        family: ``opt`` has biases, learned positions, LayerNorm and an MLP without a gate;
            ``qwen3`` norms each head of K, and ``olmo2`` all heads together.
        shared_by: Attention heads per KV head.
        ranks: Each stores and reads its share of the hidden states and gets the rest from the
            others (paper section 5); one GPU stands for one rank.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    mlp: int
    family: Literal["llama", "opt", "qwen3", "olmo2"] = "llama"
    shared_by: int = 1
    head_dim: int = 128
    ranks: int = 1

    @property
    def kv_heads(self) -> int:
        """Of this rank."""
        return self.heads // self.shared_by

    @property
    def width(self) -> int:
        """Values of K, and of V, of one token and layer."""
        return self.kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        """The MLP has a gate, K is rotated, and there are no biases."""
        return self.family != "opt"

    @property
    def key_norm(self) -> Literal["head", "all"] | None:
        """The values of K that have one norm; None: there is no norm."""
        return "head" if self.family == "qwen3" else "all" if self.family == "olmo2" else None

    def tiny(self) -> Shape:
        """The same kind of model, for a dry run."""
        heads = 2 * self.shared_by
        return replace(self, layers=3, hidden=32 * heads, heads=heads, mlp=96, head_dim=32)


LLAMA_7B = Shape("Llama-2-7B", 32, 4096, 32, 11_008)
LLAMA_8B = Shape("Llama-3-8B", 32, 4096, 32, 14_336, shared_by=4)
LLAMA_13B = Shape("Llama-2-13B", 40, 5120, 40, 13_824)
OPT_30B = Shape("OPT-30B", 48, 7168, 56, 28_672, "opt")
QWEN_8B = Shape("Qwen3-8B", 36, 4096, 32, 12_288, "qwen3", shared_by=4)
OLMO_7B = Shape("OLMo-2-7B", 32, 4096, 32, 11_008, "olmo2")
