"""The main job for every class of models, partition, codec, host layout, rank and L3: a table.

Rows that run often have each value of an axis once; tests of other files have the rest of it.
Flushed conversations come back from L3, and their tokens are those without a cache. Drafts are in
`test_speculation.py`, data-parallel attention is in `test_features.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.harness.models import HEADS, build_model
from bench.harness.server import CachedTokens, Server, ServerOptions
from hcache_backend.cli.main import app
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.plan.restore import Partition, describe
from hcache_backend.sglang.compat import sglang_version
from tests.cpu_engine.hcache_cpu_engine import reordering
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_no_cache_output_up_to_ties,
    assert_nothing_went_wrong,
    assert_own_pages_of_kv,
    assert_restored_from_l3,
    assert_sound_hidden_mode,
    faulty,
    file_backend,
    hidden_mode_env,
    likeliest,
    our_server,
    partition,
    projections,
    stored_pages,
)
from tests.engine.harness.quantised import KINDS, quantised
from tests.engine.harness.reference import assert_equal_tokens
from tests.engine.harness.sparse import PACKED, SPARSE, assert_sparse_output

pytestmark = pytest.mark.engine

LONG, VERSIONS = pytest.mark.long, pytest.mark.versions


@dataclass
class Row:
    """A server, and its conversations."""

    model: str  # in `bench.harness.models`
    pages: str  # "hidden" states; "own": K and V in own pages; "plain": SGLang's pages
    said: tuple[str, ...]  # words of the log
    unsaid: tuple[str, ...] = ()
    hcache: dict[str, Any] = field(default_factory=dict)  # options of ours
    options: dict[str, Any] = field(default_factory=dict)  # of the server
    changes: dict[str, Any] = field(default_factory=dict)  # of the model's configuration
    weights: str | None = None  # quantised, by a name in `tests.engine.harness.quantised`
    l3: str = "ours"  # or SGLang's "file"
    talk: tuple[int, int, int] = (2, 3, 200)  # conversations, turns, tokens of a question
    how: dict[str, Any] = field(default_factory=dict)  # of `converse`
    restarts: bool = False  # a second server finds all of them
    # or a "server" without a cache, its "device", "sparse" attention in PyTorch, or "none"
    reference: str = "transformers"
    close: float = 0.0  # otherwise: this share of the tokens are the most likely ones
    recomputes: bool = False  # fronts of hits, as metrics say
    files: int | None = None  # number of page files
    shard: float | None = None  # the largest of them, of K and V of MHA at most
    grid: int | None = None  # a hit ends at a multiple of so many tokens, or of a page's


def row(
    model: str, pages: str, *said: str, often: bool = False, name: str = "", **more: Any
) -> Any:
    """A row; what is not among its fields is an option of the server.

    Args:
        often: Whether it is no long test.
    """
    marks = [*more.pop("marks", ()), *(() if often else (LONG,))]
    known = {one.name for one in fields(Row)}
    options = {key: value for key, value in more.items() if key not in known}
    given = {key: value for key, value in more.items() if key in known}
    words = [model, pages, given.get("l3", ""), given.get("weights", "")]
    words += [f"{key}={v}" for key, v in options.items() if isinstance(v, int | str)]
    words += [f"{key}={v}" for key, v in given.get("hcache", {}).items() if isinstance(v, str)]
    return pytest.param(
        Row(model, pages, said, options=options, **given),
        id=name or "-".join(filter(None, words)),
        marks=marks,
    )


AUTO, KV, HIDDEN = {"mode": "auto"}, {"mode": "kv"}, {"mode": "hidden"}
PLAIN = {"mode": "plain"}
AT_ONCE = {"concurrent": True}

# ---- hidden states ----

OF_MHA = "fused weight 512x256"
BY_SPEC = {
    "llama": f"{OF_MHA}, RoPE neox 64",
    "qwen3": "fused weight 256x256, rms norm over a head, RoPE neox 64",
    "gpt2": f"{OF_MHA}, bias",
    "qwen2": "fused weight 256x256, bias, RoPE neox 64",
    "olmo2": f"{OF_MHA}, rms norm over all heads, RoPE neox 64",
    "opt": f"{OF_MHA}, bias",
    "phi3": f"{OF_MHA}, RoPE neox 64",
    "stablelm": f"{OF_MHA}, RoPE neox 16",
    "olmoe": f"{OF_MHA}, rms norm over all heads, RoPE neox 64",
}
HIDDEN_STATES = [
    row(
        *(name, "hidden", f"projection: 4 layers by spec ({spec})"),
        # 600-token questions in prefill chunks of 256: the first prompt takes three.
        **{"chunked_prefill_size": 256, "talk": (2, 3, 600), "shard": 0.52},
        often=name == "qwen3",
        marks=[VERSIONS] if name == "llama" else [],
    )
    for name, spec in BY_SPEC.items()
]

# ---- partitions: layers that are recomputed, hidden states, K and V ----

PARTITIONS = [(0, 0, 4), (0, 2, 2), (1, 3, 0), (2, 2, 0), (1, 2, 1), (2, 0, 2)]
ALL_THREE, TWO_RECOMPUTED = (1, 2, 1), (2, 2, 0)


def mixed(model: str, numbers: tuple[int, int, int], *said: str, **more: Any) -> Any:
    """A row of a partition, nothing of which was replaced by K and V."""
    pages = "own" if numbers == (0, 0, 4) else "hidden"
    how = f"{'own pages' if pages == 'own' else 'hidden mode'}: {describe(Partition(*numbers))}, "
    hcache = {"partition": partition(*numbers)}
    name = f"{model}-{numbers}-{more.get('dtype', 'float32')}"
    return row(model, pages, how, *said, hcache=hcache, talk=(2, 3, 300), **more, name=name)


HALF: dict[str, Any] = {"dtype": "bfloat16"}
"""By default with codecs exp4 and exp3, which leave 0.77 and 0.72 of the bytes."""
EXPERTS = HALF | {"reference": "device"}
BOTH_CODECS = "codec exp4, exp3 of K and V"
MIXED = [
    *(mixed(model, numbers) for model in ("llama", "qwen3") for numbers in PARTITIONS),
    *(
        # Its layers are recomputed otherwise than Llama's, of which tests/goldens has some.
        mixed(model, TWO_RECOMPUTED, often=model == "opt")
        for model in ("olmo2", "opt", "gpt2", "qwen2", "phi3", "stablelm", "olmoe")
    ),
    mixed("qwen3", ALL_THREE, BOTH_CODECS, **HALF, overlap=True, often=True),
    mixed("llama", ALL_THREE, BOTH_CODECS, **HALF, overlap=True),
    mixed("llama", (0, 4, 0), "codec exp4", **HALF, shard=0.22),
    mixed("llama", (0, 0, 4), "codec exp3", **HALF),
    mixed("llama", (0, 2, 2), BOTH_CODECS, **HALF),
]

# ---- classes of models, most of them without hidden states or own pages ----

QUERY_GROUPS = "KV mode, own pages: the partition has no hidden states: 4 layers loaded as KV"
TWO_POSITIONS = "own pages: model.layers.0.self_attn takes a tensor 'positions' of shape (1, 48)"
LONGEST_POSITION = (
    "K of model.layers.0.self_attn at positions 0..47 changes when position 16383 is projected "
    "with them"
)
NOT_RECOMPUTED = "not used: recomputation"
LATENTS = "KV mode, own pages: latents of MLA are smaller than hidden states"
HYBRID = (
    "KV mode, own pages: only the full-attention layers of a hybrid model have pages of their own"
)
ONE_TOKEN = "KV mode, plain pages: a hybrid model with states and pages of one token"
BY_SERVER = {"reference": "server"}
WITH_WINDOWS = 132 if sglang_version() in ("0.5.21", "0.5.22") else 134
"""Pages of windows are files of their own: the last window of each node. When the second node of a
conversation is stored, SGLang 0.5.23 still has one page more before the window."""
CLASS: dict[str, Any] = {"page_size": 16, "hcache": AUTO, "files": 80}
AGAIN: dict[str, Any] = CLASS | {"restarts": True}
TWO_RANKS = AGAIN | {"tp": 2, "files": 160}
# A state is kept every 64 tokens, and is a file of its own.
STATES: dict[str, Any] = {
    "hcache": AUTO | {"state_tokens": 0},
    "extra_env": {"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    "grid": 64,
    **BY_SERVER,
}
FRONTS: dict[str, Any] = {
    "unsaid": (NOT_RECOMPUTED,),
    "recomputes": True,
    "talk": (2, 3, 400),
    "metrics": True,
    # Otherwise a front pays or not by the machine.
    "extra_env": {"HCACHE_CPU_L3_FILE": str(Path(__file__).with_name("slow_l3"))},
}
RECOMPUTED = {"recompute_ms": 1e4}

CLASSES = [
    *(row(name, "own", QUERY_GROUPS, **AGAIN) for name in ("qwen3_moe", "glm4_moe", "minimax_m2")),
    row("minimax_m2", "own", QUERY_GROUPS, **TWO_RANKS),
    row("gemma3", "own", TWO_POSITIONS, **AGAIN | {"hcache": HIDDEN}),
    # Its RoPE changes with the longest position of a batch.
    row("phi3_longrope", "own", LONGEST_POSITION, hcache=HIDDEN, **BY_SERVER, often=True),
    # All ranks have the same latent, and each keeps a part of the tokens.
    row("deepseek", "own", LATENTS, **AGAIN),
    row("deepseek", "own", LATENTS, **TWO_RANKS),
    *(row(name, "own", LATENTS, **AGAIN, **BY_SERVER) for name in ("deepseek_v2", "glm4_moe_lite")),
    row(
        *("deepseek", "own", LATENTS, "codec exp4"),
        **EXPERTS,
        hcache=AUTO,
        often=True,
        marks=[VERSIONS],
    ),
    row("deepseek_v2", "own", LATENTS, "codec exp4", **EXPERTS, hcache=AUTO, tp=2, restarts=True),
    *(
        row(
            *(name, "own", LATENTS),
            **FRONTS | BY_SERVER | {"hcache": AUTO | RECOMPUTED, "tp": tp},
            often=(name, tp) == ("deepseek", 1),
            name=f"{name}-{tp}, fronts",
        )
        for name, tp in (("deepseek", 1), ("deepseek", 2), ("deepseek_v2", 1), ("glm4_moe_lite", 1))
    ),
    row("gpt_oss", "own", HYBRID, **AGAIN | {"files": WITH_WINDOWS}),
    row("gpt_oss", "own", HYBRID, **TWO_RANKS | {"files": 2 * WITH_WINDOWS}),
    row(
        *("mellum", "own", HYBRID, "codec exp4"),
        **HALF | CLASS | {"files": WITH_WINDOWS},
        often=True,
        marks=[VERSIONS],
    ),
    row("mellum", "own", HYBRID, **AGAIN | {"files": WITH_WINDOWS}),
    # Keys are wider than values, and windows have more heads.
    row("mimo_v2", "own", HYBRID, **BY_SERVER, **CLASS | {"files": 134}, often=True),
    row("mimo_v2", "own", HYBRID, **BY_SERVER, **TWO_RANKS | {"files": 268}),
    row("qwen3_5", "own", HYBRID, **CLASS | STATES | {"files": 78}, often=True),
    row("qwen3_5", "own", HYBRID, **TWO_RANKS | STATES | {"files": 156}),
    row("qwen3_next", "own", HYBRID, **AGAIN | STATES | {"files": 78, "tp": 1}),
    row("qwen3_next", "own", HYBRID, **TWO_RANKS | STATES | {"files": 156}),
    # SGLang keeps states of convolutions with pages of one token only.
    row("lfm2", "plain", ONE_TOKEN, **CLASS | STATES | {"page_size": 1, "grid": 1, "files": None}),
]

# ---- layouts of host memory ----

KERNEL = {"mem_layout": "layer_first", "io_backend": "kernel"}
DIRECT = {"mem_layout": "layer_first", "io_backend": "direct"}
PAGES_DIRECT = {"mem_layout": "page_first_direct", "io_backend": "direct"}
HEADS_KERNEL = {"mem_layout": "page_head", "io_backend": "kernel"}

# ---- sparse attention: keys of an indexer are a pool beside the latents ----

OF_INDEXERS: dict[str, Any] = SPARSE | {"reference": "sparse"}
# Rows of multiples of 8 bytes, as real models have: 256 values, two scales and RoPE part.
PACKED_ROWS = {"extra_args": PACKED, "changes": {"kv_lora_rank": 256}}


def sparse(model: str, name: str, **more: Any) -> Any:
    """A row; most queries attend to a part of the tokens before them. Of two conversations there
    are ten pages; plain pages have index keys in files of their own."""
    files = 20 if more.get("hcache", AUTO) is AUTO else 40
    pages = "own" if files == 20 else "plain"
    given = OF_INDEXERS | {"hcache": AUTO, "files": files} | more
    return row(model, pages, **given, name=f"{model}, {name}")


OF_SPARSE = [
    sparse("deepseek_v32", "bfloat16", marks=[VERSIONS], often=True),
    # Every second layer has no index keys.
    sparse("glm_5", "FP8", **PACKED_ROWS, often=True),
    sparse("deepseek_v32", "FP8", **PACKED_ROWS, restarts=True),
    sparse("glm_5", "bfloat16", restarts=True),
    *(
        sparse(model, f"{name}, two ranks", **how, tp=2, restarts=True, files=40)
        for model, name, how in (("deepseek_v32", "bfloat16", {}), ("glm_5", "FP8", PACKED_ROWS))
    ),
    sparse("deepseek_v32", "plain", hcache=PLAIN, restarts=True),
    sparse("glm_5", "plain, FP8", hcache=PLAIN, extra_args=PACKED, restarts=True),
    # Both ranks have the same latents and index keys, and the first one stores them.
    sparse("deepseek_v32", "plain, two ranks", hcache=PLAIN, tp=2, restarts=True),
    sparse("glm_5", "plain, two ranks, FP8", hcache=PLAIN, tp=2, extra_args=PACKED),
    *(
        sparse("deepseek_v32", f"plain, {name}", hcache=PLAIN, **how, extra_args=PACKED)
        for name, how in (("layer_first", KERNEL), ("page_first_direct", PAGES_DIRECT))
    ),
    sparse("deepseek_v32", "file", l3="file", files=None),
    sparse("glm_5", "file", l3="file", files=None, extra_args=PACKED),
]

# ---- K and V: heads, layouts of host memory, ranks and stages, another L3 ----

AUTO_SIZED: dict[str, Any] = {"hicache_ratio": None}
GROUPED = {"num_key_value_heads": 2}
OF_KV = [
    row(
        *("llama", "own", "HiCache auto-sizing: ratio"),
        **DIRECT | AUTO_SIZED,
        changes=GROUPED,
        hcache=AUTO,
        often=True,
    ),
    row("llama", "own", "HiCache auto-sizing: ratio", hcache=KV, **AUTO_SIZED, marks=[VERSIONS]),
    row("qwen2", "hidden", hcache=HIDDEN, **PAGES_DIRECT, often=True),
    *(row("llama", "plain", hcache=PLAIN, **how) for how in (KERNEL, DIRECT, PAGES_DIRECT)),
    *(row("llama", "hidden", hcache=HIDDEN, **how) for how in (KERNEL, DIRECT)),
    *(row("llama", "own", hcache=KV, **how) for how in (KERNEL, PAGES_DIRECT, HEADS_KERNEL)),
    # As many heads of K and V as of queries, where mode `kv` insists.
    *(row(name, "own", hcache=KV) for name in ("phi3", "olmoe")),
    row("qwen3", "own", QUERY_GROUPS, hcache=AUTO, tp=2),
    row("qwen3", "own", "codec exp3", hcache=KV, **HALF, page_size=128),
    row("qwen3", "own", "codec exp3", hcache=KV, **HALF, tp=2),
    row("llama", "own", "codec exp3", changes=GROUPED, hcache=AUTO, **HALF),
    row("qwen3", "own", hcache=AUTO, pp=2),
    row("qwen3", "own", hcache=AUTO, l3="file"),
    row(
        *("qwen3", "own"),
        **{"page_size": 16, "max_total_tokens": 8192, "chunked_prefill_size": 128},
        **{"hcache": AUTO, "overlap": True, "extra_args": ["--enable-mixed-chunk"]},
        extra_env={"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
        talk=(8, 2, 200),
        how=AT_ONCE | {"reply_tokens": 24},
        often=True,
        name="decodes in chunks of prefills",
    ),
]

# ---- lossy codecs ----

# Shares of K and V are between those that `int8` leaves of these models' tokens (0.93 and 0.84 of
# 128 tokens) and those of codecs that go by the scales of the next channel or token (0.59 and 0.43
# of 320 tokens). K and V at a neighbour's place are not seen so: the check in service sees these.
MIXED_PAGES = {"partition": partition(0, 2, 2)}
LAYERWISE = {"restore": "layerwise"}
UNPAIRED = {"mode": "kv", "codec": "krul"}  # by its default bound pairs are kept in `int8`
LOSSY = [
    row(
        *(model, "own" if hcache.get("mode") == "kv" else "hidden", f"codec {hcache['codec']}, "),
        hcache=hcache,
        page_size=128,
        talk=(4, 3, 300),
        close=close,
        **HALF | options,
    )
    for model, close, hcache, options in (
        ("qwen3", 0.75, KV | {"codec": "int8"}, {"dtype": "float16"}),
        ("qwen3", 0.75, KV | {"codec": "int8"}, {"tp": 2}),
        ("llama", 0.6, MIXED_PAGES | {"codec": "int8"}, {"tp": 2}),
        ("qwen3", 0.75, KV | LAYERWISE | {"codec": "int8"}, {}),
        ("llama", 0.65, {"codec": "int8"}, {"dtype": "float32", "shard": 0.18}),
        ("qwen3", 0.75, UNPAIRED, {"tp": 2}),
        ("qwen3", 0.75, UNPAIRED | LAYERWISE, {}),
    )
]

# ---- hidden states of several ranks: each has a shard of every page's tokens ----

RANKS = [
    *(
        row(name, "hidden", f"projection: {how}", tp=2, page_size=16, how=AT_ONCE, **more)
        for name, how, more in (
            # The norm of olmo2 sees the heads of all ranks: the modules talk to each other.
            (
                *("olmo2", "layers 0, 1, 2, 3 by their attention modules: K is made by no norm"),
                {"marks": [VERSIONS], "often": True},
            ),
            ("qwen3", "4 layers by spec (fused weight 128x256, rms norm over a head, RoPE", {}),
            ("opt", "4 layers by spec (fused weight 256x256, bias)", {}),
        )
    ),
    row("llama", "hidden", tp=2, pp=2),
    # One KV head for all queries: hidden states need more than twice the KV pool's host memory.
    row("gemma", "hidden", hcache=HIDDEN, hicache_ratio=16.0, talk=(1, 2, 300), often=True),
    row("llama", "hidden", tp=2, l3="file"),
]

# ---- FP8 weights: what K depends on decides, not the word ----

# Scales of tokens, of groups of values and of the checkpoint do not depend on the batch, so hidden
# states are stored and layers are recomputed. transformers has no such layers.
# SGLang's Llama does not find the scales of blocks; its Qwen 3 does.
OF_FP8: dict[str, Any] = {
    "changes": {"num_key_value_heads": HEADS},
    "extra_env": {reordering.EXACT: "1"},
    "talk": (1, 2, 200),
    **BY_SERVER,
}
DEPENDS = "for a token depends on the other tokens of the batch"
INDEPENDENT = [kind for kind in KINDS if kind != "batch"]
FP8 = [
    *(
        row(
            *("qwen3", "hidden"),
            **OF_FP8,
            unsaid=(NOT_RECOMPUTED,),
            weights=kind,
            restarts=kind != "blocks",
            often=kind == "blocks",
        )
        for kind in INDEPENDENT
    ),
    # K and V are stored as they are: what they depend on was there when they were computed. With
    # another batch they are others.
    row(
        *("qwen3", "own", DEPENDS, NOT_RECOMPUTED),
        **OF_FP8 | {"weights": "batch", "reference": "none"},
        often=True,
    ),
    # Fronts of K and V are recomputed.
    *(
        row(
            *("qwen3", "own"),
            **OF_FP8
            | FRONTS
            | {"changes": {}, "hcache": KV | RECOMPUTED, "weights": kind}
            | {"extra_env": OF_FP8["extra_env"] | FRONTS["extra_env"]},
        )
        for kind in INDEPENDENT
    ),
]

# ---- a fault that a server finds when it starts: it stores less, and nothing wrong ----

OTHER_ROWS = "other rows of model.layers.0.self_attn than its projection received"
MODULES_OF_TWO = (
    "projection: layers 0, 2 by their attention modules: in the KV pool K or V are less exact than "
    "the attention module's own at other batch sizes"
)


def fault(what: str, pages: str, *said: str, **more: Any) -> Any:
    given = {"extra_env": faulty(what), "talk": (1, 2, 200), "name": what} | more
    return row("llama", pages, *said, **given)


WRONG_SPEC = "hidden", "projection: 2 layers by spec (", MODULES_OF_TWO
FAULTS = [
    fault(
        *("wrong_rope", "own", "KV mode, own pages: projected K of model.layers.0.self_attn"),
        often=True,
    ),
    fault("wrong_save", "own", f"hidden states do not get to host memory: {OTHER_ROWS}"),
    fault(
        *("wrong_copies", "plain"),
        "KV mode, plain pages: K or V of layer 3 come back from host memory as",
        hcache=KV,
        often=True,
    ),
    fault(
        *("encoded_wrongly", "hidden", OTHER_ROWS),
        "codec 'exp4' is not used, hidden states are stored as they are",
        **HALF,
    ),
    fault("wrong_spec_rope", *WRONG_SPEC, often=True),
    fault("wrong_spec_rows", *WRONG_SPEC),
    fault("wrong_spec_rounding", *WRONG_SPEC, **HALF),
    # Layers behind the first that is not exact are stored and loaded; pages of K and V are
    # recomputed whole or not at all.
    fault(
        *("recomputed_wrongly", "hidden"),
        "exactness: recomputed layers: the first 2 layers only (model.layers.2.self_attn "
        "recomputed: K ",
        hcache={"partition": partition(3, 1, 0)},
        often=True,
    ),
    fault(
        *("recomputed_wrongly", "own"),
        "recomputation (model.layers.2.self_attn recomputed: K ",
        hcache=KV,
        name="recomputed_wrongly, K and V",
        often=True,
    ),
]

# ---- SGLang's Triton attention recomputes, as on most GPUs; `intel_amx` is the server's own ----


def by_triton(model: str, fault: str, pages: str, *said: str, **more: Any) -> Any:
    """A row of SGLang's own code, whose kernels Triton interprets."""
    interpreted = {"HCACHE_CPU_ENGINE_TRITON": "real", "TRITON_INTERPRET": "1"}
    given = {"hcache": KV, "talk": (1, 3, 300), "metrics": True, "name": f"{model}, {fault}"} | more
    env = FRONTS["extra_env"] | interpreted | faulty(fault)
    return row(model, pages, *said, extra_env=env, **given)


