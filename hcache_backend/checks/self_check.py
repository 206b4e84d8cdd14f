"""The self-check at the start: what a forward pass on a few tokens shows of each layer. It learns
the call of each attention module, and finds its projection: the linear module that is fed first. It
proves that projecting that input gives the K and V that the model wrote, and that recomputed layers
do (:func:`check_recompute`). :class:`LayerSpecs` finds the projection of each layer: by a proven
spec, or by its attention module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from hcache_backend.checks.comparison import compare_projection, first_problem, projection_problem
from hcache_backend.config import PROJECTION_VARIABLE
from hcache_backend.host.ports import ModelWeights
from hcache_backend.metrics import logger
from hcache_backend.projection import attention, exactness, search
from hcache_backend.projection.attention import KV, AttentionLayer
from hcache_backend.projection.exactness import Bound, KVExactness, combined, kv_exactness, worst_of
from hcache_backend.projection.paged_pool import PagedPool, planes_of
from hcache_backend.projection.projector import LayerSpec, Projector, linear_output
from hcache_backend.projection.search import LESS_EXACT, NoSpec, find_spec
from hcache_backend.ranks import Group, Refused, smallest
from hcache_backend.restore.recompute import Recomputer, TokenSpan
from hcache_backend.server_report import LayerGroup
from hcache_backend.streams import current_stream
from hcache_kernels.project_kv import Way, ways_in_use
from hcache_kernels.project_kv.spec import kind_of
from hcache_kernels.project_kv.ways import measure_choice

CHECK_TOKENS = 48  # enough for a wrong RoPE to show in every head, at little cost
_LOUDER = 3000.0  # no power of two: FP8 values whose scale is one times larger would be equal


class ForwardPass(NamedTuple):
    """A forward pass: SGLang's batch, and slots, positions and ids of its tokens, int64 ``[n]``."""

    batch: Any
    slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor


@dataclass
class Observation:
    """One layer during the observed pass. ``quantised``: its modules with quantised weights, by
    name; ``depends``: True if such a module's output for a token depends on the batch."""

    name: str
    module: torch.nn.Module
    kernel: Any
    linears: list[torch.nn.Module]
    quantised: dict[str, torch.nn.Module]
    depends: dict[str, bool] = field(default_factory=dict)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    projection: torch.nn.Module | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True)
class ObservedPass:
    """Layers, with the hidden states that each received. ``dependent``: names of modules whose
    output for a token depends on its batch, or that could not be asked."""

    layers: tuple[AttentionLayer, ...]
    hidden: tuple[torch.Tensor, ...]
    slots: torch.Tensor
    positions: torch.Tensor
    token_ids: torch.Tensor
    dependent: tuple[str, ...] = ()

    def refuse_dependence(self, inside: Sequence[str] = ("",)) -> None:
        """Raise Refused if a module quantises its input by one scale for the whole batch: K of a
        token would depend on the others. ``inside``: beginnings of the names that count."""
        module = next((name for name in self.dependent if name.startswith(tuple(inside))), None)
        if module is not None:
            raise Refused(
                f"the output of {module} for a token depends on the other tokens of the batch, as "
                "far as it can be tried: its quantised inputs have no scales of their own"
            )

    def compare(self, projector: Projector) -> None:
        """Project every layer's input; raises Refused if K or V differ by more than rounding."""
        pairs = zip(self.layers, self.hidden, strict=True)
        problem = first_problem(self.layer_problem(*pair, projector) for pair in pairs)
        if problem is not None:
            raise Refused(problem)

    def layer_problem(
        self, layer: AttentionLayer, hidden: torch.Tensor, projector: Projector, codec: str = "none"
    ) -> str | None:
        """A message if K and V projected from ``hidden`` (encoded and decoded by ``codec`` before)
        differ more from the model's than rounding and the codec explain; otherwise None."""
        result = compare_projection(layer, hidden, self.positions, self.slots, projector)
        if isinstance(result, str):
            return result
        return projection_problem(layer, result.tolist(), projector.pool.dtype, codec)

    def write_exactness(
        self, layer: AttentionLayer, projector: Projector, ways: Sequence[Way | None]
    ) -> KVExactness:
        """Exactness of K and V that the projector writes to the pool against the model's, which are
        put back. The worst of its kernel's ``ways`` counts (None: an unfused spec has none)."""
        pool, kernel, slots, by_way = projector.pool, layer.kernel, self.slots, []
        hidden = self.hidden[layer.index]
        wanted = pool.fetch(kernel, slots, hidden.dtype)
        reversed_rows = hidden.flip(0), self.positions.flip(0), slots.flip(0)  # in any order
        try:
            for way in ways:
                pool.store(kernel, slots, *map(torch.zeros_like, wanted))
                projector.project_to_pool(layer, *reversed_rows, way)
                got = pool.fetch(kernel, slots, hidden.dtype)
                by_way.append(kv_exactness(got, wanted, pool.dtype))
        finally:
            pool.store(kernel, slots, *wanted)
        return worst_of(by_way)


