"""Specs are found for every make of attention module, and only where they are right."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hcache_backend.projection.attention import AttentionLayer, project_with_module
from hcache_backend.projection.projector import Columns, LayerSpec, RotaryTable
from hcache_backend.projection.search import (
    LESS_EXACT,
    Evidence,
    NoSpec,
    dependence_problem,
    find_spec,
    gather_evidence,
    spec_exactness,
    spec_problem,
)
from tests.unit.attention_modules import (
    DIM,
    HEADS,
    HIDDEN,
    POSITION_LIMIT,
    AtOnce,
    Attention,
    Changed,
    Clamped,
    CutTableRope,
    ModelTypeRope,
    MultiplyAddRope,
    Norm,
    NoTable,
    Rope,
    RoundedTableRope,
    Shifted,
    SwitchingRope,
    evidence_of,
    layer_of,
    normed_twice,
    tokens,
)


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    yield
    torch.set_num_threads(threads)


def found(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> LayerSpec:
    layer = layer_of(module, dtype)
    return find_spec(layer, evidence_of(layer))


NEOX, FUSED, PARTS = "RoPE neox 16", "fused weight 128x96", "128 columns of one module"
LLAMA = f"{FUSED}, {NEOX}"
QWEN3 = f"{FUSED}, rms norm over a head, {NEOX}"
OVER_ALL = {"norm": {}, "norm_shape": (HEADS * DIM,), "over_all": True}
LAYER_NORM = {"norm": {"kind": "layer"}, "norm_shape": (HEADS, DIM)}
MODULES: dict[str, tuple[dict[str, Any], str]] = {
    # arguments of the module, with those of its RoPE; description of the spec
    "Llama": ({"rope": {}}, LLAMA),
    "Qwen2: bias, GQA": ({"rope": {}, "bias": True, "q_heads": 7}, f"{FUSED}, bias, {NEOX}"),
    "Qwen3: norm of a head": ({"rope": {}, "norm": {}}, QWEN3),
    "OLMo2: norm of all heads": (
        {"rope": {}, **OVER_ALL},
        f"{FUSED}, rms norm over all heads, {NEOX}",
    ),
    "OPT: bias, no RoPE": ({"bias": True}, f"{FUSED}, bias"),
    "partial RoPE": ({"rope": {"dims": 4}}, f"{FUSED}, RoPE neox 4"),
    "interleaved RoPE": ({"rope": {"interleaved": True}}, f"{FUSED}, RoPE interleaved 16"),
    "partial interleaved RoPE": (
        {"rope": {"dims": 8, "interleaved": True}, "bias": True},
        f"{FUSED}, bias, RoPE interleaved 8",
    ),
    "RoPE whose table is scaled (yarn)": ({"rope": {"scale": 1.2}}, LLAMA),
    "Gemma: the weight is an offset from 1": ({"rope": {}, "norm": {"offset": 1}}, QWEN3),
    "LayerNorm of a head, with bias": (
        {"rope": {"dims": 4}, "norm": {"kind": "layer", "bias": True}},
        f"{FUSED}, layer norm over a head, RoPE neox 4",
    ),
    "Cohere: every head has its norm": (
        {"rope": {}, **LAYER_NORM},
        f"{FUSED}, layer norm over a head, {NEOX}",
    ),
    "norm without a weight": ({"rope": {}, "norm": {}, "norm_shape": ()}, QWEN3),
    "K and V before q": ({"layout": "kvq", "rope": {}, "bias": True}, f"{FUSED}, bias, {NEOX}"),
    "V before K": ({"layout": "vkq", "rope": {}}, f"{PARTS}, {NEOX}"),
    "a module for q and one for K and V": ({"layout": "q+kv", "rope": {}, "norm": {}}, QWEN3),
    "a module for each": (
        {"layout": "separate", "rope": {}, "bias": True},
        f"128 columns of two modules, bias, {NEOX}",
    ),
    "GPT-NeoX: q, k and v of a head together": (
        {"layout": "heads", "rope": {"dims": 4}, "bias": True},
        f"{PARTS}, bias, RoPE neox 4",
    ),
    "q, k and v of a head together, normed over all": (
        {"layout": "heads", "rope": {}, **OVER_ALL},
        f"{PARTS}, rms norm over all heads, {NEOX}",
    ),
}


def make(name: str) -> Attention:
    given = dict(MODULES[name][0])
    rope = given.pop("rope", None)
    return Attention(rope=None if rope is None else Rope(**rope), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_a_spec_is_found_and_gives_the_modules_k_and_v(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(make(name), dtype)
    spec = find_spec(layer, evidence_of(layer))
    assert spec.describe() == MODULES[name][1]
    hidden, _ = tokens(200, dtype)
    positions = torch.randint(POSITION_LIMIT, (200,))
    want = project_with_module(layer, hidden, positions)
    torch.testing.assert_close(spec.compute(hidden, positions), want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_specs_on_the_gpu_use_its_kernels(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(make(name).to("cuda"), dtype)
    hidden, positions = (part.to("cuda") for part in tokens(dtype=dtype))
    evidence = gather_evidence(layer, hidden, positions, POSITION_LIMIT)
    spec = find_spec(layer, evidence)
    assert spec.describe() == MODULES[name][1]
    assert spec_problem(spec, evidence) is None


def with_float32_table(module: Attention) -> tuple[AttentionLayer, Evidence]:
    """A bfloat16 layer whose RoPE keeps its table in float32, as SGLang does on CUDA."""
    table = module.rope.cos_sin_cache.clone()
    layer = layer_of(module, torch.bfloat16)
    module.rope.cos_sin_cache = table
    return layer, evidence_of(layer)


ALL_OF_ROPE = "table + cos products + sin products"
ROUNDINGS: dict[str, Callable[[], Attention]] = {
    LLAMA: lambda: Attention(rope=Rope()),
    f"{LLAMA}, rounding {ALL_OF_ROPE}": lambda: Attention(rope=ModelTypeRope()),
    f"{LLAMA}, rounding table + sin products": lambda: Attention(rope=MultiplyAddRope()),
    f"{LLAMA}, rounding table": lambda: Attention(rope=RoundedTableRope()),
    QWEN3: lambda: Attention(rope=Rope(), norm={}),
    f"{QWEN3}, rounding norm + {ALL_OF_ROPE}": lambda: Attention(rope=ModelTypeRope(), norm={}),
    f"{QWEN3}, rounding normed + norm": normed_twice,
    f"{QWEN3}, rounding nothing": lambda: AtOnce(rope=Rope(), norm={}),
}


@pytest.mark.parametrize("description", ROUNDINGS)
def test_the_modules_rounding_is_found_and_any_other_fails_the_proof(description: str) -> None:
    layer, evidence = with_float32_table(ROUNDINGS[description]())
    spec = find_spec(layer, evidence)
    assert spec.describe() == description
    right = spec_exactness(spec, evidence.samples)
    assert right.k.unequal == right.v.unequal == 0
    ropes = ("table", "cos_products", "sin_products")
    other_way = {name: not getattr(spec.rounding, name) for name in ropes}
    wrong = replace(spec, rounding=replace(spec.rounding, **other_way))
    assert spec_problem(wrong, evidence) == LESS_EXACT


def test_a_rounding_that_no_kernel_has_is_left_to_the_module() -> None:
    layer, evidence = with_float32_table(Attention(rope=CutTableRope()))
    with pytest.raises(NoSpec, match=LESS_EXACT) as refused:
        find_spec(layer, evidence)
    assert refused.value.reached is not None
    assert refused.value.reached.k.unequal > 0.1 * refused.value.reached.k.values


K_UNKNOWN = "K is made by no norm and RoPE that its attention module shows"
V_UNKNOWN = "V is not a part of what a linear module gives for the hidden states"


LEFT_ALONE: dict[str, tuple[Callable[[], Attention], str]] = {
    "K scaled": (lambda: Changed(lambda k, v: (1.1 * k, v)), K_UNKNOWN),
    "K turned round": (lambda: Changed(lambda k, v: (k.flip(-1), v)), K_UNKNOWN),
    "V normed": (lambda: Changed(lambda k, v: (k, Norm(DIM)(v))), V_UNKNOWN),
    "V shifted": (lambda: Changed(lambda k, v: (k, v + 0.1)), V_UNKNOWN),
    "V narrower": (lambda: Changed(lambda k, v: (k, v[..., :8])), "K has heads of 16 and V of 8"),
    "clamped": (lambda: Clamped(rope=Rope()), "of loud hidden states differ"),
    "RoPE shifted far out": (
        lambda: Attention(rope=Shifted()),
        "K of the observed tokens at other positions differ",
    ),
    "RoPE switched far out": (
        lambda: Attention(rope=SwitchingRope(by_batch=False)),
        "at other positions differ",
    ),
    "RoPE without table": (lambda: Attention(rope=NoTable()), K_UNKNOWN),
    "K shifted": (
        lambda: Changed(lambda k, v: (k + 0.01, v), rope=None, bias=True),
        "K of quiet hidden states differ",
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_no_spec_says_is_left_to_the_module(name: str) -> None:
    # In bfloat16, where the proof is weakest.
    module, reason = LEFT_ALONE[name]
    with pytest.raises(NoSpec) as refused:
        found(module(), torch.bfloat16)
    assert reason in str(refused.value)


def test_a_rope_that_is_switched_by_other_tokens_rules_out_restoring_at_all() -> None:
    layer = layer_of(Attention(rope=SwitchingRope(by_batch=True)))
    problem = dependence_problem(layer, evidence_of(layer))
    assert problem is not None
    assert problem.startswith("K of layers.0.attn at positions 0..47 changes")
    by_token = layer_of(Attention(rope=SwitchingRope(by_batch=False)))
    assert dependence_problem(by_token, evidence_of(by_token)) is None


def wrong_specs(right: LayerSpec, module: Attention) -> dict[str, LayerSpec]:
    """Specs that are wrong in one thing each, most of them plausible."""
    k, v, rotary = right.k.starts, right.v.starts, right.rotary
    assert rotary is not None and right.norm is not None
    other_epsilon = Norm(DIM)
    other_epsilon.weight, other_epsilon.variance_epsilon = module.norm_of_k.weight, 1e-3
    short_table = Rope()
    short_table.cos_sin_cache = short_table.cos_sin_cache[:512]

    def columns(*starts: int) -> Columns:
        return Columns(right.k.linear, starts, DIM)

    def parts(**changes: Any) -> LayerSpec:
        return replace(right, fused=False, **changes)

    def norm(**changes: Any) -> LayerSpec:
        return replace(right, norm=replace(right.norm, **changes))

    def rope(table: Rope) -> LayerSpec:
        return replace(right, rotary=RotaryTable(table, "neox"))

    one_further = {"k": columns(*(s - 1 for s in k)), "v": columns(*(s - 1 for s in v))}
    return {
        "K and V swapped": parts(k=right.v, v=right.k),
        "q for K": parts(k=columns(*(s - HEADS * DIM for s in k))),
        "heads of K in another order": parts(k=columns(*k[1:], k[0])),
        "last two heads of V swapped": parts(v=columns(*v[:-2], v[-1], v[-2])),
        "rows one further": replace(right, **one_further),
        "no RoPE": replace(right, rotary=None),
        "the other RoPE style": replace(right, rotary=replace(rotary, style="interleaved")),
        "RoPE on half a head": rope(Rope(DIM // 2)),
        "RoPE of another base": rope(Rope(base=501.0)),
        "no norm": replace(right, norm=None),
        "the norm of q": norm(module=module.norm_of_q),
        "LayerNorm": norm(kind="layer"),
        "norm over all heads": norm(over="all", module=Norm()),
        "weight plus one": norm(offset=1),
        "a table that ends too early": rope(short_table),
        "another epsilon": norm(module=other_epsilon),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_spec_that_is_wrong_in_one_thing_fails_the_proof(dtype: torch.dtype) -> None:
    module = Attention(rope=Rope(), norm={})
    layer = layer_of(module, dtype)
    evidence = evidence_of(layer)
    right = find_spec(layer, evidence)
    assert spec_problem(right, evidence) is None
    for what, wrong in wrong_specs(right, module).items():
        for part in (wrong.norm and wrong.norm.module, wrong.rotary and wrong.rotary.owner):
            if isinstance(part, torch.nn.Module):
                part.to(dtype)
        assert spec_problem(wrong, evidence) is not None, what


def test_a_quantised_linear_module_is_called_and_its_rows_are_finished() -> None:
    class Quantised(torch.nn.Module):
        """Eight bits a weight, as some module of a model may keep them."""

        def __init__(self, linear: torch.nn.Linear) -> None:
            super().__init__()
            self.scale = linear.weight.detach().abs().amax() / 127
            self.weight = torch.nn.Parameter(
                (linear.weight / self.scale).round().to(torch.int8), requires_grad=False
            )

        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
            return hidden @ (self.weight.to(hidden.dtype) * self.scale).T, None

    class Unwrapping(Attention):
        def parts(self, hidden: torch.Tensor) -> Any:
            made, _ = self.linears["a"](hidden)
            return made.view(len(hidden), 3, HEADS, DIM).unbind(1)

    module = Unwrapping(rope=Rope(), norm={})
    module.linears["a"] = Quantised(module.linears["a"])  # type: ignore[arg-type]
    spec = found(module)
    assert spec.describe() == "128 columns of one module, rms norm over a head, RoPE neox 16"


def test_a_weight_that_is_not_what_its_module_multiplies_with_is_not_used() -> None:
    class Packed(torch.nn.Linear):
        """Keeps its rows in another order than it gives them, like weights packed for a CPU."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden).roll(DIM, -1)

    module = Attention(rope=Rope())
    module.linears["a"] = Packed(HIDDEN, 3 * HEADS * DIM, bias=False)
    spec = found(module)
    assert not spec.fused
    assert spec.describe() == "128 columns of one module, RoPE neox 16"