INSTEAD = (
    "attention backend 'triton' recomputes, because 'intel_amx' waits for the GPU",
    "exactness: recomputed layers: by attention backend 'triton'; K ",
)
MOST_RECOMPUTED: dict[str, Any] = {"unsaid": (NOT_RECOMPUTED,), "recomputes": True}
BY_TRITON = [
    by_triton(
        *("llama", "substitute", "own", *INSTEAD),
        **MOST_RECOMPUTED,
        often=True,
        marks=[VERSIONS],
    ),
    # Another kernel rounds weights otherwise in every layer.
    by_triton("qwen3", "substitute", "own", *INSTEAD, **HALF, **MOST_RECOMPUTED),
    by_triton("deepseek", "substitute", "own", *INSTEAD, **MOST_RECOMPUTED),
    by_triton(
        *("llama", "substitute", "hidden", *INSTEAD),
        hcache={"partition": partition(2, 2, 0)},
        name="llama, substitute, hidden states",
    ),
    by_triton(
        *("llama", "large_substitute", "own"),
        "recomputation (model.layers.1.self_attn by the other attention backend: K ",
        often=True,
    ),
    by_triton(
        *("llama", "substitute_without_memory", "own"),
        "recomputation (attention backend 'triton' cannot be made: Tried to allocate 2.00 MiB.)",
    ),
]

