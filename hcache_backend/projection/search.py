"""Search for a layer's spec: guesses from what the attention module holds, settled by numbers.

Names of classes or modules decide nothing. Modules that were fed the hidden states are watched. V,
which nothing is done to, shows its columns in their output. K is looked for in the same outputs
under every norm and RoPE that the attention module could hold, then under every rounding of
kernels. The best guess must prove itself by numbers, on all evidence.

Evidence has large positions (a RoPE that is no plain look-up), loud hidden states (clamps), quiet
ones (biases, epsilons), and other batch sizes, whose differences a spec may have, too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from hcache_backend.projection import exactness, projector
from hcache_backend.projection.attention import AttentionLayer, project_with_module
from hcache_backend.projection.exactness import Bound, KVExactness, kv_exactness
from hcache_backend.projection.projector import Columns, LayerSpec, NormModule, RotaryTable
from hcache_kernels.project_kv import KeyNorm, Rotary, Rounding, check_projection, finish_keys

_LOUD = 4096.0  # largest number of K and V from loud hidden states
_QUIET = 1e-3  # and from quiet ones
_FAR = 16  # positions besides those observed
_BATCH_SIZES = (1, 16)  # a decode step and a small batch; many tokens at once are evidence anyway

LESS_EXACT = "K or V are less exact than the attention module's own at other batch sizes"


@dataclass(frozen=True)
class Sample:
    """K and V that the module made of some tokens; a spec must make the same."""

    purpose: str  # of these tokens, for messages
    hidden: torch.Tensor  # [n, hidden]
    positions: torch.Tensor  # int64 [n]
    k: torch.Tensor  # [n, kv_heads, head_dim], like v
    v: torch.Tensor


@dataclass(frozen=True)
class Evidence:
    """Answers of a layer's attention module."""

    samples: list[Sample]  # the observed tokens, then with other positions beside them, then others
    of_module: KVExactness  # with which it repeats the observed tokens at other batch sizes


@torch.no_grad()
def gather_evidence(
    layer: AttentionLayer, hidden: torch.Tensor, positions: torch.Tensor, position_limit: int
) -> Evidence:
    """Call the attention module on what a layer observed, ``hidden`` (``[n, hidden]``) and
    ``positions``, and on variations; every rank makes the same number of calls. The model serves
    positions below ``position_limit``. Raises ProjectionFailed if the module gave no K and V."""

    def sample(purpose: str, rows: torch.Tensor, row_positions: torch.Tensor) -> Sample:
        k, v = project_with_module(layer, rows, row_positions)
        return Sample(purpose, rows, row_positions, k, v)

    n = len(hidden)
    observed = sample("the observed tokens", hidden, positions)
    # Positions beyond the end of a RoPE table that the module has would be errors.
    tables = (getattr(module, projector.COS_SIN, None) for module in layer.module.modules())
    lengths = (len(table) for table in tables if isinstance(table, torch.Tensor))
    far_positions = _positions_below(min([position_limit, *lengths]))
    far = sample(
        "the observed tokens at other positions",
        hidden.repeat(1 + len(far_positions), 1),
        torch.cat([positions, far_positions.repeat_interleave(n).to(positions.device)]),
    )
    largest = float(torch.maximum(observed.k.abs().amax(), observed.v.abs().amax()))
    # The factor by which hidden states can still grow in their type.
    room = float(torch.finfo(hidden.dtype).max) / 16 / max(float(hidden.abs().amax()), 1e-30)
    loud = hidden * min(_LOUD / largest, room) if largest else hidden
    quiet = hidden * (_QUIET / largest) if largest else hidden
    samples = [observed, far, sample("loud hidden states", loud, positions)]
    samples.append(sample("quiet hidden states", quiet, positions))
    again = [(far.k[:n], far.v[:n])]  # K and V of the observed tokens at other batch sizes
    for size in _BATCH_SIZES:
        batches = zip(hidden.split(size), positions.split(size), strict=True)
        k, v = zip(*(project_with_module(layer, *rows) for rows in batches), strict=True)
        again.append((torch.cat(k), torch.cat(v)))
    first = (observed.k, observed.v)
    repeated = (kv_exactness(kv, first, hidden.dtype) for kv in again)
    return Evidence(samples, exactness.worst_of(repeated))


