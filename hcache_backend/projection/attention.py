"""What we know of one attention layer of a model, whatever its architecture."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class CallTemplate:
    """How the model calls an attention module, learned from one real call.

    Attributes:
        hidden: Name of the argument that takes the hidden states.
        positions: Name of the argument that takes the positions, if there is one.
        batch: Name of the argument that takes the batch, if there is one.
        constants: The other arguments; plain values that do not depend on the tokens.
    """

    hidden: str
    positions: str | None
    batch: str | None
    constants: Mapping[str, Any] = field(default_factory=dict)

    def arguments(
        self, hidden: torch.Tensor, positions: torch.Tensor, batch: object
    ) -> dict[str, Any]:
        """Keyword arguments of a call with other tokens."""
        arguments = {**self.constants, self.hidden: hidden}
        if self.positions is not None:
            arguments[self.positions] = positions
        if self.batch is not None:
            arguments[self.batch] = batch
        return arguments


@dataclass(frozen=True)
class AttentionLayer:
    """One layer: its attention module and the linear module that receives the hidden state.

    Attributes:
        index: Layer within this pipeline stage, from 0.
        name: Dotted name of the attention module in the model.
        module: The module that computes q, k, v and calls the engine's attention.
        kernel: The engine's own attention object (SGLang's ``RadixAttention``).
        projection: The linear module whose input is captured.
        call: How ``module`` is called.
    """

    index: int
    name: str
    module: torch.nn.Module
    kernel: torch.nn.Module
    projection: torch.nn.Module
    call: CallTemplate


class UnknownCall(ValueError):
    """An attention module is called in a way that cannot be repeated for other tokens."""


def learn_call(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    positions: torch.Tensor,
    batch_type: type,
) -> CallTemplate:
    """Tell from one real call which argument is what.

    Args:
        module: The attention module.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        positions: The positions of that forward pass, int ``[tokens]``.
        batch_type: Type of the engine's batches (it may copy one on its way to the model).

    Raises:
        UnknownCall: An argument depends on the tokens and is none of hidden states, positions
            and batch; the message names it.
    """
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    flat: dict[str, Any] = {}
    for name, value in bound.items():
        kind = inspect.signature(module.forward).parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            flat.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            if value:
                raise UnknownCall(f"takes a variable number of arguments (*{name})")
        else:
            flat[name] = value
    hidden_name = positions_name = batch_name = None
    constants: dict[str, Any] = {}
    for name, value in flat.items():
        if isinstance(value, batch_type):
            batch_name = name
        elif isinstance(value, torch.Tensor):
            if value.dim() == 1 and torch.equal(value, positions):
                positions_name = name
            elif value.dim() == 2 and value.is_floating_point() and hidden_name is None:
                hidden_name = name
            else:
                raise UnknownCall(f"takes a tensor {name!r} of shape {tuple(value.shape)}")
        elif value is None or isinstance(value, bool | int | float | str):
            constants[name] = value
        else:
            raise UnknownCall(f"takes {name!r}, a {type(value).__name__}")
    if hidden_name is None:
        raise UnknownCall("takes no hidden states")
    return CallTemplate(hidden_name, positions_name, batch_name, constants)
