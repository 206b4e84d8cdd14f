"""Tiny random models, built on the spot with transformers: no downloads, a second each.

Weights are drawn with a large `initializer_range`, so that attention is peaked and the output
really depends on the KV cache: a wrong row changes the tokens.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

VOCAB = 1024
MAX_POSITIONS = 16384
LAYERS = 4
HIDDEN = 256
HEADS = 4
BUILDER_VERSION = 1  # part of the cache key: raise it when a builder's code changes its output

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_DECODER = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
_SLIDING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_DELTA_NET: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_POSITIONS // 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


_DSA: dict[str, Any] = {
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,  # of index keys, too
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
}


def _gated(kv_heads: int, **extra: Any) -> dict[str, Any]:
    return {**_DECODER, "intermediate_size": 512, "num_key_value_heads": kv_heads, **extra}


@dataclass(frozen=True)
class Architecture:
    """How to build a model; comments below say the purpose of each architecture."""

    model_type: str
    config: dict[str, Any]
    added_to_json: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that SGLang reads and transformers 5 does not write."""
    norm_means: dict[str, float] = field(default_factory=dict)
    """Part of a norm's name -> mean of its weights, if it is not 1."""
    tensors: str = ""
    """transformers has no such model: a name in `TENSORS`."""


def _mla(
    model_type: str, scoring: tuple[str, str] = ("noaux_tc", "sigmoid"), **extra: Any
) -> Architecture:
    """DeepSeek's attention and experts; how its router chooses and scores these."""
    shape = {
        "q_lora_rank": 128,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    method, function = scoring
    return Architecture(
        model_type,
        _gated(HEADS, **shape | extra),
        added_to_json={"moe_layer_freq": 1, "topk_method": method, "scoring_func": function},
    )


ARCHITECTURES: dict[str, Architecture] = {
    # MHA, the case HCache is for.
    "llama": Architecture("llama", _gated(HEADS)),
    # GQA with a bias on q, k and v.
    "qwen2": Architecture("qwen2", _gated(2)),
    # GQA with a norm on each head of q and k.
    "qwen3": Architecture("qwen3", _gated(2, head_dim=64)),
    # MHA with a norm over all heads of q and k together; post-norm residuals. (Unscaled, q and k
    # of unit size average over the whole history, and one token repeats.)
    "olmo2": Architecture("olmo2", _gated(HEADS), norm_means={"q_norm": 4.0}),
    # MHA with biases, learned positions and an attention module without a positions argument.
    "opt": Architecture(
        "opt", {**_DECODER, "ffn_dim": 512, "word_embed_proj_dim": HIDDEN, "init_std": 0.12}
    ),
    # MHA whose projection is called `c_attn`; learned positions.
    "gpt2": Architecture(
        "gpt2",
        {
            **_COMMON,
            "tie_word_embeddings": True,  # SGLang's GPT-2 always uses the embedding as its head
            "n_embd": HIDDEN,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": MAX_POSITIONS,
            "n_inner": 512,
        },
    ),
}

# Checked against the reference in `make test-long` only.
MORE_ARCHITECTURES: dict[str, Architecture] = {
    # The checkpoint already has q, k and v in one projection.
    "phi3": Architecture("phi3", _gated(HEADS, original_max_position_embeddings=MAX_POSITIONS)),
    # RoPE is another for all tokens of a batch when one of them stands beyond 4096.
    "phi3_longrope": Architecture(
        "phi3",
        _gated(
            HEADS,
            original_max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 32,
                "long_factor": [1.0 + i / 16 for i in range(32)],
                "original_max_position_embeddings": 4096,
            },
        ),
    ),
    # RoPE on a quarter of each head; LayerNorm.
    "stablelm": Architecture("stablelm", _gated(HEADS)),
    # MQA: hidden states are larger than KV. Norm weights are offsets from one.
    "gemma": Architecture(
        "gemma",
        _gated(1, head_dim=64, tie_word_embeddings=True),
        added_to_json={"hidden_act": "gelu_pytorch_tanh"},
    ),
    # A RoPE for local and one for global layers; k-norm; norms after attention and MLP too.
    "gemma3": Architecture(
        "gemma3_text",
        _gated(
            2, head_dim=64, query_pre_attn_scalar=64, tie_word_embeddings=True, layer_types=_SLIDING
        ),
        norm_means={"post_": 6.0},  # otherwise the last token's embedding outweighs all layers
    ),
    # Mixture of experts behind GQA, and behind MHA with k-norm.
    "mixtral": Architecture("mixtral", _gated(2, num_local_experts=4)),
    "olmoe": Architecture("olmoe", _gated(HEADS, num_experts=4, num_experts_per_tok=2)),
    # Mixture of experts with a shared one that is always on.
    "qwen2_moe": Architecture(
        "qwen2_moe", _gated(2, **_EXPERTS, shared_expert_intermediate_size=256)
    ),
    # The same without a shared one, and with norms of queries and keys.
    "qwen3_moe": Architecture("qwen3_moe", _gated(2, head_dim=64, **_EXPERTS, norm_topk_prob=True)),
    # The first layer is dense, an expert is shared, the router has a bias; RoPE on half a head.
    "glm4_moe": Architecture(
        "glm4_moe",
        _gated(
            2,
            head_dim=64,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            use_qk_norm=True,
            partial_rotary_factor=0.5,
        ),
    ),
    # A norm over all heads of q and k, summed up by a kernel of its own.
    "minimax_m2": Architecture(
        "minimax_m2",
        {
            **_gated(2, head_dim=64, num_local_experts=4, num_experts_per_tok=2),
            "intermediate_size": 128,
        },
        added_to_json={
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "attn_type_list": [1] * LAYERS,
            "rotary_dim": 64,
            "rope_theta": 10000.0,
        },
        norm_means={"q_norm": 4.0},
    ),
    # The output of the projection is cut at a bound: more than a product, norm and RoPE.
    "olmo": Architecture("olmo", _gated(HEADS, clip_qkv=4.0)),
    # A pool of its own for layers with a sliding window.
    "mellum": Architecture(
        "mellum", _gated(2, head_dim=64, **_EXPERTS, sliding_window=128, layer_types=_SLIDING)
    ),
    # The same with sinks, and experts with biases.
    "gpt_oss": Architecture(
        "gpt_oss",
        {
            **_gated(2, head_dim=64, num_local_experts=4, num_experts_per_tok=2),
            "intermediate_size": 128,
            "sliding_window": 128,
            "layer_types": _SLIDING,
        },
        added_to_json={"swiglu_limit": 7.0},
    ),
    # Every second layer keeps a state (gated delta net) instead of K and V.
    "qwen3_next": Architecture(
        "qwen3_next",
        _gated(
            2,
            head_dim=64,
            **_EXPERTS,
            **_DELTA_NET,
            shared_expert_intermediate_size=128,
            decoder_sparse_step=1,
            layer_types=_LINEAR,
        ),
        added_to_json={"full_attention_interval": 2},
    ),
    # The same, but dense, with projections for queries, keys, values and gates in one.
    "qwen3_5": Architecture(
        "qwen3_5_text",
        _gated(2, head_dim=64, **_DELTA_NET, layer_types=_LINEAR),
        added_to_json={"full_attention_interval": 2},
    ),
    # Every second layer keeps the last inputs of a convolution.
    "lfm2": Architecture(
        "lfm2", _gated(2, layer_types=["conv", "full_attention"] * (LAYERS // 2), conv_L_cache=3)
    ),
    # Layers with a window have more heads of K and V than the others, and sinks. Keys are wider
    # than values. (transformers does not have this model: SGLang goes by the architecture's name.)
    "mimo_v2": Architecture(
        "llama",
        _gated(2, head_dim=96),
        added_to_json={
            "architectures": ["MiMoV2FlashForCausalLM"],
            "v_head_dim": 64,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": HEADS,
            "swa_head_dim": 96,
            "swa_v_head_dim": 64,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": 0.707,
            "partial_rotary_factor": 1 / 3,
            "swa_rope_theta": 10000.0,
            "layernorm_epsilon": 1e-5,
            "moe_layer_freq": [0, *[1] * (LAYERS - 1)],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "n_shared_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0,
        },
        tensors="mimo_v2",
    ),
    # GLM-4.7-Flash: MLA.
    "glm4_moe_lite": _mla("glm4_moe_lite", n_shared_experts=1),
    # MLA: one compressed vector a token instead of K and V, so there is nothing to project.
    "deepseek": _mla("deepseek_v3", rope_parameters=_YARN),
    # MLA with queries that are not compressed, and a router without groups.
    "deepseek_v2": _mla(
        "deepseek_v2",
        scoring=("greedy", "softmax"),
        q_lora_rank=None,
        n_shared_experts=1,
        n_group=1,
        topk_method="greedy",
        rope_parameters=_YARN,
    ),
    # The same with an indexer, which chooses the tokens that a query attends to (DSA).
    "deepseek_v32": _mla("deepseek_v32", **_DSA, n_shared_experts=1, rope_parameters=_YARN),
    # GLM-5: every second layer attends to what the indexer of the layer before it chose.
    "glm_5": _mla(
        "glm_moe_dsa",
        **_DSA,
        n_shared_experts=1,
        n_group=1,
        indexer_types=["full", "shared"] * (LAYERS // 2),
        indexer_rope_interleave=True,
        rms_norm_eps=1e-6,  # transformers has it in norms of latents, whatever the model's is
    ),
}


def build_model(name: str, cache_dir: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Folder of the float32 model `name`, built into `cache_dir` unless it is there already.

    `overrides` change configuration values (`num_hidden_layers=8`). Another `seed` gives other
    weights in another folder; `replace_weights` puts them under a name that is already served.
    """
    known = ARCHITECTURES | MORE_ARCHITECTURES
    built = replace(known[name], config=known[name].config | overrides)
    content = json.dumps([BUILDER_VERSION, asdict(built), seed], sort_keys=True)
    folder = cache_dir / f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"
    if not folder.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache_dir))
        _save_random(built, seed, scratch)
        publish(scratch, folder)
    return folder


def narrowed(hidden: int, tokens: int) -> int:
    """The hidden size of a model for such a history: a quarter if attention to a long one would
    take most of a minute."""
    return hidden if tokens <= 8192 else hidden // 4


@dataclass(frozen=True)
class TinyLlama:
    """Shape of a Llama with random float32 weights.

    As many KV heads as heads means multi-head attention (MHA): hidden states are half the
    size of KV.
    """

    layers: int = LAYERS
    hidden: int = HIDDEN
    heads: int = HEADS
    kv_heads: int = HEADS
    intermediate: int = 512
    vocabulary: int = VOCAB
    positions: int = MAX_POSITIONS

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers, in float32."""
        return 2 * 4 * self.layers * self.kv_heads * (self.hidden // self.heads)

    def describe(self) -> dict[str, object]:
        return {"architecture": "llama", "dtype": "float32", "weights": "random", **asdict(self)}

    def build(self, folder: Path) -> Path:
        """Folder of the model below ``folder``, built unless it is there already."""
        return build_model(
            "llama",
            folder,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.positions,
        )


@dataclass(frozen=True)
class TinyLatent:
    """Shape of a DeepSeek with random float32 weights and without experts. Its attention is MLA:
    a token's latent has ``latent`` values, and 64 with RoPE."""

    layers: int
    hidden: int
    intermediate: int
    latent: int = 512
    positions: int = MAX_POSITIONS

    def describe(self) -> dict[str, object]:
        return {"architecture": "deepseek", "dtype": "float32", "weights": "random", **asdict(self)}

    def build(self, folder: Path) -> Path:
        """As :meth:`TinyLlama.build`."""
        return build_model(
            "deepseek",
            folder,
            num_hidden_layers=self.layers,
            first_k_dense_replace=self.layers,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            kv_lora_rank=self.latent,
            qk_rope_head_dim=64,
            max_position_embeddings=self.positions,
        )


def replace_weights(model: Path, other: Path) -> None:
    """Give the folder `model` the weights of `other` (same architecture, another seed)."""
    for weights in other.glob("*.safetensors"):
        fresh = model / f"{weights.name}.new"
        shutil.copyfile(weights, fresh)
        fresh.replace(model / weights.name)


def with_changed_layers(
    model: Path,
    folder: Path,
    layers: Sequence[int],
    modules: Sequence[str] = ("",),
    factor: float = 1.3,
) -> Path:
    """A copy of the Llama-like `model` in `folder` with other weights in some of its layers: those
    of ``modules`` (such as ``self_attn.v_proj``; all of them, without names) times ``factor``."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    changed = tuple(f"model.layers.{layer}.{module}" for layer in layers for module in modules)
    for name in weights:
        if name.startswith(changed):
            weights[name] *= factor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def publish(scratch: Path, folder: Path) -> None:
    """Move a finished folder to its name; another process that was faster has made the same one."""
    try:
        scratch.rename(folder)
    except OSError:
        shutil.rmtree(scratch)


def _save_random(built: Architecture, seed: int, folder: Path) -> None:
    import torch

    stub_torchvision()
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(built.model_type, **built.config)
        if built.tensors:
            config.save_pretrained(folder)
            _save_tensors(TENSORS[built.tensors](built.config | built.added_to_json), folder)
        else:
            model = AutoModelForCausalLM.from_config(config)
            _randomise_norms_and_biases(model, built.norm_means)
            model.float().save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | built.added_to_json, indent=2))


def _randomise_norms_and_biases(model: Any, means: Mapping[str, float]) -> None:
    """Fresh models have unit norms and zero biases: a projection that skips them would pass."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() != 1:
                continue
            mean = next((mean for part, mean in means.items() if part in name), 1.0)
            parameter.normal_(0.0 if name.endswith("bias") else mean, 0.1)


def _mimo_v2_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint of MiMo-V2, by name."""
    hidden: int = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, windowed in enumerate(config["hybrid_layer_pattern"]):
        swa, of = "swa_" if windowed else "", f"model.layers.{layer}."
        heads, kv_heads = config[f"{swa}num_attention_heads"], config[f"{swa}num_key_value_heads"]
        key, value = config[f"{swa}head_dim"], config[f"{swa}v_head_dim"]
        rows = {"q": heads * key, "k": kv_heads * key, "v": kv_heads * value}
        shapes |= {f"{of}self_attn.{name}_proj.weight": (n, hidden) for name, n in rows.items()}
        shapes[f"{of}self_attn.o_proj.weight"] = hidden, heads * value
        if windowed:
            shapes[f"{of}self_attn.attention_sink_bias"] = (heads,)
        experts = config["n_routed_experts"] if config["moe_layer_freq"][layer] else 0
        names = [f"experts.{number}." for number in range(experts)] or [""]
        inner = config["moe_intermediate_size" if experts else "intermediate_size"]
        for name in names:
            for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden))):
                shapes[f"{of}mlp.{name}{part}_proj.weight"] = shape
            shapes[f"{of}mlp.{name}down_proj.weight"] = hidden, inner
        if experts:
            shapes[f"{of}mlp.gate.weight"] = experts, hidden
            shapes[f"{of}mlp.gate.e_score_correction_bias"] = (experts,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{of}{norm}.weight"] = (hidden,)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = config["vocab_size"], hidden
    return shapes | {"model.norm.weight": (hidden,)}


TENSORS = {"mimo_v2": _mimo_v2_tensors}


def _save_tensors(shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights = {
        name: torch.randn(shape) * (_COMMON["initializer_range"] if len(shape) > 1 else 0.1)
        + (len(shape) == 1 and not name.endswith("bias"))
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


VOCABULARY = 1000  # random tokens are below it, in every model
SMALL = TinyLlama(layers=4, hidden=512, heads=4, kv_heads=4, intermediate=1408)