def dependence_problem(layer: AttentionLayer, evidence: Evidence) -> str | None:
    """A message if K of a token changes with the positions projected beside it, or None. No page of
    such a layer can be restored: it does not say which tokens stood beside its own."""
    observed, far = evidence.samples[:2]
    n = len(observed.hidden)
    if exactness.relative_difference(far.k[:n], observed.k) <= exactness.tolerance(
        observed.hidden.dtype
    ):
        return None
    return (
        f"K of {layer.name} at positions 0..{n - 1} changes when position "
        f"{int(far.positions.max())} is projected with them"
    )


@torch.no_grad()
def _difference(spec: LayerSpec, samples: list[Sample]) -> tuple[float, str]:
    """The worst relative difference of a spec's K and V to the module's (infinity if it raises),
    and what differs: K or V of which sample."""
    differences: list[tuple[float, str]] = []
    n = len(samples[0].hidden)  # the observed tokens: compared together at all their positions
    for sample in samples:
        try:
            made = spec.compute(sample.hidden, sample.positions)
        except Exception as error:  # the model's linear module, or a table that is too short
            return float("inf"), f"K and V of {sample.purpose} ({type(error).__name__}: {error})"
        for name, got, wanted in zip("KV", made, (sample.k, sample.v), strict=True):
            groups = zip(got.split(n), wanted.split(n), strict=True)
            largest = max(exactness.relative_difference(a.float(), b.float()) for a, b in groups)
            differences.append((largest, f"{name} of {sample.purpose}"))
    return max(differences, key=lambda one: one[0])


def _difference_problem(difference: tuple[float, str], samples: list[Sample]) -> str | None:
    """The problem if rounding does not explain the :func:`_difference` of a spec."""
    (largest, what), allowed = difference, _allowed(samples[0].hidden.dtype)
    if largest <= allowed:
        return None
    return f"{what} differ from the module's by {largest:.1e} (allowed {allowed:.0e})"


def _allowed(dtype: torch.dtype) -> float:
    """Half of the tolerance of a layer in the pool: both sides round at the same places."""
    return exactness.tolerance(dtype) / 2


@torch.no_grad()
def spec_exactness(spec: LayerSpec, samples: list[Sample]) -> KVExactness:
    """Exactness of a spec's K and V against the attention module's, of all samples together."""
    made = (spec.compute(sample.hidden, sample.positions) for sample in samples)
    pairs = zip(made, samples, strict=True)
    return exactness.combined(kv_exactness(kv, (one.k, one.v), one.k.dtype) for kv, one in pairs)


def spec_problem(spec: LayerSpec, evidence: Evidence) -> str | None:
    """A message if a spec is wrong for its layer, or None."""
    problem = _difference_problem(_difference(spec, evidence.samples), evidence.samples)
    bound = Bound.of_product(evidence.samples[0].k.dtype)
    if problem or spec_exactness(spec, evidence.samples).as_good_as(evidence.of_module, bound):
        return problem
    return LESS_EXACT


def _positions_below(limit: int) -> torch.Tensor:
    """Positions of all magnitudes below ``limit``; the same on every rank."""
    source = torch.Generator().manual_seed(limit)
    powers = torch.linspace(0, 1, _FAR) * max(0.0, torch.tensor(float(limit)).log2().item())
    jitter = 0.5 + 0.5 * torch.rand(_FAR, generator=source)
    positions = (2**powers * jitter).long().clamp(0, limit - 1)
    positions[-1] = limit - 1
    return positions


_NORM_KINDS: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")

# In the order in which they are tried: SGLang on CUDA, on a CPU, and compiled by others.
_NORM_ROUNDINGS: tuple[dict[str, bool], ...] = ({}, {"normed": True}, {"norm": False})
_ROPE_ROUNDINGS: tuple[dict[str, bool], ...] = (
    {},
    {"table": True, "cos_products": True, "sin_products": True},
    {"table": True},
    {"table": True, "sin_products": True},
    {"table": True, "cos_products": True},
)


class NoSpec(Exception):
    """The layer is projected by its own attention module; the message says why. ``reached``:
    exactness of the best spec, if that is the reason."""

    def __init__(self, reason: str, reached: KVExactness | None = None) -> None:
        super().__init__(reason)
        self.reached = reached


class _Fed(NamedTuple):
    """A module that received the hidden states, and its output as heads."""

    module: torch.nn.Module
    blocks: torch.Tensor  # [n, blocks, head_dim], copied at once: it may be rotated in place


