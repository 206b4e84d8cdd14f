"""The self-check at start-up: the model's own forward pass on a few tokens, on real pool slots.

It learns the call of each attention module, and finds its projection: the linear module that is fed
first. It proves that projecting that input gives the K and V that the model wrote.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hcache_backend.projection.attention import AttentionLayer, UnknownCall, learn_call
from hcache_backend.projection.check import first_problem, projection_problem
from hcache_backend.projection.exactness import Bound, relative_difference
from hcache_backend.projection.projector import Projector
from hcache_backend.projection.spec import linear_output
from hcache_backend.ranks import on_all_ranks
from hcache_backend.start.agreement import Refused
from hcache_backend.start.prefill import (
    forward_batch,
    prefill_batch,
    prefill_request,
    prepare_decode,
)

PROBE_TOKENS = 48  # enough for a wrong RoPE to show in every head, at little cost
_LOUDER = 3000.0  # no power of two: FP8 values whose scale is one times larger would be equal


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


def observe(runner: Any, observations: list[Observation]) -> Probe:
    """Run the probe and describe every layer; all ranks call it. Raises Refused if a layer is built
    or called in an unknown way."""
    handles = [handle for seen in observations for handle in _watch(seen)]
    try:
        batch, slots, positions, token_ids = _forward(runner, [PROBE_TOKENS])
    finally:
        for handle in handles:
            handle.remove()
    layers, hidden = zip(
        *(_describe(index, seen, positions, batch) for index, seen in enumerate(observations)),
        strict=True,
    )
    dependent = (
        name for seen in observations for name in seen.quantised if seen.asked.get(name, True)
    )
    return Probe(layers, hidden, slots, positions, token_ids, tuple(dependent))


def run_again(runner: Any, lengths: Sequence[int], before: int = 0) -> Sequence[torch.Tensor]:
    """Run prompts that begin as the probe does; returns the slots of each, int64 ``[n]``. All ranks
    call it; the KV pool is overwritten. ``before``: first tokens with a pass of their own."""
    _, slots, _, _ = _forward(runner, lengths, before)
    return slots.split(list(lengths))


@torch.no_grad()
def prefill_and_decode(runner: Any, tokens: int, ranks: Any, *, graphs: bool) -> torch.Tensor:
    """Run all but the last token of a prompt that begins as the probe, then the last one by itself.

    Returns the slots, int64 ``[tokens]``; ``tokens`` is at least 2. All ranks call it; the KV pool
    is overwritten. The decode step uses a recorded CUDA graph, and with ``graphs`` the prefill too.
    If the prefill fails on one of ``ranks``, none decodes, and the others raise Refused.
    """
    prompt = probe_tokens(runner.model_config.vocab_size, tokens)
    batch: Any = None
    slots: list[torch.Tensor] = []
    problem: Exception | None = None
    prefill_graphs = nullcontext() if graphs else _without_prefill_graphs(runner)
    try:
        with prefill_graphs:
            for _ in range(2):
                stages = _Stages()  # also after a problem: the others go on
                try:
                    if problem is None and batch is None:
                        batch = prefill_batch(runner, [prefill_request(prompt[:-1])])
                    elif problem is None:
                        prepare_decode(batch, prompt[-1:])
                    if problem is None:
                        slots.append(stages.run(runner, forward_batch(runner, batch)))
                except Exception as error:
                    problem = error
                finally:
                    stages.pass_on()
                (fine,) = on_all_ranks(ranks, problem is None)
                if not fine and problem is None:
                    problem = Refused("another tensor-parallel rank failed in a forward pass")
    finally:
        _empty_pools(runner)
    if problem is not None:
        try:
            raise problem
        finally:
            problem = None  # it holds this frame and those of the model, with all their tensors
    return torch.cat(slots)


def compare(probe: Probe, projector: Projector) -> None:
    """Project every layer's input; raises Refused if K or V differ by more than rounding."""
    problem = first_problem(
        projection_problem(layer, hidden, probe.positions, probe.slots, projector)
        for layer, hidden in zip(probe.layers, probe.hidden, strict=True)
    )
    if problem is not None:
        raise Refused(problem)