# ---- checks of the start on a server that runs one request at a time ----

ONE = row(
    *("llama", "hidden", "exactness: recomputed layers: "),
    unsaid=(NOT_RECOMPUTED,),
    hcache={"partition": partition(2, 2, 0)},
    extra_args=("--max-running-requests", "1"),
    talk=(1, 2, 400),
    often=True,
    name="one at once",
)
OF_START = [*FAULTS, *BY_TRITON, ONE]
ROWS = [*HIDDEN_STATES, *MIXED, *CLASSES, *OF_SPARSE, *OF_KV, *LOSSY, *RANKS, *FP8, *OF_START]


def assert_as_wanted(server: Server, row: Row) -> None:
    """Its pages are those of the row, on every rank, and nothing went wrong."""
    log, options = server.log_text(), server.options
    if row.pages == "hidden":
        assert_hidden_mode(server)
        assert log.count("hcache: hidden mode:") == options.tp * options.pp
    elif row.pages == "own":
        assert_own_pages_of_kv(server)
    else:
        assert "hcache: KV mode, plain pages: " in log
    assert [words for words in row.said if words not in log] == []
    assert [words for words in row.unsaid if words in log] == []
    if row.recomputes:
        assert fetch(server.url).counters["l3_tokens"].get("recomputed", 0) > 0
    assert_nothing_went_wrong(server)