@torch.no_grad()
def find_spec(layer: AttentionLayer, evidence: Evidence) -> LayerSpec:
    """The spec of a layer, proven on ``evidence``. Calls the attention module once more, with hooks
    on its inner modules. Raises NoSpec if no candidate makes K and V as the module does."""
    observed = evidence.samples[0]
    head_dim = observed.k.shape[-1]
    if observed.v.shape != observed.k.shape:
        raise NoSpec(f"K has heads of {head_dim} and V of {observed.v.shape[-1]}")
    if not (fed := _fed_modules(layer, observed, head_dim)):
        raise NoSpec(f"no linear module gives heads of {head_dim} for the hidden states")
    v = next(filter(None, (_columns(one, observed.v, observed) for one in fed)), None)
    if v is None:
        raise NoSpec("V is not a part of what a linear module gives for the hidden states")
    guesses = [
        LayerSpec(k, v, norm, rotary, fused=False)
        for norm, rotary in product(_norms(layer, observed), _rotaries(layer, head_dim))
        for k in (_columns(one, observed.k, observed, norm, rotary) for one in fed)
        if k is not None
    ]
    if not guesses:
        raise NoSpec("K is made by no norm and RoPE that its attention module shows")
    differences = [_difference(spec, evidence.samples) for spec in guesses]
    best = min(range(len(guesses)), key=lambda number: differences[number][0])
    if (problem := _difference_problem(differences[best], evidence.samples)) is not None:
        raise NoSpec(problem)
    spec = _with_best_rounding(guesses[best], evidence.samples[1])
    reached = spec_exactness(spec, evidence.samples)
    if not reached.as_good_as(evidence.of_module, Bound.of_product(observed.k.dtype)):
        raise NoSpec(LESS_EXACT, reached)
    fused = _fused(spec)
    # Packed weights look like plain ones, and some modules do more than multiply.
    return spec if fused is None or spec_problem(fused, evidence) else fused


