"""Attention modules of every make that matters to specs, with arithmetic of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hcache_backend.projection.attention import AttentionLayer, ProjectionReached
from hcache_backend.projection.search import Evidence, gather_evidence

HIDDEN = 96
HEADS = 4
DIM = 16
PROBE = 48
POSITION_LIMIT = 2048


class Rope(torch.nn.Module):
    """RoPE by complex numbers, from a table; rotates the first ``dims`` of a head."""

    def __init__(
        self, dims: int = DIM, interleaved: bool = False, scale: float = 1.0, base: float = 500.0
    ) -> None:
        super().__init__()
        angles = torch.arange(POSITION_LIMIT)[:, None] / base ** (torch.arange(0, dims, 2) / dims)
        self.register_buffer("cos_sin_cache", scale * torch.cat([angles.cos(), angles.sin()], -1))
        self.dims, self.interleaved = dims, interleaved

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        cos, sin = self.table(positions)[positions].float().chunk(2, -1)
        turn = torch.complex(cos, sin).unsqueeze(1)
        part, rest = x[..., : self.dims].float(), x[..., self.dims :]
        if self.interleaved:
            pairs = torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous())
            part = torch.view_as_real(pairs * turn).flatten(-2)
        else:
            half = torch.complex(*part.chunk(2, -1)) * turn
            part = torch.cat([half.real, half.imag], -1)
        return torch.cat([part.to(x.dtype), rest], -1)

    def table(self, positions: Tensor) -> Tensor:
        table: Tensor = self.cos_sin_cache
        return table


class SwitchingRope(Rope):
    """Long prompts get another table, as with Phi-3's longrope: by the batch, or by the token."""

    def __init__(self, by_batch: bool) -> None:
        super().__init__()
        self.by_batch = by_batch

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        long = positions > 512
        long = long.any().expand_as(long) if self.by_batch else long
        return torch.where(
            long[:, None, None], super().forward(positions, 0.9 * x), super().forward(positions, x)
        )


class Norm(torch.nn.Module):
    """A norm over the last dimension; ``offset`` is added to the stored weight."""

    def __init__(self, *shape: int, kind: str = "rms", offset: int = 0, bias: bool = False) -> None:
        super().__init__()
        self.kind, self.offset, self.variance_epsilon = kind, offset, 1e-5
        self.weight = self.bias = None
        if shape:
            self.weight = torch.nn.Parameter(torch.randn(shape) * 0.3 + 1 - offset)
        if bias:
            self.bias = torch.nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight is not None:
            wide = wide * (self.weight.float() + self.offset)
        return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype)


class Attention(torch.nn.Module):
    """Makes K and V; what stands where is the test's choice.

    Args:
        layout: ``qkv``, ``kvq``, ``vkq``: one linear module, parts in that order. ``heads``: one
            linear module, q, k and v of a head together. ``separate``: three. ``q+kv``: two.
        norm: Of K; q gets its own of the same make.
        over_all: The norm sees all heads at once.
        rope: Of q and K.
    """

    def __init__(
        self,
        layout: str = "qkv",
        *,
        bias: bool = False,
        norm: dict[str, Any] | None = None,
        norm_shape: tuple[int, ...] = (DIM,),
        over_all: bool = False,
        rope: Rope | None = None,
        q_heads: int = HEADS,
    ) -> None:
        super().__init__()
        self.layout, self.over_all, self.q_heads = layout, over_all, q_heads
        widths = {
            "separate": {"a": q_heads, "b": HEADS, "c": HEADS},
            "q+kv": {"a": q_heads, "b": 2 * HEADS},
        }
        heads = widths.get(layout, {"a": q_heads + 2 * HEADS})
        self.linears = torch.nn.ModuleDict(
            {name: torch.nn.Linear(HIDDEN, n * DIM, bias=bias) for name, n in heads.items()}
        )
        make = (lambda: Norm(*norm_shape, **norm)) if norm is not None else lambda: None
        self.norm_of_q, self.norm_of_k = make(), make()
        self.rope = rope
        self.out = torch.nn.Linear(HEADS * DIM, HIDDEN)
        with torch.no_grad():
            for linear in self.linears.values():
                linear.weight.mul_(4)

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, K and V ``[n, heads, dim]`` as the linear modules leave them."""
        made = [linear(hidden) for linear in self.linears.values()]
        if self.layout == "separate":
            flat = dict(zip("qkv", made, strict=True))
        elif self.layout == "q+kv":
            flat = dict(zip("qkv", [made[0], *made[1].chunk(2, -1)], strict=True))
        elif self.layout == "heads":
            q, k, v = made[0].view(len(hidden), HEADS, 3, DIM).unbind(2)
            return q, k, v
        else:
            sizes = [DIM * (self.q_heads if part == "q" else HEADS) for part in self.layout]
            flat = dict(zip(self.layout, made[0].split(sizes, -1), strict=True))
        q, k, v = (flat[part].reshape(len(hidden), -1, DIM) for part in "qkv")
        return q, k, v

    def normed(self, norm: torch.nn.Module, x: Tensor) -> Tensor:
        return norm(x.flatten(1)).view_as(x) if self.over_all else norm(x)

    def keys_and_values(self, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        _, k, v = self.parts(hidden)
        if self.norm_of_k is not None:
            k = self.normed(self.norm_of_k, k)
        if self.rope is not None:
            k = self.rope(positions, k)
        return k, v

    def forward(self, positions: Tensor, hidden: Tensor, batch: object) -> None:
        raise ProjectionReached(*self.keys_and_values(positions, hidden))


class ModelTypeRope(Rope):
    """Torch's arithmetic in the model's type: cosines, sines and both products are rounded."""

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        cos, sin = self.cos_sin_cache[positions].to(x.dtype).unsqueeze(1).chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([self.turn(a, -b, cos, sin), self.turn(b, a, cos, sin)], -1)

    def turn(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + y * sin


class MultiplyAddRope(ModelTypeRope):
    """A multiply-add in the model's type rounds one product and the sum."""

    def turn(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x.float() * cos.float() + (y * sin).float()).to(x.dtype)