def assert_stored(row: Row, options: ServerOptions) -> None:
    files = stored_pages(options.log.parent)
    assert row.files is None or len(files) == row.files
    if row.shard is not None:
        kv_bytes = 2 * 4 * 256 * 4 * options.page_size  # of an MHA model of this size
        assert max(path.stat().st_size for path in files) <= row.shard * kv_bytes
    if row.pages == "hidden" and row.l3 == "ours":
        shards = {path.name.split(".")[-2] for path in files}
        assert shards == {f"{rank}of{options.tp}" for rank in range(options.tp)}


def assert_right(row: Row, options: ServerOptions, conversations: Iterable[Conversation]) -> None:
    model, asked = Path(options.model), list(conversations)
    if row.close:
        assert likeliest(model, asked) >= row.close
    elif row.reference == "device":
        assert_as_from_the_device(options, asked)
    elif row.reference == "sparse":
        assert_sparse_output(options, asked)
    elif options.dtype == "bfloat16":
        assert_no_cache_output_up_to_ties(model, options.log.parent, asked)
    elif row.reference == "transformers":
        assert_no_cache_output(model, asked)
    elif row.reference == "server":
        log, env = options.log.with_name("plain.log"), options.extra_env
        size = options.page_size
        plain = ServerOptions(model, log, cache="none", page_size=size, extra_env=env)
        with Server(plain) as server:
            for turn in turns_of(asked):
                want = server.generate(turn.prompt, len(turn.reply.output_ids))
                assert want.cached == CachedTokens(0, 0, 0)
                assert_equal_tokens(turn.reply.output_ids, want.output_ids)


