"""The self-check at the start: what a forward pass on a few tokens shows of each layer.

It learns the call of each attention module, and finds its projection: the linear module that is fed
first. It proves that projecting that input gives the K and V that the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from hcache_backend.checks.comparison import first_problem, projection_problem
from hcache_backend.projection.attention import (
    AttentionLayer,
    CallTemplate,
    UnknownCall,
    learn_call,
)
from hcache_backend.projection.exactness import Bound, relative_difference
from hcache_backend.projection.projector import Projector
from hcache_backend.projection.spec import linear_output
from hcache_backend.ranks import Refused

PROBE_TOKENS = 48  # enough for a wrong RoPE to show in every head, at little cost
_LOUDER = 3000.0  # no power of two: FP8 values whose scale is one times larger would be equal


class Passed(NamedTuple):
    """A forward pass: SGLang's batch, and slots, positions and ids of its tokens, int64 ``[n]``."""

    batch: object
    slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


@dataclass
class Observation:
    """One layer during the probe. ``quantised``: its modules with quantised weights, by name;
    ``asked``: True if a module's output for a token depends on the batch."""

    name: str
    module: torch.nn.Module
    kernel: Any
    linears: list[torch.nn.Module]
    quantised: dict[str, torch.nn.Module]
    asked: dict[str, bool] = field(default_factory=dict)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    projection: torch.nn.Module | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class Probe:
    """Layers, with the hidden states that each received. ``dependent``: names of modules whose
    output for a token depends on its batch, or that could not be asked."""

    layers: tuple[AttentionLayer, ...]
    hidden: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    dependent: tuple[str, ...] = ()

    def refuse_dependence(self, inside: Sequence[str] = ("",)) -> None:
        """Raise Refused for a module that quantises inputs by a scale of the whole batch, on which
        K would depend. ``inside``: beginnings of the names that count; by default all."""
        found = next((name for name in self.dependent if name.startswith(tuple(inside))), None)
        if found is not None:
            raise Refused(
                f"the output of {found} for a token depends on the other tokens of the batch, as "
                "far as it can be tried: its quantised inputs have no scales of their own"
            )

    def compare(self, projector: Projector) -> None:
        """Project every layer's input; raises Refused if K or V differ by more than rounding."""
        problem = first_problem(
            projection_problem(layer, hidden, self.positions, self.slots, projector)
            for layer, hidden in zip(self.layers, self.hidden, strict=True)
        )
        if problem is not None:
            raise Refused(problem)


def observe(
    run: Callable[[], Passed], observations: Sequence[Observation], *, calls: bool = True
) -> Probe:
    """Have ``run`` run the model on the probe, and describe every layer; all ranks call it. Raises
    Refused if a layer is built in an unknown way, or, if ``calls`` are to be repeated, called."""
    handles = [handle for seen in observations for handle in _watch(seen)]
    try:
        passed = run()
    finally:
        for handle in handles:
            handle.remove()
    layers, hidden = zip(
        *(_describe(index, seen, passed, calls=calls) for index, seen in enumerate(observations)),
        strict=True,
    )
    dependent = (
        name for seen in observations for name in seen.quantised if seen.asked.get(name, True)
    )
    return Probe(layers, hidden, *passed[1:], tuple(dependent))


def given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a module's call; None without any."""
    return args[0] if args else next(iter(kwargs.values()), None)


def probe_tokens(vocabulary: int, length: int) -> list[int]:
    step = max(1, vocabulary // PROBE_TOKENS)
    return [(7 + i * step) % vocabulary for i in range(length)]


def is_quantised(module: torch.nn.Module) -> bool:
    """True if a matrix of the module, or of its experts, has quantised numbers."""
    weights = (one for one in module.parameters(recurse=False) if one.dim() > 1)
    return any(one.dtype.itemsize == 1 or not one.is_floating_point() for one in weights)


def _watch(seen: Observation) -> list[Any]:
    def on_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.calls.append((args, kwargs))

    def on_linear(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen.projection is None and seen.calls:
            hidden = given(args, kwargs)
            seen.projection = module
            seen.hidden = hidden.detach().clone() if isinstance(hidden, torch.Tensor) else None

    asked = [(on_linear, linear) for linear in seen.linears]
    asked += [(partial(_ask_beside, seen.asked, name), m) for name, m in seen.quantised.items()]
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for hook, module in ((on_call, seen.module), *asked)
    ]


def _ask_beside(
    asked: dict[str, bool],
    name: str,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call the module twice more, once with a louder last row (``[n, width]``). Both batches have
    one shape, so all other sums have the same order."""
    rows = given(args, kwargs)
    if not isinstance(rows, torch.Tensor) or rows.dtype.itemsize == 1:
        return  # they are quantised already
    louder = rows.clone()
    louder[-1] *= _LOUDER
    alone, beside = (
        linear_output(
            module.forward(one, *args[1:], **kwargs)
            if args
            else module.forward(**kwargs | {next(iter(kwargs)): one})
        )[:-1, None].clone()  # kernels may write both outputs to one buffer of theirs
        for one in (rows.clone(), louder)  # experts may write to what they receive
    )
    bound = Bound.of_product(rows.dtype).rms
    depends = not relative_difference(beside, alone) <= bound
    asked[name] = asked.get(name, False) or depends


def _describe(
    index: int, seen: Observation, passed: Passed, *, calls: bool
) -> tuple[AttentionLayer, torch.Tensor]:
    tokens = len(passed.positions)
    if len(seen.calls) != 1 or seen.projection is None:
        raise Refused(
            f"{seen.name} was called {len(seen.calls)} times in one forward pass, and "
            f"{'no' if seen.projection is None else 'a'} projection was seen"
        )
    if seen.hidden is None or seen.hidden.dim() != 2 or len(seen.hidden) != tokens:
        shape = "no tensor" if seen.hidden is None else f"shape {tuple(seen.hidden.shape)}"
        raise Refused(f"the projection of {seen.name} received {shape} for {tokens} tokens")
    call = CallTemplate({})
    try:
        if calls:
            call = learn_call(seen.module, *seen.calls[0], passed.positions, type(passed.batch))
    except (UnknownCall, TypeError, ValueError) as error:
        raise Refused(f"{seen.name} {error}") from None
    layer = AttentionLayer(index, seen.name, seen.module, seen.kernel, seen.projection, call)
    return layer, seen.hidden