def _fed_modules(layer: AttentionLayer, observed: Sample, head_dim: int) -> list[_Fed]:
    """The inner modules that receive the observed hidden states and return heads, with outputs."""
    fed: dict[int, _Fed] = {}
    outputs = []  # kept, so that no two of them get the same memory

    def on_output(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Keep a copy of an output if the hidden states went in and whole heads came out."""
        received = args[0] if args else next(iter(kwargs.values()), None)
        output = projector.linear_output(result)
        if (
            isinstance(received, torch.Tensor)
            and isinstance(output, torch.Tensor)
            and (received.shape, received.dtype) == (observed.hidden.shape, observed.hidden.dtype)
            and output.dim() == 2
            and output.shape[1] % head_dim == 0
            and torch.equal(received, observed.hidden)
        ):
            # A module around a linear one ends after it: of the same output, the inner one counts.
            outputs.append(output)
            copy = output.clone(memory_format=torch.contiguous_format)
            fed.setdefault(output.data_ptr(), _Fed(module, copy.view(len(copy), -1, head_dim)))

    inner = [module for module in layer.module.modules() if module is not layer.module]
    handles = [one.register_forward_hook(on_output, with_kwargs=True) for one in inner]
    try:
        project_with_module(layer, observed.hidden, observed.positions)
    finally:
        for handle in handles:
            handle.remove()
    return list(fed.values())


def _columns(
    fed: _Fed,
    wanted: torch.Tensor,
    observed: Sample,
    norm: NormModule | None = None,
    rotary: RotaryTable | None = None,
) -> Columns | None:
    """Columns of the module's output from which ``norm`` and ``rotary`` make the heads of
    ``wanted`` (K or V of the observed tokens, ``[n, heads, dim]``); None if one is not there."""
    key_norm = None if norm is None else norm.key_norm()
    key_rotary = None if rotary is None else rotary.rotary()
    # A norm over all heads divides each token by a number that depends on where all of K stands:
    # a block is looked for up to that number, and the proof settles the rest.
    scale_free = key_norm is not None and key_norm.over == "all"
    starts: list[int] = []
    for number, head in enumerate(wanted.unbind(1)):
        finished = _finish(fed.blocks, number, key_norm, key_rotary, observed)
        block = _match(finished, head, scale_free)
        if block is None:
            return None
        starts.append(block * wanted.shape[-1])
    return Columns(fed.module, tuple(starts), wanted.shape[-1])


def _finish(
    blocks: torch.Tensor, head: int, norm: KeyNorm | None, rotary: Rotary | None, observed: Sample
) -> torch.Tensor:
    """Norm (over all heads: only its weight) and RoPE of each block as if it were head ``head``."""
    dim = blocks.shape[-1]
    if norm is not None:
        weight, bias = (
            part if part is None or len(part) == dim else part[head * dim : (head + 1) * dim]
            for part in (norm.weight, norm.bias)
        )
        if norm.over == "all":
            blocks, norm = (blocks if weight is None else blocks * weight), None
        else:
            norm = replace(norm, weight=weight, bias=bias)
    return finish_keys(blocks, observed.positions, norm, rotary, Rounding())


def _match(blocks: torch.Tensor, head: torch.Tensor, scale_free: bool) -> int | None:
    """Number of the block ``[n, dim]`` that is ``head`` (of each token times a factor, if
    ``scale_free``); None: there is no such block. ``blocks`` are ``[n, blocks, dim]``."""
    allowed = _allowed(head.dtype)
    blocks, head = blocks.float(), head.float()
    if scale_free:
        blocks, head = (torch.nn.functional.normalize(x, dim=-1) for x in (blocks, head))
    distances = (blocks - head.unsqueeze(1)).square().mean((0, 2)).sqrt()
    nearest = int(distances.argmin())
    is_near = float(distances[nearest]) <= allowed * float(head.square().mean().sqrt())
    return nearest if is_near else None


def _norms(layer: AttentionLayer, observed: Sample) -> Iterator[NormModule | None]:
    """Candidates for the norm of K: none, and each module with an epsilon, applied in every way."""
    yield None
    heads, dim = observed.k.shape[1:]
    for module in layer.module.modules():
        if projector.epsilon_of(module) is None:
            continue
        weight = projector.vector(module, "weight")
        size = dim if weight is None else len(weight)
        for kind, offset in product(_NORM_KINDS, (0,) if weight is None else (0, 1)):
            if size in (dim, heads * dim):
                yield NormModule(module, kind, "head", offset)
            if (weight is None or size == heads * dim) and heads > 1 and kind == "rms":
                yield NormModule(module, kind, "all", offset)


def _rotaries(layer: AttentionLayer, head_dim: int) -> list[RotaryTable | None]:
    """Candidates for the RoPE of K: none, and each table of cosines and sines, in both styles."""
    attributes = [value for module in layer.module.modules() for value in vars(module).values()]
    owners = {id(owner): owner for owner in [*layer.module.modules(), *attributes]}
    tables: list[RotaryTable | None] = [None]
    for owner in owners.values():
        table = getattr(owner, projector.COS_SIN, None)
        if isinstance(table, torch.Tensor) and table.dim() == 2 and table.shape[1] <= head_dim:
            tables += [RotaryTable(owner, "neox"), RotaryTable(owner, "interleaved")]
    return tables


def _with_best_rounding(spec: LayerSpec, sample: Sample) -> LayerSpec:
    """``spec`` with the first rounding that gives the most equal numbers of K."""
    norms = _NORM_ROUNDINGS if spec.norm is not None else _NORM_ROUNDINGS[:1]
    ropes = _ROPE_ROUNDINGS if spec.rotary is not None else _ROPE_ROUNDINGS[:1]
    made = spec.k.pick(projector.linear_output(spec.k.linear(sample.hidden)))
    unequal: dict[Rounding, int] = {}
    for norm, rope in product(norms, ropes):
        rounding = Rounding(**norm, **rope)
        k = finish_keys(made, sample.positions, spec.key_norm(), spec.key_rotary(), rounding)
        unequal[rounding] = int((k != sample.k).sum())
        if not unequal[rounding]:
            break
    return replace(spec, rounding=min(unequal, key=unequal.__getitem__))


def _fused(spec: LayerSpec) -> LayerSpec | None:
    """``spec`` for the kernels, or None if K and V are not rows of one float weight, in order."""
    linear, start = spec.k.linear, spec.k.starts[0]
    weight = getattr(linear, "weight", None)
    if (
        spec.v.linear is not linear
        or not (spec.k.contiguous and spec.v.contiguous)
        or spec.v.starts[0] != start + spec.k.width
        or not isinstance(weight, torch.Tensor)
        or weight.dim() != 2
    ):
        return None
    fused = replace(spec, fused=True)
    try:
        check_projection(fused.projection())
    except ValueError:
        return None
    return fused