def assert_as_from_the_device(options: ServerOptions, asked: Iterable[Conversation]) -> None:
    """Replies are those of a server that has every prefix on its device. Without a cache experts in
    bfloat16 differ: a prompt as a whole is rounded otherwise than its last part behind a prefix."""
    log, of_both = options.log.with_name("device.log"), ("dtype", "page_size", "tp")
    same = {name: getattr(options, name) for name in of_both}
    with Server(ServerOptions(Path(options.model), log, cache="radix", **same)) as server:
        for turn in turns_of(asked):
            want = server.generate(turn.prompt, len(turn.reply.output_ids))
            assert want.cached.total == turn.cached.total
            assert_equal_tokens(turn.reply.output_ids, want.output_ids)


@pytest.mark.parametrize("row", ROWS)
def test_conversations_come_back_from_l3(row: Row, model_cache: Path, tmp_path: Path) -> None:
    model = build_model(row.model, model_cache, **row.changes)
    if row.weights is not None:
        model = quantised(model, tmp_path, row.weights)
    if row.l3 == "file":
        env = hidden_mode_env(**row.hcache) | row.options.get("extra_env", {})
        options = file_backend(model, tmp_path, **row.options | {"extra_env": env})
    else:
        options = our_server(model, tmp_path, hcache=row.hcache, **row.options)
    number, turns, tokens = row.talk

    def talk(options: ServerOptions, **how: Any) -> list[Conversation]:
        conversations = make_conversations(number, turns=turns, tokens=tokens)
        with Server(options) as server:
            converse(server, conversations, **how)
            assert_as_wanted(server, row)
        return conversations

    asked = talk(options, **row.how)
    assert_restored_from_l3(asked, row.grid or options.page_size)
    assert all(turn.cached.device == turn.cached.host == 0 for turn in turns_of(asked))
    assert_stored(row, options)
    if row.restarts:  # nothing of them is on the device by chance
        again = talk(replace(options, log=tmp_path / "restarted.log"), flush=False)
        whole = (tokens - 1) // options.page_size * options.page_size
        assert all(conversation.turns[0].cached.storage >= whole for conversation in again)
        asked += again
    assert_right(row, options, asked)


def test_the_doctor_says_why_modules_project(model_cache: Path, tmp_path: Path) -> None:
    model = build_model("olmo", model_cache)
    reason = "V is not a part of what a linear module gives for the hidden states"
    with Server(our_server(model, tmp_path)) as server:
        conversations = converse(server, make_conversations(2, turns=2, tokens=300))
        assert_sound_hidden_mode(server)
        assert_restored_from_l3(conversations, server.options.page_size)
        assert projections(server) == [f"layers 0, 1, 2, 3 by their attention modules: {reason}"]
    assert_no_cache_output(model, conversations)
    told = CliRunner().invoke(app, ["doctor", "--json", "--dir", str(tmp_path / "l3")])
    (check,) = [c for c in json.loads(told.stdout)["checks"] if "last server" in c["subject"]]
    assert check["verdict"] == "fair"
    assert "hidden mode, own pages; codec none; " in check["detail"]
    assert (
        f"layers 0, 1, 2, 3 by their attention modules: {reason} "
        "(attention modules at other batch sizes K " in check["detail"]
    )
    assert check["detail"].endswith("; stored: 4 layers from hidden states")