def attention_modules(model: torch.nn.Module, layers: int) -> list[Observation]:
    """The attention modules of ``model``, in order. Raises Refused if they are not ``layers``, as
    the KV pool has, numbered one after the other."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = dict(model.named_modules())
    found: list[Observation] = []
    for path, kernel in modules.items():
        if not isinstance(kernel, RadixAttention):
            continue
        name = path
        while name:
            name = name.rpartition(".")[0]
            linears = [
                module
                for module in modules[name].modules()
                if isinstance(module, LinearBase | torch.nn.Linear)
            ]
            if linears:
                break
        layer = name.rpartition(".")[0]
        quantised = {
            f"{layer}.{part}": module
            for part, module in modules[layer].named_modules()
            if _is_quantised(module)
        }
        found.append(Observation(name, modules[name], kernel, linears, quantised))
    found.sort(key=lambda seen: seen.kernel.layer_id)
    ids = [seen.kernel.layer_id for seen in found]
    if not found or ids != list(range(ids[0], ids[0] + len(ids))):
        raise Refused(f"the attention layers of the model are numbered {ids}")
    if len(ids) != layers:
        raise Refused(f"the KV pool has {layers} layers and the model {len(ids)} attention layers")
    return found


def _watch(seen: Observation) -> list[Any]:
    def on_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.calls.append((args, kwargs))

    def on_linear(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen.projection is None and seen.calls:
            hidden = args[0] if args else next(iter(kwargs.values()), None)
            seen.projection = module
            seen.hidden = hidden.detach().clone() if isinstance(hidden, torch.Tensor) else None

    handles = [seen.module.register_forward_pre_hook(on_call, with_kwargs=True)]
    for linear in seen.linears:
        handles.append(linear.register_forward_pre_hook(on_linear, with_kwargs=True))
    for name, module in seen.quantised.items():
        ask = partial(_ask_beside, seen.asked, name)
        handles.append(module.register_forward_pre_hook(ask, with_kwargs=True))
    return handles


def _is_quantised(module: torch.nn.Module) -> bool:
    """True if a matrix of the module, or of its experts, has quantised numbers."""
    weights = (one for one in module.parameters(recurse=False) if one.dim() > 1)
    return any(one.dtype.itemsize == 1 or not one.is_floating_point() for one in weights)


def _ask_beside(
    asked: dict[str, bool],
    name: str,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call the module twice more, once with a louder last row (``[n, width]``). Both batches have
    one shape, so all other sums have the same order."""
    rows = args[0] if args else next(iter(kwargs.values()), None)
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
    index: int, seen: Observation, positions: torch.Tensor, batch: object
) -> tuple[AttentionLayer, torch.Tensor]:
    if len(seen.calls) != 1 or seen.projection is None:
        raise Refused(
            f"{seen.name} was called {len(seen.calls)} times in one forward pass, and "
            f"{'no' if seen.projection is None else 'a'} projection was seen"
        )
    if seen.hidden is None or seen.hidden.dim() != 2 or len(seen.hidden) != len(positions):
        shape = "no tensor" if seen.hidden is None else f"shape {tuple(seen.hidden.shape)}"
        raise Refused(f"the projection of {seen.name} received {shape} for {len(positions)} tokens")
    args, kwargs = seen.calls[0]
    try:
        call = learn_call(seen.module, args, kwargs, positions, type(batch))
    except (UnknownCall, TypeError, ValueError) as error:
        raise Refused(f"{seen.name} {error}") from None
    layer = AttentionLayer(index, seen.name, seen.module, seen.kernel, seen.projection, call)
    return layer, seen.hidden


@torch.no_grad()
def _forward(
    runner: Any, lengths: Sequence[int], before: int = 0
) -> tuple[object, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One prefill of prompts of these lengths through SGLang's batch objects, or two of one. Then
    both pools are emptied, also after an error: a lost slot would stop the server later."""
    vocabulary = runner.model_config.vocab_size
    prefix: torch.Tensor | None = None
    try:
        for length in ([before], lengths) if before else (lengths,):
            prompts = [prefill_request(probe_tokens(vocabulary, n), prefix) for n in length]
            stages = _Stages()
            try:
                forward = forward_batch(runner, prefill_batch(runner, prompts))
                positions, token_ids = forward.positions.clone(), forward.input_ids.clone()
                with _without_prefill_graphs(runner):
                    written = stages.run(runner, forward)
            finally:
                stages.pass_on()
            slots = written if prefix is None else torch.cat((prefix, written))
            prefix = slots
            runner.req_to_token_pool.clear()  # there may be one row only
        return forward, slots, positions, token_ids
    finally:
        _empty_pools(runner)


def _empty_pools(runner: Any) -> None:
    runner.token_to_kv_pool_allocator.clear()
    runner.req_to_token_pool.clear()


def probe_tokens(vocabulary: int, length: int) -> list[int]:
    step = max(1, vocabulary // PROBE_TOKENS)
    return [(7 + i * step) % vocabulary for i in range(length)]


class _Stages:
    """Data between pipeline stages in a pass; the first and the only one receive none."""

    def __init__(self) -> None:
        from sglang.srt.distributed import parallel_state

        self._group = parallel_state.get_pp_group()
        self._outcome: Any = None
        # Before anything can fail: the stage before this one waits until it is received.
        self._received = None if self._group.is_first_rank else self._group.recv_tensor_dict()

    def run(self, runner: Any, batch: Any) -> torch.Tensor:
        """Run this stage's model; returns the slots that it filled, int64 ``[n]``. Raises Refused
        if the stage before failed."""
        slots: torch.Tensor = batch.out_cache_loc.clone()
        self._outcome = runner.forward(batch, pp_proxy_tensors=self._input()).logits_output
        return slots

    def _input(self) -> Any:
        from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

        if self._received is None:
            return None
        if not self._received:
            raise Refused("the pipeline stage before this one failed its self-check")
        return PPProxyTensors(self._received)

    def pass_on(self) -> None:
        """Hand the output to the next stage; nothing if this one failed."""
        if not self._group.is_last_rank:
            self._group.send_tensor_dict(getattr(self._outcome, "tensors", {}))


@contextmanager
def _without_prefill_graphs(runner: Any) -> Iterator[None]:
    """Prefill by SGLang's eager runner, because a replay would run without our hooks."""
    graphs = getattr(runner, "prefill_cuda_graph_runner", None)
    runner.prefill_cuda_graph_runner = None
    try:
        yield
    finally:
        runner.prefill_cuda_graph_runner = graphs
