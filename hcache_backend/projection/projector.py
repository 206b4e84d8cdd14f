"""K and V of every layer, each in the best way that was proven for it: by its spec, or its module.
A spec is the parts that make one layer's K and V, as found in its attention module. It holds
modules and the names of their tensors, never tensors: the next projection sees a weight update, or
a RoPE table that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from hcache_backend.projection.attention import KV, AttentionLayer, project_with_module
from hcache_backend.projection.paged_pool import PagedPool
from hcache_kernels import project_kv as kernels
from hcache_kernels.project_kv import KeyNorm, KVProjection, Rotary, Rounding, Way

COS_SIN = "cos_sin_cache"  # SGLang's (and vLLM's) name of a RoPE's table of cosines and sines
_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Columns:
    """Columns of the heads of K, or of V, in the output of a linear module."""

    linear: torch.nn.Module  # returns [n, width] for hidden states, alone or first
    starts: tuple[int, ...]  # first column of each head
    head_dim: int

    @property
    def contiguous(self) -> bool:
        """True if the heads are next to each other, in order."""
        first = self.starts[0]
        return self.starts == tuple(range(first, first + self.width, self.head_dim))

    @property
    def width(self) -> int:
        return len(self.starts) * self.head_dim

    def pick(self, output: torch.Tensor) -> torch.Tensor:
        """The heads ``[n, heads, head_dim]`` in the output ``[n, width]`` of the module."""
        if self.contiguous:
            rows = output[:, self.starts[0] : self.starts[0] + self.width]
            return rows.reshape(len(output), len(self.starts), self.head_dim)
        heads = [output[:, start : start + self.head_dim] for start in self.starts]
        return torch.stack(heads, 1)


@dataclass(frozen=True)
class NormModule:
    """A module whose parameters normalise K; ``kind`` and ``over`` as in :class:`KeyNorm`."""

    module: torch.nn.Module  # holds ``weight`` and ``bias``, or neither, and an epsilon
    kind: Literal["rms", "layer"]
    over: Literal["head", "all"]
    offset: int  # added to the stored weight: 1 if models store ``w - 1`` (Gemma)

    def key_norm(self) -> KeyNorm:
        """The norm with the weights of this moment."""
        weight, bias = vector(self.module, "weight"), vector(self.module, "bias")
        if weight is not None and self.offset:
            weight = weight.float() + self.offset  # near 1, a half type would lose its digits
        epsilon = epsilon_of(self.module)
        assert epsilon is not None
        return KeyNorm(self.kind, self.over, weight, bias, epsilon)


@dataclass(frozen=True)
class RotaryTable:
    """An object (``owner``) whose table of cosines and sines, ``cos_sin_cache``, rotates K."""

    owner: object
    style: Literal["neox", "interleaved"]

    def rotary(self) -> Rotary:
        """The RoPE with the table of this moment."""
        table: torch.Tensor = getattr(self.owner, COS_SIN)
        return Rotary(table, self.style, table.shape[1])


@dataclass(frozen=True)
class LayerSpec:
    """Makes K and V of one layer without its attention module (paper section 3.1). ``fused``: the
    kernels can do it all. They want rows of K and then of V in one float weight. Rows in another
    order would have to be copied, and a quantised weight is its module's own affair; so the linear
    module is called then."""

    k: Columns  # before norm and RoPE
    v: Columns
    norm: NormModule | None  # of K
    rotary: RotaryTable | None  # of K
    fused: bool
    rounding: Rounding = field(default_factory=Rounding)  # of norm and RoPE

    def key_norm(self) -> KeyNorm | None:
        return None if self.norm is None else self.norm.key_norm()

    def key_rotary(self) -> Rotary | None:
        return None if self.rotary is None else self.rotary.rotary()

    def projection(self) -> KVProjection:
        """The layer for the kernels, if it is ``fused``; weight and bias are views."""
        weight, bias = self.k.linear.weight, getattr(self.k.linear, "bias", None)
        assert isinstance(weight, torch.Tensor)
        rows = slice(self.k.starts[0], self.k.starts[0] + 2 * self.k.width)
        heads, norm, rotary = len(self.k.starts), self.key_norm(), self.key_rotary()
        bias, width = None if bias is None else bias[rows], self.k.head_dim
        return KVProjection(weight[rows], bias, heads, width, norm, rotary, self.rounding)

    def compute(self, hidden: torch.Tensor, positions: torch.Tensor) -> KV:
        """K and V (``[n, kv_heads, head_dim]``) of hidden states (``[n, hidden]``), in their type.
        Positions are int64 ``[n]``."""
        if self.fused:
            return kernels.compute_kv(hidden, positions, self.projection())
        output = linear_output(self.k.linear(hidden))
        k = self.k.pick(output)
        k = kernels.finish_keys(k, positions, self.key_norm(), self.key_rotary(), self.rounding)
        if self.v.linear is not self.k.linear:
            output = linear_output(self.v.linear(hidden))
        return k, self.v.pick(output)

    def describe(self) -> str:
        """The spec for the log; layers that are alike have the same description."""
        if self.fused:
            parts = ["fused weight {}x{}".format(*self.projection().weight.shape)]
        else:
            modules = "one module" if self.k.linear is self.v.linear else "two modules"
            parts = [f"{2 * self.k.width} columns of {modules}"]
        if getattr(self.k.linear, "bias", None) is not None:
            parts.append("bias")
        if self.norm is not None:
            over = "a head" if self.norm.over == "head" else "all heads"
            parts.append(f"{self.norm.kind} norm over {over}")
        if self.rotary is not None:
            rotary = self.rotary.rotary()
            parts.append(f"RoPE {rotary.style} {rotary.rotary_dim}")
        if self.rounding != Rounding():
            rounded = [name for name, on in asdict(self.rounding).items() if on]
            if self.norm is None:
                rounded.remove("norm")
            parts.append(f"rounding {' + '.join(rounded).replace('_', ' ') or 'nothing'}")
        return ", ".join(parts)


def linear_output(result: Any) -> torch.Tensor:
    """The product that a linear module returned: alone, or first of several values."""
    return result[0] if isinstance(result, tuple) and result else result


def vector(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    """A parameter or plain attribute as a vector, or None if there is none."""
    value = getattr(module, name, None)
    return value.detach().reshape(-1) if isinstance(value, torch.Tensor) else None


def epsilon_of(module: torch.nn.Module) -> float | None:
    """The epsilon of a norm, under any of its usual names; None if it is no norm."""
    values = (getattr(module, name, None) for name in _EPSILON_NAMES)
    return next((value for value in values if isinstance(value, float)), None)


class Projector:
    """Projects hidden states to ``pool``, each layer by its spec, or else its attention module."""

    def __init__(self, pool: PagedPool, layers: int) -> None:
        self.pool = pool
        self.specs: Sequence[LayerSpec | None] = [None] * layers

    @property
    def product_columns(self) -> int:
        """Columns of K and V of the widest layer whose product kernels may keep."""
        fused = (spec for spec in self.specs if spec is not None and spec.fused)
        return max((2 * spec.k.width for spec in fused), default=0)

    @torch.no_grad()
    def project(self, layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor) -> KV:
        """As :func:`project_with_module`, by the layer's spec if it has one."""
        if (spec := self.specs[layer.index]) is None:
            return project_with_module(layer, hidden, positions)
        return spec.compute(hidden, positions)

    @torch.no_grad()
    def project_to_pool(
        self,
        layer: AttentionLayer,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        way: Way | None = None,
        product: torch.Tensor | None = None,
    ) -> None:
        """:meth:`project` to ``slots`` (int64 ``[n]``, any order) of the pool. ``way``: the kernels
        for a fused spec; None: the fastest ones for ``n``. ``product``: memory for their product,
        ``[n * product_columns]`` or more, in the type of ``hidden``; None: new memory."""
        spec, pool = self.specs[layer.index], self.pool.of_layer(layer)
        if spec is not None and spec.fused and pool is not None:
            rows = hidden, positions, slots
            kernels.project_kv(kernels.ProjectionCall(*rows, spec.projection(), pool), way, product)
        else:
            self.pool.store(layer.kernel, slots, *self.project(layer, hidden, positions))
