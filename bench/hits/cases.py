"""The models and methods that are compared."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness.drafts import drafting_arguments, eagle
from bench.harness.machine import Machine
from bench.harness.methods import EVERY_HIT, METHODS, Method
from bench.harness.models import TinyLlama, build_model, narrowed
from bench.harness.turns import NO_L3, Turns, taking_turns
from hcache_backend.server_report import read_report

POSITIONS = 32768
ALWAYS, OURS = "always", "ours"
COMPARED: dict[str, Method] = {
    NO_L3: replace(METHODS["host"], title="no L3"),
    ALWAYS: Method(
        "every L3 hit read", storage="dynamic", hcache={"recompute": "never", **EVERY_HIT}
    ),
    OURS: Method("default options", storage="dynamic"),
    "file": METHODS["file"],
    "nixl": METHODS["nixl"],
}


def title(case: Mapping[str, Any]) -> str:
    """Model and length of a case, in words."""
    return f"{case['model']} ({case['pages']}), {case['tokens']:,}"


def layers(tokens: int) -> int:
    """Of a model, so that computing a history takes about a second."""
    return max(1, 2048 // tokens)


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        pages: That ours stores.
        build: Its folder, given the one above and the tokens of a history.
        insists: Options that make ours store these pages on a CPU, which projects slowly.
        dtype: It is served in.
        codec: Of pages by default options; None: they are plain.
        arguments: Further ones of SGLang's, given the model's folder.
        tp: Number of tensor-parallel ranks.
        environment: Of all servers.
    """

    pages: str
    build: Callable[[Path, int], Path]
    insists: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    codec: str | None = "none"
    arguments: Callable[[Path], Sequence[str]] | None = None
    tp: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)

    def methods(self) -> dict[str, Method]:
        """Those that can run here."""
        with_nixl = find_spec("nixl") is not None
        return {
            name: replace(how, hcache={**how.hcache, **self.insists})
            for name, how in COMPARED.items()
            if name != "nixl" or (with_nixl and self in MODELS.values())
        }

    @contextmanager
    def turns(
        self, machine: Machine, folder: Path, tokens: int, **methods: Method
    ) -> Iterator[Turns]:
        """Servers of ``methods`` with a history of ``tokens`` (whole pages) in their L3.

        Raises:
            ServerError: Ours stores pages by another codec, so that the right one would not be
                measured.
        """
        model = self.build(folder, tokens)
        extra = self.arguments(model) if self.arguments is not None else ()
        options = {"dtype": self.dtype, "tp": self.tp, "extra_env": self.environment}
        with taking_turns(machine, model, methods, tokens, extra, **options) as turns:
            for name in (ALWAYS, OURS):
                report = read_report(turns.servers[name].l3)
                used = report.codec if report is not None else "unknown"
                if used != self.codec:
                    error = f"pages are stored by codec {used}, not by {self.codec}"
                    raise turns.servers[name].server.error(error)
            yield turns


def _llama(kv_heads: int, hidden: int = 1024) -> Callable[[Path, int], Path]:
    def build(folder: Path, tokens: int) -> Path:
        width = narrowed(hidden, tokens)
        shape = TinyLlama(layers(tokens), width, 8, kv_heads, width * 11 // 4, positions=POSITIONS)
        return shape.build(folder)

    return build


def _shape(tokens: int) -> dict[str, int]:
    width = narrowed(1024, tokens)
    found = {"num_hidden_layers": layers(tokens), "hidden_size": width}
    return {**found, "max_position_embeddings": POSITIONS}


def _latent(folder: Path, tokens: int) -> Path:
    shape = _shape(tokens)
    dense = {"first_k_dense_replace": layers(tokens)}
    mlp = {"intermediate_size": shape["hidden_size"] * 11 // 4}
    return build_model("deepseek", folder, **shape, **mlp, **dense)


def _sparse(folder: Path, tokens: int) -> Path:
    """DeepSeek V3.2's latents and index keys; a query attends to 256 tokens."""
    shape = _shape(tokens)
    dense = {"first_k_dense_replace": layers(tokens), "kv_lora_rank": 512, "index_topk": 256}
    mlp = {"intermediate_size": shape["hidden_size"] * 11 // 4}
    return build_model("deepseek_v32", folder, **shape, **mlp, **dense)


def _mixture(folder: Path, tokens: int) -> Path:
    shape = _shape(tokens)
    return build_model("qwen3_moe", folder, **shape, moe_intermediate_size=shape["hidden_size"])


def _hybrid(name: str, side: str) -> Callable[[Path, int], Path]:
    """Every second layer is of the kind ``side``."""

    def build(folder: Path, tokens: int) -> Path:
        shape = _shape(tokens)
        number, width = max(2, shape["num_hidden_layers"]), shape["hidden_size"]
        kinds = [side, "full_attention"] * (number // 2)
        shape |= {"num_hidden_layers": len(kinds), "intermediate_size": width * 11 // 4}
        return build_model(name, folder, **shape, layer_types=kinds)

    return build


def _drafted(folder: Path, tokens: int) -> Path:
    """A model that is little more than its first layer, which drafts."""
    return eagle(_llama(2)(folder, tokens), folder)[0]


def _eagle_arguments(model: Path) -> Sequence[str]:
    return drafting_arguments("EAGLE", model.with_name("eagle-0"))


_TWO_GROUPS = ("--enable-dp-attention", "--dp-size", "2")
MODELS = {
    "MHA": Model("hidden states", _llama(8), {"mode": "hidden"}),
    "GQA": Model("K and V", _llama(2)),
    "MLA": Model("latents", _latent),
    # In bfloat16 pages are encoded. Many a CPU computes several times as long in it.
    "MHA-bf16": Model(
        "hidden states", _llama(8, 512), {"mode": "hidden"}, dtype="bfloat16", codec="exp4"
    ),
    "GQA-bf16": Model("K and V", _llama(2, 512), dtype="bfloat16", codec="exp3"),
}
WITH_FLAGS = {
    "GQA-eagle": Model("K and V, a draft", _drafted, arguments=_eagle_arguments),
    "GQA-dp": Model("K and V, two groups", _mixture, arguments=lambda _: _TWO_GROUPS, tp=2),
    "windows": Model("K and V, windows", _hybrid("gpt_oss", "sliding_attention")),
    "states": Model(
        "K and V, states",
        _hybrid("qwen3_5", "linear_attention"),
        arguments=lambda _: ("--max-mamba-cache-size", "24"),
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32"},
    ),
    "DSA": Model(
        "latents, index keys",
        _sparse,
        codec="exp4",
        arguments=lambda _: ("--attention-backend", "dsa"),
    ),
}
"""Models of other kinds, or under flags of production, which are measured if they are named."""