UPDATES: dict[str, Callable[[torch.nn.Module, str], None]] = {
    "in place": lambda module, name: getattr(module, name).data.mul_(1.5),
    "another tensor in the parameter": lambda module, name: setattr(
        getattr(module, name), "data", getattr(module, name).data * 1.5
    ),
    "another parameter": lambda module, name: setattr(
        module, name, torch.nn.Parameter(getattr(module, name).data * 1.5)
    ),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES.keys())
@pytest.mark.parametrize(
    "name", ["Qwen3: norm of a head", "GPT-NeoX: q, k and v of a head together"]
)
def test_new_weights_and_longer_tables_are_used_at_once(
    name: str, update: Callable[[torch.nn.Module, str], None]
) -> None:
    module = make(name)
    layer = layer_of(module)
    spec = find_spec(layer, evidence_of(layer))
    hidden, positions = tokens()
    before = spec.compute(hidden, positions)
    for linear in module.linears.values():
        update(linear, "weight")
    if module.norm_of_k is not None:
        update(module.norm_of_k, "weight")
    assert module.rope is not None
    module.rope.cos_sin_cache = module.rope.cos_sin_cache.repeat(2, 1)
    positions = positions + POSITION_LIMIT
    want = project_with_module(layer, hidden, positions)
    for got, right, old in zip(spec.compute(hidden, positions), want, before, strict=True):
        torch.testing.assert_close(got, right)
        assert not torch.allclose(got, old)
