"""One attention layer of a model, whatever its architecture, and K and V by its own module. The
module is called on captured hidden states with a :class:`ProjectionBatch` as the engine's batch. A
hook makes the engine's attention object raise :class:`ProjectionReached` for it, with K and V after
norms, biases and RoPE. Attention, output projection and collectives do not run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

KV = tuple[torch.Tensor, torch.Tensor]  # of one layer, [n, kv_heads, head_dim] each


@dataclass(frozen=True)
class ProjectionBatch:
    """Stands in for the engine's batch; it marks a call that only wants K and V. It has no memory
    pool, so a model that stores K and V inside a fused kernel cannot do so here. ``forward_mode``
    is the engine's value for prefill, which some models look at."""

    forward_mode: object = None


@dataclass(frozen=True)
class AttentionLayer:
    """One layer: its attention module and the linear module that receives the hidden state."""

    index: int  # within this pipeline stage, from 0
    name: str  # dotted name of the attention module in the model
    module: torch.nn.Module  # computes q, k, v and calls the engine's attention
    kernel: torch.nn.Module  # the engine's attention object (SGLang's ``RadixAttention``)
    projection: torch.nn.Module  # the linear module whose input is captured
    # The model's way to call the module, learned from one call: names of its arguments by
    # ``hidden``, ``positions`` and ``batch``, which depend on the tokens (some modules take no
    # positions or no batch), and its other arguments.
    names: Mapping[str, str]
    constants: Mapping[str, Any]
    batch: ProjectionBatch = ProjectionBatch()


class UnknownCall(ValueError):
    """An attention module is called in a way that cannot be repeated for other tokens."""


def learn_call(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    positions: torch.Tensor,
    batch_type: type,
) -> tuple[dict[str, str], dict[str, Any]]:
    """Learn from one real call of an attention module which argument is which: ``names`` and
    ``constants`` of an :class:`AttentionLayer`. ``positions`` are those of that forward pass, int
    ``[tokens]``. A batch is recognised by ``batch_type``, since the engine may copy one on its way
    to the model. Raises UnknownCall with the name of an argument that depends on the tokens and is
    none of these."""
    signature = inspect.signature(module.forward)
    flat = dict(signature.bind(*args, **kwargs).arguments)
    for name in list(flat):
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(flat.pop(name))
    names: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for name, value in flat.items():
        if isinstance(value, batch_type):
            names["batch"] = name
        elif isinstance(value, torch.Tensor):
            if value.dim() == 1 and torch.equal(value, positions):
                names["positions"] = name
            elif value.dim() == 2 and value.is_floating_point() and "hidden" not in names:
                names["hidden"] = name
            else:
                raise UnknownCall(f"takes a tensor {name!r} of shape {tuple(value.shape)}")
        elif value is None or isinstance(value, bool | int | float | str):
            constants[name] = value
        else:  # also several arguments under one name (``*args``), which are a tuple here
            raise UnknownCall(f"takes {name!r}, a {type(value).__name__}")
    if "hidden" not in names:
        raise UnknownCall("takes no hidden states")
    return names, constants


class ProjectionReached(Exception):
    """Carries K and V out of the attention module, as ``args``. Never escapes this module."""


class ProjectionFailed(RuntimeError):
    """The attention module gave no K and V."""


@torch.no_grad()
def project_with_module(layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor) -> KV:
    """K and V of one layer, by the model's own attention module (paper section 3.1). ``hidden`` is
    the input of the QKV projection, ``[n, hidden]``; ``positions`` are int64 ``[n]``. K is ``[n,
    kv_heads, head_dim]`` and V ``[n, kv_heads, v_head_dim]``, in the model's type. Raises
    ProjectionFailed if the module ended without reaching attention, or without K and V."""
    inputs = {"hidden": hidden, "positions": positions, "batch": layer.batch}
    arguments = {argument: inputs[input_name] for input_name, argument in layer.names.items()}
    try:
        layer.module(**layer.constants, **arguments)
    except ProjectionReached as reached:
        k, v = reached.args
    else:
        raise ProjectionFailed(f"{layer.name} did not call attention")
    if k is None or v is None:
        raise ProjectionFailed(f"{layer.name} makes no K and V of its own")
    return k.reshape(len(hidden), -1, k.shape[-1]), v.reshape(len(hidden), -1, v.shape[-1])