class RoundedTableRope(Rope):
    """Cosines and sines in the model's type, as a compiler keeps them; float32 otherwise."""

    def table(self, positions: Tensor) -> Tensor:
        return self.cos_sin_cache.bfloat16()


class CutTableRope(Rope):
    """Cosines and sines lose the bits that bfloat16 has no room for: no kernel does that."""

    def table(self, positions: Tensor) -> Tensor:
        return (self.cos_sin_cache.view(torch.int32) & ~0xFFFF).view(torch.float32)


class TwiceRoundedNorm(Norm):
    """As transformers' RMSNorm: the normed K is rounded before the weight."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (wide * scale).to(x.dtype)


class AtOnce(Attention):
    """Norm and RoPE in one kernel: nothing is rounded between them."""

    def keys_and_values(self, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        _, k, v = self.parts(hidden)
        return self.rope(positions, self.norm_of_k(k.float())).to(k.dtype), v


def normed_twice() -> Attention:
    module = Attention(rope=Rope(), norm={})
    module.norm_of_k = TwiceRoundedNorm(DIM)
    return module


class Changed(Attention):
    """Llama, with something done to K or V that no spec can say."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any], **made: Any) -> None:
        super().__init__(rope=made.pop("rope", Rope()), **made)
        self.change = change

    def keys_and_values(self, positions: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.change(*super().keys_and_values(positions, hidden))
        return k, v


class Clamped(Attention):
    """Cuts large numbers of the projection (DBRX, OLMo); those of the self-check are not that
    large."""

    def parts(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.clamp(-40, 40) for part in super().parts(hidden))
        return q, k, v


class Shifted(Rope):
    """From position 1000 on, one less."""

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        return super().forward(positions - (positions >= 1000).long(), x)


class NoTable(Rope):
    """Keeps its table under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_table = self.cos_sin_cache
        del self.cos_sin_cache

    def table(self, positions: Tensor) -> Tensor:
        return self.hidden_table


def layer_of(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> AttentionLayer:
    """The layer of an attention module, cast to ``dtype``."""
    module.to(dtype)
    names = {name: name for name in ("hidden", "positions", "batch")}
    return AttentionLayer(0, "layers.0.attn", module, module, module, names, {})


def evidence_of(layer: AttentionLayer) -> Evidence:
    dtype = next(p.dtype for p in layer.module.parameters() if p.is_floating_point())
    return gather_evidence(layer, *tokens(dtype=dtype), POSITION_LIMIT)


def tokens(n: int = PROBE, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states and positions of ``n`` tokens at the start of a prompt."""
    return torch.randn(n, HIDDEN).to(dtype), torch.arange(n)
