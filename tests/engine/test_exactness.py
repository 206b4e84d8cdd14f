"""Half types: K and V come back as exactly as the model repeats them, and so do replies."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import Reply, Server, ServerOptions
from hcache_backend.server_report import read_report
from tests.cpu_engine.hcache_cpu_engine import reordering
from tests.engine.harness.conversations import random_tokens
from tests.engine.harness.ours import (
    assert_sound_hidden_mode,
    faulty,
    our_server,
    partition,
    projections,
)
from tests.engine.harness.reference import first_difference
from tests.engine.harness.sparse import PACKED, SPARSE, sparse_logprobs

pytestmark = pytest.mark.engine

ROTATED = (
    *("llama", "qwen2", "qwen3", "olmo2", "phi3", "stablelm", "olmoe"),
    *("gemma", "mixtral", "qwen2_moe"),
)
IN_EVERY_RUN = (("llama", "bfloat16"), ("qwen3", "float16"))
CASES = [
    pytest.param(name, dtype, marks=() if (name, dtype) in IN_EVERY_RUN else pytest.mark.long)
    for name in (*ROTATED, "opt", "gpt2")
    for dtype in ("bfloat16", "float16")
]
OF_GLM = {"kv_lora_rank": 256, "indexer_types": ["full", "shared"]}
FIGURES = re.compile(r"K (\S+)% equal, (\S+) ulp, V (\S+)% equal, (\S+) ulp")


def figures(told: str) -> dict[str, float]:
    """The last figures in a line: shares of equal values in percent, largest distances in ulps."""
    found = FIGURES.findall(told)[-1]
    return dict(zip(("k_equal", "k_ulp", "v_equal", "v_ulp"), map(float, found), strict=True))


def assert_as_exact(ours: dict[str, float], models: dict[str, float]) -> None:
    for part in "kv":
        assert ours[f"{part}_equal"] >= models[f"{part}_equal"]
        assert ours[f"{part}_ulp"] <= models[f"{part}_ulp"]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_restored_and_recomputed_layers_are_as_exact_as_the_models_own_at_another_batch_size(
    name: str,
    dtype: str,
    model_cache: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    options = our_server(
        build_model(name, model_cache),
        tmp_path,
        hcache={"partition": partition(2, 2, 0)},
        dtype=dtype,
    )
    with Server(options) as server:
        assert_sound_hidden_mode(server)
        [how] = projections(server)
        log = server.log_text()
    assert how.startswith("4 layers by spec (fused weight ")
    assert ("rounding" in how) == (name in ROTATED)
    [projected] = re.findall("hcache: exactness: layers 0, 1, 2, 3: spec (.*)", log)
    [recomputed] = re.findall("hcache: exactness: recomputed layers: (.*)", log)
    report = read_report(tmp_path / "l3")
    assert report is not None
    assert [group.exactness for group in report.projection] == [f"spec {projected}"]
    assert report.recomputation == recomputed
    record_property("how", how)
    for what, told in (("projected", projected), ("recomputed", recomputed)):
        ours, models = map(figures, told.split(";"))
        record_property(what, {"ours": ours, "models_own": models})
        assert_as_exact(ours, models)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.long)])
def test_products_of_a_part_of_a_weight_may_sum_in_another_order(
    dtype: str, model_cache: Path, tmp_path: Path
) -> None:
    """Libraries choose kernels by the width of a product: K and V alone are narrower than QKV."""
    options = our_server(
        build_model("llama", model_cache),
        tmp_path,
        hcache={"partition": partition(2, 2, 0)},
        dtype=dtype,
        extra_env=faulty("products_by_width"),
    )
    with Server(options) as server:
        assert_sound_hidden_mode(server)
        [how] = projections(server)
        log = server.log_text()
    assert how.startswith("4 layers by spec (fused weight ")
    [projected] = re.findall("hcache: exactness: layers 0, 1, 2, 3: spec (.*)", log)
    assert figures(projected.split(";")[0])["v_equal"] < 100
    assert "hcache: exactness: recomputed layers: K" in log


def replies(options: ServerOptions, prompts: Sequence[Sequence[int]], tokens: int) -> list[Reply]:
    """Replies with log-probabilities; with a cache, behind a history that comes back from L3."""
    with Server(options) as server:
        if options.cache == "hicache":
            for prompt in prompts:
                server.generate(prompt[:-32], 1)
            server.flush_cache()
        answers = [server.generate(prompt, tokens, logprobs=True) for prompt in prompts]
        if options.cache == "hicache":
            assert all(answer.cached.storage >= len(prompts[0]) - 64 for answer in answers)
    return answers


def compared(got: Sequence[Reply], want: Sequence[Reply]) -> dict[str, float]:
    """How many replies differ, and log-probabilities of tokens up to the first one that does."""
    off, differ = [], 0
    for ours, theirs in zip(got, want, strict=True):
        at = first_difference(ours.output_ids, theirs.output_ids)
        differ += at is not None
        pairs = list(zip(ours.top2, theirs.top2, strict=True))[:at]
        off += [abs(a - b) for (a, _), (b, _) in pairs]
    return {"replies": len(got), "differ": differ, "mean": fmean(off), "largest": max(off)}


def compared_with_no_cache(
    model: Path,
    prompts: Sequence[Sequence[int]],
    choices: Mapping[str, Mapping[str, object]],
    folder: Path,
    record_property: Callable[[str, object], None],
    extra_env: Mapping[str, str] | None = None,
    tokens: int = 16,
) -> dict[str, dict[str, float]]:
    """What servers with other options make of the histories, by the name of the choice; ``own``:
    what the model itself makes of them in prefills of two pages."""
    common: dict[str, Any] = {"dtype": "bfloat16", "extra_env": extra_env or {}}
    plain = ServerOptions(model, folder / "plain.log", cache="none", **common)
    servers = {"own": replace(plain, log=folder / "own.log", chunked_prefill_size=128)}
    for name, hcache in choices.items():
        made = our_server(model, folder / name, hcache=dict(hcache), hicache_ratio=8.0, **common)
        by_modules = {"HCACHE_PROJECTION": "generic"} if name == "generic" else {}
        servers[name] = replace(made, extra_env={**made.extra_env, **by_modules})
    want, found = replies(plain, prompts, tokens), {}
    for name, options in servers.items():
        found[name] = compared(replies(options, prompts, tokens), want)
        record_property(name, found[name])
    return found


EXACT = {"auto": {}, "generic": {}, "kv": {"mode": "kv"}}


@pytest.mark.parametrize(
    ("count", "length", "tokens", "choices"),
    [
        pytest.param(16, 192, 8, {"auto": {}}, id="16"),
        pytest.param(
            *(64, 320, 16, EXACT), id="64", marks=[pytest.mark.long, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_bfloat16_replies_behind_restored_histories_differ_no_more_than_ties_do(
    count: int,
    length: int,
    tokens: int,
    choices: Mapping[str, Mapping[str, str]],
    model: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    prompts = [random_tokens(length, 7_000 + seed) for seed in range(count)]
    found = compared_with_no_cache(
        model, prompts, choices, tmp_path, record_property, tokens=tokens
    )
    own = found["own"]  # how often two tokens are as likely depends on the processor, too
    for name in choices:
        assert found[name]["differ"] <= own["differ"] + count / 8
        assert found[name]["mean"] <= 2 * own["mean"]


@pytest.mark.long
def test_recomputed_layers_are_as_exact_as_loaded_ones_where_sums_depend_on_the_number_of_rows(
    model: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """As on every GPU: the model itself differs in its last bits at another batch size."""
    choices = {
        "kv": {"mode": "kv", "recompute": "never"},
        "recomputed": {"partition": partition(2, 0, 2)},
        "hidden": {"partition": partition(2, 2, 0)},
    }
    prompts = [random_tokens(320, 7_000 + seed) for seed in range(16)]
    reordered = {reordering.VARIABLE: "1"}
    found = compared_with_no_cache(model, prompts, choices, tmp_path, record_property, reordered)
    for name in ("recomputed", "hidden"):
        log = (tmp_path / name / "server.log").read_text()
        assert "hcache: exactness: recomputed layers: " in log
        assert "not used: recomputation" not in log
        assert found[name]["differ"] <= max(found["kv"]["differ"], found["own"]["differ"]) + 2
        assert found[name]["mean"] <= 2 * max(found["kv"]["mean"], found["own"]["mean"])


@pytest.mark.parametrize(
    ("name", "changes", "arguments"),
    [
        ("deepseek_v32", {}, ()),
        pytest.param("glm_5", OF_GLM, PACKED, marks=pytest.mark.long),
    ],
    ids=["deepseek_v32", "glm_5, FP8"],
)
def test_sparse_attention_in_bfloat16_is_as_exact_as_in_pytorch(
    name: str,
    changes: dict[str, Any],
    arguments: Sequence[str],
    model_cache: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """Log-probabilities of tokens behind a history, computed and from L3, are equal. They are as
    far from float32 as PyTorch's are in bfloat16. These two differ by as much from each other: a
    last place decides which token is the last one chosen, and two layers amplify that least."""
    model = build_model(name, model_cache, num_hidden_layers=2, first_k_dense_replace=2, **changes)
    asked = {"dtype": "bfloat16", "extra_args": arguments}
    options = our_server(model, tmp_path, hcache={"mode": "auto"}, **SPARSE, **asked)
    texts, start = [random_tokens(700, 7_000 + seed) for seed in range(3)], 450
    with Server(options) as server:
        computed = [server.score(text, start) for text in texts]
        server.flush_cache()
        restored = [server.score(text, start) for text in texts]
    assert [found for _, _, found in restored] == [448] * 3
    assert [found[:2] for found in restored] == [found[:2] for found in computed]

    def by_reference(dtype: str) -> list[float]:
        return [p for text in texts for p in sparse_logprobs(options, text, start, dtype)]

    def mean_distance(found: Sequence[float]) -> float:
        return fmean(abs(one - other) for one, other in zip(found, exact, strict=True))

    exact = by_reference("float32")
    served = mean_distance([p for _, found, _ in restored for p in found])
    in_torch = mean_distance(by_reference("bfloat16"))
    record_property("served", served)
    record_property("torch", in_torch)
    assert served <= 1.25 * in_torch