def observe(
    run: Callable[[], ForwardPass], observations: Sequence[Observation], *, learn_calls: bool = True
) -> ObservedPass:
    """Have ``run`` run the model, and describe every layer; all ranks call it. Raises Refused if a
    layer is built in an unknown way. ``learn_calls``: also learn to repeat the calls of attention
    modules; raises Refused for a call of an unknown form."""
    handles = [handle for seen in observations for handle in _register_hooks(seen)]
    try:
        forward = run()
    finally:
        for handle in handles:
            handle.remove()
    layers, hidden = zip(
        *(_describe(i, one, forward, learn_call=learn_calls) for i, one in enumerate(observations)),
        strict=True,
    )
    quantised = ((seen, name) for seen in observations for name in seen.quantised)
    dependent = tuple(name for seen, name in quantised if seen.depends.get(name, True))
    return ObservedPass(layers, hidden, *forward[1:], dependent)


def first_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument of a module's call; None without any."""
    return args[0] if args else next(iter(kwargs.values()), None)


def check_tokens(vocabulary: int, length: int) -> list[int]:
    """Ids of the self-check's tokens, from all over the vocabulary."""
    step = max(1, vocabulary // CHECK_TOKENS)
    return [(7 + i * step) % vocabulary for i in range(length)]


def is_quantised(module: torch.nn.Module) -> bool:
    """True if a matrix of the module, or of its experts, has quantised numbers."""
    weights = (one for one in module.parameters(recurse=False) if one.dim() > 1)
    return any(one.dtype.itemsize == 1 or not one.is_floating_point() for one in weights)


def _register_hooks(seen: Observation) -> list[Any]:
    """Note in ``seen`` what its modules receive, from now on; returns torch's handles of hooks."""

    def on_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.calls.append((args, kwargs))

    def on_linear(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if seen.projection is None and seen.calls:  # the first one in the attention module
            hidden = first_argument(args, kwargs)
            seen.projection = module
            seen.hidden = hidden.detach().clone() if isinstance(hidden, torch.Tensor) else None

    def on_quantised(name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        depends = _depends_on_batch(module, args, kwargs)
        seen.depends[name] = seen.depends.get(name, False) or depends

    hooks = [(on_linear, linear) for linear in seen.linears]
    hooks += [(partial(on_quantised, name), module) for name, module in seen.quantised.items()]
    return [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for hook, module in ((on_call, seen.module), *hooks)
    ]


def _depends_on_batch(module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    """True if a row of the module's output depends on other rows of its input (``[n, width]``). The
    module is called twice more, once with a louder last row: the other rows must stay equal. Both
    batches have one shape, so sums have one order. True also for rows that came quantised."""
    rows = first_argument(args, kwargs)
    if not isinstance(rows, torch.Tensor) or rows.dtype.itemsize == 1:
        return True
    louder = rows.clone()
    louder[-1] *= _LOUDER
    alone, beside = (
        linear_output(
            module.forward(batch, *args[1:], **kwargs)
            if args
            else module.forward(**kwargs | {next(iter(kwargs)): batch})
        )[:-1, None].clone()  # kernels may write both outputs to one buffer of theirs
        for batch in (rows.clone(), louder)  # experts may write to what they receive
    )
    return not exactness.relative_difference(beside, alone) <= Bound.of_product(rows.dtype).rms


def _describe(
    index: int, seen: Observation, forward: ForwardPass, *, learn_call: bool
) -> tuple[AttentionLayer, torch.Tensor]:
    """Layer ``index``, and the hidden states that its projection received (``[tokens, hidden]``).
    Raises Refused for an unknown kind of layer. ``learn_call``: its call can be repeated later."""
    tokens = len(forward.positions)
    if len(seen.calls) != 1 or seen.projection is None:
        raise Refused(
            f"{seen.name} was called {len(seen.calls)} times in one forward pass, and "
            f"{'no' if seen.projection is None else 'a'} projection was seen"
        )
    if seen.hidden is None or seen.hidden.dim() != 2 or len(seen.hidden) != tokens:
        shape = "no tensor" if seen.hidden is None else f"shape {tuple(seen.hidden.shape)}"
        raise Refused(f"the projection of {seen.name} received {shape} for {tokens} tokens")
    names_and_constants: tuple[dict[str, str], dict[str, Any]] = {}, {}  # of the call's arguments
    try:
        if learn_call:
            call = seen.module, *seen.calls[0], forward.positions, type(forward.batch)
            names_and_constants = attention.learn_call(*call)
    except (attention.UnknownCall, TypeError, ValueError) as error:
        raise Refused(f"{seen.name} {error}") from None
    parts = seen.name, seen.module, seen.kernel, seen.projection
    batch = attention.ProjectionBatch(forward.batch.forward_mode)
    return AttentionLayer(index, *parts, *names_and_constants, batch), seen.hidden


class Recomputed(NamedTuple):
    """Number of first layers that are exact enough, exactness in words (theirs, and the model's own
    at other batch sizes), and why the next layer is not (None: all are)."""

    layers: int
    exactness: str
    problem: str | None


def check_recompute(
    run_again: Callable[[Sequence[int], int], Sequence[torch.Tensor]],
    most_requests: int,
    observed: ObservedPass,
    recomputer: Recomputer,
    kvcache: Any,
    *,
    other_attention: bool = False,
) -> Recomputed:
    """Find out how many first layers can be recomputed exactly enough; raises Refused if none can.
    The observed tokens are recomputed, and once more their second half after the first: more tokens
    than in the observed pass, so that leftovers of its batch would show. Nothing may be allocated
    yet: other slots of the pool are overwritten. ``run_again`` runs prompts of these lengths that
    begin as the observed one does, so many first tokens (0: none) in a pass of their own; it
    returns the slots of each prompt, at most ``most_requests``. ``other_attention``: these passes
    and the recomputer use another attention backend than the observed pass. Then its K and V are
    compared with the observed ones, and recomputed ones with its own."""
    slots, tokens, half = observed.slots, len(observed.slots), len(observed.slots) // 2
    dtype, pool, size = observed.hidden[0].dtype, PagedPool(kvcache), kvcache.page_size

    def kv_in(kv_slots: torch.Tensor) -> list[KV]:
        return [pool.fetch(layer.kernel, kv_slots, dtype) for layer in observed.layers]

    def exactness(kv_slots: torch.Tensor, part: slice) -> list[KVExactness]:
        """Exactness, by layer, of a part of the observed tokens, whose slots are ``kv_slots``."""
        pairs = zip(kv_in(kv_slots[part]), wanted, strict=True)
        return [kv_exactness(got, (k[part], v[part]), pool.dtype) for got, (k, v) in pairs]

    def by_half(kv_slots: torch.Tensor) -> list[list[KVExactness]]:
        """Exactness of each half, by layer: among all values a few wrong ones would not show."""
        return [exactness(kv_slots, part) for part in halves]

    wanted = kv_in(slots)
    # Whole pages from the pool's last slots on; the observed ones are its first.
    first = (kvcache.size - tokens) // size * size
    others = torch.arange(first, first + tokens, device=slots.device)
    if int(slots.max()) >= first:
        raise Refused("the KV pool is too small to try recomputation")
    buffers = [plane for layer in range(kvcache.layer_num) for plane in planes_of(kvcache, layer)]
    ids, none = observed.token_ids.numpy(force=True), slots[:0]
    second = TokenSpan(ids[half:], others[:half])
    spans = [TokenSpan(ids, none), TokenSpan(ids[:half], none), second]
    halves, judged = (slice(half), slice(half, tokens)), list[_Judged]()
    # Later checks compare with what the model wrote.
    with keep_rows(buffers, slots), refuse_errors():
        if other_attention:
            [kv_slots] = run_again([tokens], 0)
            bound, result = Bound.of_kernel(pool.dtype), _worst_by_layer(by_half(kv_slots))
            judged = [_Judged(bound, "by the other attention backend", result)]
            wanted = kv_in(kv_slots)
        runs = starmap(run_again, _prompts(tokens, most_requests))
        prompts = (kv_slots for run in runs for kv_slots in run)
        parts = ((prompt, part) for prompt in prompts for part in halves[: len(prompt) // half])
        of_model = _worst_by_layer(starmap(exactness, parts))
        for buffer in buffers:
            buffer[slots] = 0
        # On the stream of service; nothing is served yet, so the host may wait.
        forwards = recomputer.stream()
        current_stream(slots.device).record().synchronize()
        targets = torch.cat((slots, others))
        forwards.run(lambda: recomputer.recompute(len(observed.layers), targets, spans))
        forwards.record().synchronize()
        result = _worst_by_layer([*by_half(slots), *by_half(others)])
        judged.append(_Judged(Bound.of_pass(pool.dtype), "recomputed", result))
    return _exact_layers(observed, judged, of_model)


@contextmanager
def keep_rows(buffers: Sequence[torch.Tensor], rows: torch.Tensor) -> Iterator[None]:
    """After the block, put ``rows`` (int64 ``[n]``) of ``buffers`` back as they were before it."""
    contents = [buffer[rows] for buffer in buffers]
    try:
        yield
    finally:
        for buffer, content in zip(buffers, contents, strict=True):
            buffer[rows] = content


@contextmanager
def refuse_errors(what: str = "") -> Iterator[None]:
    """Raise every error of the block as Refused: of a model's own code with an unusual batch, of a
    kernel that cannot be compiled, of a lack of memory. ``what`` begins the reason."""
    try:
        yield
    except Exception as error:
        raise Refused(f"{what}{type(error).__name__}: {error}") from None


class _Judged(NamedTuple):
    bound: Bound
    what: str  # was done to the layers, for a message
    by_layer: list[KVExactness]


def _worst_by_layer(runs: Iterable[list[KVExactness]]) -> list[KVExactness]:
    return [worst_of(layer) for layer in zip(*runs, strict=True)]


def _prompts(tokens: int, most_requests: int) -> Iterator[tuple[list[int], int]]:
    """Yields batches: the lengths of their prompts, at most ``most_requests``, and the number of
    first tokens that run in an earlier pass (0: none). These are a shorter prompt, larger batches,
    and last a prompt in two chunks, whose attention sums in another order."""
    half, most = tokens // 2, most_requests - 1
    prompts = ([half], 0), ([tokens] * 2, 0), ([tokens, half, half], 0), ([tokens], half)
    for lengths, first in prompts:  # the last prompt is longer if there is no room for more
        yield [*lengths[:most], sum(lengths[most:])] if lengths[most:] else lengths, first


def _exact_layers(
    observed: ObservedPass, judged: Sequence[_Judged], of_model: list[KVExactness]
) -> Recomputed:
    """How many first layers are in every pass of ``judged`` (the last: recomputation) as exact as
    in the model's own passes at other batch sizes (``of_model``). Raises Refused if none is."""
    layers, problem, beside = len(of_model), None, "; the model at other batch sizes"
    for bound, what, by_layer in judged:
        pairs = zip(by_layer[:layers], of_model, strict=False)
        good = [ours.as_good_as(models, bound) for ours, models in pairs]
        if False in good:
            layers = good.index(False)
            name = observed.layers[layers].name
            problem = f"{name} {what}: {by_layer[layers]}{beside}: {of_model[layers]}"
    if not layers:
        raise Refused(str(problem))
    recomputed = combined(judged[-1].by_layer[:layers])
    described = f"{recomputed}{beside} {combined(of_model[:layers])}"
    return Recomputed(layers, described, problem)


@dataclass(frozen=True)
class Finding:
    """What was found out about one layer."""

    spec: LayerSpec | None
    detail: str  # the spec's description, or why there is none
    of_module: KVExactness  # how exactly the attention module repeats itself at other batch sizes
    reached: KVExactness | None = None  # of the spec, or of the one refused for it


class LayerSpecs:
    """Gives the projector its specs, at start and after every update of the weights."""

    def __init__(
        self,
        weights: ModelWeights,
        observed: ObservedPass,
        projector: Projector,
        group: Group,
        limit: int,
    ) -> None:
        """``group``: of the tensor-parallel ranks. ``limit``: largest number of positions."""
        self.projection: list[LayerGroup] = []  # the report: layers that are projected alike
        self._weights, self._observed, self._projector = weights, observed, projector
        self._group, self._limit, self._stale = group, limit, False  # stale: of earlier weights
        self._findings: list[Finding] = []  # by layer

    def find(self) -> None:
        """Look for the spec of every layer on this rank; all ranks call it. Raises Refused if not
        even the attention modules can restore pages."""
        findings, problems = [], []
        for layer, hidden in zip(self._observed.layers, self._observed.hidden, strict=True):
            evidence = search.gather_evidence(layer, hidden, self._observed.positions, self._limit)
            problems.append(search.dependence_problem(layer, evidence))
            findings.append(self._find(layer, evidence))
        self._findings = findings
        if (problem := first_problem(problems)) is not None:
            raise Refused(problem)

    def _find(self, layer: AttentionLayer, evidence: search.Evidence) -> Finding:
        """The spec of one layer, or the reason why the layer has none. Never raises."""
        of_module = evidence.of_module
        if os.environ.get(PROJECTION_VARIABLE) == "generic":
            return Finding(None, f"{PROJECTION_VARIABLE} is 'generic'", of_module)
        try:
            spec = find_spec(layer, evidence)
            reached = search.spec_exactness(spec, evidence.samples)
            return Finding(spec, spec.describe(), of_module, reached)
        except NoSpec as error:
            return Finding(None, str(error), of_module, error.reached)
        except Exception as error:  # a model's own code, called in a new way
            return Finding(None, f"the search broke: {type(error).__name__}: {error}", of_module)

    def measure(self) -> None:
        """On a GPU, find the faster way to project each kind of layer, or use the library's. It
        takes seconds on the first start with a model: a file of the device keeps the times. Its
        choice is tested too, because :meth:`check_writing` comes after it."""
        if not self._observed.hidden[0].is_cuda:
            return
        specs = (finding.spec for finding in self._findings)
        fused = (spec.projection() for spec in specs if spec and spec.fused)
        try:
            for projection in {kind_of(projection): projection for projection in fused}.values():
                measure_choice(projection, self._projector.pool.dtype)
        except Exception as error:  # no memory left, or the compiler fails
            logger.warning("hcache: the ways to project could not be timed: %s", error)

    def check_writing(self) -> None:
        """Drop specs that do not write the model's K and V to the pool. Nothing may run yet. A
        fused spec multiplies by some rows of a weight. If that is not exact enough, the product of
        the whole module, as the model computes it, is tried before the attention module."""
        for layer in self._observed.layers:
            finding = self._findings[layer.index]
            while finding.spec is not None:
                checked = self._check_writing(layer, finding)
                if checked is finding:
                    break
                if finding.spec.fused:
                    unfused = replace(finding.spec, fused=False)
                    checked = replace(finding, spec=unfused, detail=unfused.describe())
                self._findings[layer.index] = finding = checked

    def _check_writing(self, layer: AttentionLayer, finding: Finding) -> Finding:
        """Project with the spec of ``finding`` to the pool. Returns ``finding`` itself if K and V
        are exact enough there; otherwise a finding without a spec, with the reason."""
        assert finding.spec is not None
        projector, dtype = self._projector, self._projector.pool.dtype
        projector.specs = [one.spec for one in self._findings]
        try:
            ways = ways_in_use(finding.spec.projection(), dtype) if finding.spec.fused else [None]
            written = self._observed.write_exactness(layer, projector, ways)
        except Exception as error:
            problem = f"its kernel failed: {type(error).__name__}: {error}"
            return Finding(None, problem, finding.of_module)
        if written.as_good_as(finding.of_module, Bound.of_product(dtype)):
            return finding
        return Finding(None, f"in the KV pool {LESS_EXACT}", finding.of_module, written)

    def use_agreed(self) -> None:
        """Use the specs found on every rank; all ranks call it. Raises Refused on all ranks if
        projections could get in the way of forward passes."""
        # Some attention modules talk to the other ranks: all must call them, or none.
        agreed = smallest(self._group, *(finding.spec is not None for finding in self._findings))
        pairs = zip(self._findings, agreed, strict=True)
        specs = [finding.spec if found_by_all else None for finding, found_by_all in pairs]
        self._projector.specs = specs
        self._report()
        self._stale = False
        generic = [layer for layer, spec in enumerate(specs) if spec is None]
        if not generic or not self._observed.hidden[0].is_cuda:
            return
        refuse_shared_workspaces(self._observed.layers[layer].module for layer in generic)
        if dist.get_world_size(group=self._group) > 1:
            raise Refused(
                f"layers {', '.join(map(str, generic))} have no spec, and on a GPU their attention "
                "modules must not run beside forward passes of several tensor-parallel ranks"
            )

    def follow_weights(self) -> None:
        """Forget the specs whenever weights change, and find them anew."""
        self._weights.on_weights_changed.append(self._forget)
        self._weights.on_caches_flushed.append(self._renew)

    def _forget(self) -> None:
        """Weights change: drop the specs, which were proven for the old ones."""
        self._projector.specs = [None] * len(self._observed.layers)
        self._stale = True

    def _renew(self) -> None:
        """Find the specs anew if the weights have changed; if that is refused, quarantine L3."""
        if not self._stale:
            return
        try:
            self.find()
        except Exception as error:
            reason = f"after a weight update: {type(error).__name__}: {error}"
            self._findings = [Finding(None, reason, one.of_module) for one in self._findings]
            if isinstance(error, Refused):
                self._weights.begin_quarantine(reason)
            else:
                logger.exception("hcache: the search for specs raised an error")
        try:
            self.use_agreed()
        except Refused as refused:
            self._weights.begin_quarantine(f"after a weight update: {refused}")

    def _report(self) -> None:
        """Put the layers that are alike into ``projection``, the report, and into the log."""
        groups: dict[tuple[Literal["spec", "generic"], str], list[int]] = {}
        pairs = zip(self._projector.specs, self._findings, strict=True)
        for layer, (spec, finding) in enumerate(pairs):
            refused = spec is None and finding.spec is not None
            detail = "another rank has no spec" if refused else finding.detail
            groups.setdefault(("generic" if spec is None else "spec", detail), []).append(layer)
        self.projection[:] = [
            LayerGroup(
                method=method,
                detail=detail,
                layers=tuple(layers),
                exactness=_describe_exactness([self._findings[layer] for layer in layers]),
            )
            for (method, detail), layers in groups.items()
        ]
        by_spec = [group for group in self.projection if group.method == "spec"]
        parts = [f"{len(group.layers)} layers by spec ({group.detail})" for group in by_spec]
        if parts:
            logger.debug("hcache: projection: %s", "; ".join(parts))
        for group in self.projection:
            numbers, how = ", ".join(map(str, group.layers)), "by their attention modules"
            if group.method == "generic":
                logger.debug("hcache: projection: layers %s %s: %s", numbers, how, group.detail)
            logger.debug("hcache: exactness: layers %s: %s", numbers, group.exactness)


def refuse_shared_workspaces(modules: Iterable[torch.nn.Module]) -> None:
    """Raise Refused if a kernel of ``modules`` locks memory of its own. Marlin's kernels of
    quantised layers do: in one module on two streams they wait for ever, or mix sums."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(getattr(part, "workspace", None), torch.Tensor):
                raise Refused(
                    "projecting by attention modules beside forward passes: the kernel of "
                    f"{name or type(part).__name__} has one workspace for all streams"
                )


def _describe_exactness(findings: Sequence[Finding]) -> str:
    """Exactness of layers that are alike, for the log and ``hcache doctor``."""
    of_modules = combined(one.of_module for one in findings)
    parts = [f"attention modules at other batch sizes {of_modules}"]
    reached = [one.reached for one in findings if one.reached is not None]
    if reached:
        parts.insert(0, f"spec {combined(reached)}")
    return "; ".join(parts)
