"""The shape of a model from its Hugging Face ``config.json``, for any author's field names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hcache_backend.config import ConfigError
from hcache_backend.plan.model_shape import INDEX_KEY_BYTES, Latent, ModelShape, Sides

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_OUTER = ("torch_dtype", "dtype", "model_type", "quantization_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "kv_n_heads", "n_head_kv", "multi_query_group_num",
    "num_attention_groups",
)  # fmt: skip
_HEAD_DIM = ("head_dim", "kv_channels")
_MLP_WIDTH = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_top_k", "moe_topk", "num_experts_per_token", "moe_k")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "share_expert_dim")
_LOOPS = ("loop_num", "num_loops")
_DENSE_FIRST = ("first_k_dense_replace", "moe_layer_start_index")
_DTYPES = {
    "float32": "float32", "float": "float32", "bfloat16": "bfloat16",
    "float16": "float16", "half": "float16", "auto": "float16",
}  # fmt: skip

# Families that omit the width of the MLP (4 D), and those without a gate in it.
_FOUR_WIDE = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt"}
_NOT_GATED = _FOUR_WIDE | {"gpt_neox", "nemotron", "opt", "persimmon", "phi", "starcoder2"}

# Layers with a state, instead of a KV cache that grows with every token.
_STATE_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "recurrent", "conv", "rwkv"))
_WINDOW_LAYERS = frozenset(("sliding_attention", "chunked_attention", "local_attention"))
_DSA_LAYERS = {"indexed_attention", "deepseek_sparse_attention"}
_FULL_LAYERS = frozenset(("full_attention", "attention", "global_attention", "full")) | _DSA_LAYERS
# Architectures whose windows SGLang keeps in a pool of their own. Windows of others take K and V of
# all tokens, as full attention does.
_WINDOW_POOLS = (
    "GptOss", "GraniteSWA", "GraniteMoeSWA", "IQuestQ1", "Laguna", "Mellum", "MiMoV2",
    "Llama4ForConditionalGeneration", "Step3p5", "Step3p7",
)  # fmt: skip
_STATE = (
    "layers with a recurrent state instead of KV; there is no partition for them, the server "
    "stores K and V of the full-attention layers, and states, in KV mode"
)
_UNPLANNED = dict.fromkeys((
    "hybrid_override_pattern", "layers_block_type", "attn_layer_period", "mamba_d_state",
    "linear_num_value_heads", "ssm_cfg", "linear_attn_config", "layer_group_size",
), _STATE) | {
    "block_configs": "layers with other heads or none (Nemotron-NAS), which are not planned",
    "compress_ratios": "layers that keep fewer tokens (DeepSeek-V4), which are not planned",
    "global_head_dim": "layers with other heads (Gemma 4), which are not planned",
}  # fmt: skip
_DELTA_NET = (  # without "linear_"
    "num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim",
)  # fmt: skip


class Model(NamedTuple):
    """A model; ``sides`` is what its layers beside the full-attention ones keep, ``dtype`` is
    ``bfloat16``, ``float16`` or ``float32``. ``weight_bytes`` on a GPU are about right."""

    shape: ModelShape
    sides: Sides | None
    dtype: str
    weight_bytes: int


def read_model(path: Path) -> Model:
    """The model of a ``config.json`` or a folder; raises ConfigError."""
    table, source = _read(path)
    fields = _Fields(table, source)
    sides = _sides(fields)
    shape = shape_from_config(table, source, states=sides is not None)
    return Model(shape, sides, _dtype(fields), _weight_bytes(fields, shape))


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Fields of a ``config.json`` (or of a folder's), and its name for messages."""
    file = path / "config.json" if path.is_dir() else path
    try:
        table = json.loads(file.read_text())
    except OSError as error:
        why = f"{error.strerror}; name a config.json or its folder"
        raise ConfigError(f"cannot read {file}: {why}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: must be a table of fields, not {table!r}")
    return table, str(file)


def shape_from_config(table: Mapping[str, Any], source: str, *, states: bool = False) -> ModelShape:
    """Shape by the fields of a ``config.json``. Raises a ConfigError with ``source`` for missing or
    wrong ones, or a model that is no decoder-only transformer. With ``states`` some layers may keep
    a window or state; otherwise such models are refused."""
    fields = _Fields(table, source)
    if not states:
        _require_kv_cache(fields)
    twice = 1 + fields.family.startswith("longcat_flash")  # two attentions in a layer
    loops = fields.integer("loops over the layers", _LOOPS, twice)
    hidden = fields.integer("hidden size", _HIDDEN)
    heads = fields.integer("number of attention heads", _HEADS)
    if latent := _latent(fields):
        key_dim = fields.integer("head size without RoPE", ("qk_nope_head_dim",))
        head_dim, kv_heads = key_dim + latent.rope_dim, heads
    else:
        head_dim, kv_heads = _head_dim(fields, hidden, heads), _kv_heads(fields, heads)
    value_dim = fields.integer("head size of V", ("v_head_dim",), None if latent else head_dim)
    return ModelShape(
        family=fields.family,
        layers=fields.integer("number of layers", _LAYERS) * loops,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        mlp_width=_mlp_width(fields, hidden),
        gated=fields.family not in _NOT_GATED,
        element_bytes=4 if _dtype(fields) == "float32" else 2,
        latent=latent,
        index_bytes=_index_bytes(fields, loops) if latent else 0,
        windowed=_windowed(fields),
    )


class _Fields:
    """Fields of the language model, with nested tables merged."""

    def __init__(self, table: Mapping[str, Any], source: str) -> None:
        """``source`` names the file in messages. Of fields in both tables the inner one counts."""
        merged: dict[str, Any] = dict(table)
        while nested := next((merged[k] for k in _NESTED if isinstance(merged.get(k), dict)), None):
            outer = {name: merged[name] for name in _OUTER if name in merged}
            merged = outer | {k: v for k, v in nested.items() if v is not None}
        for part in ("attn_config", "ffn_config"):  # DBRX, MPT
            if isinstance(merged.get(part), dict):
                merged = {**merged[part], **merged}
        self._table, self._source = merged, source
        self.architecture = str(next(iter(table.get("architectures") or ()), ""))
        self.family = str(merged.get("model_type") or "unknown")

    def value(self, name: str) -> Any:
        return self._table.get(name)

    def integer(self, what: str, names: tuple[str, ...], default: int | None = None) -> int:
        """The first field of ``names`` that is present, a positive integer; ``default`` if none is
        (None: raise a ConfigError that calls it ``what``)."""
        for name in (name for name in names if self.value(name) is not None):
            value = self.value(name)
            if isinstance(value, list) and value and value.count(value[0]) == len(value):
                value = value[0]  # of every layer (Hunyuan, Gemma 3n)
            if value == 0 and default is not None:
                continue  # "not used": DeepSeek-OCR's v_head_dim, experts of a dense model
            if type(value) is not int or value <= 0:
                raise self.wrong(name, "must be a positive integer")
            return value
        if default is not None:
            return default
        listed = " or ".join(repr(name) for name in names)
        raise self.error(f"no {what}: field {listed} is missing; take the weights' config.json")

    def wrong(self, name: str, right: str) -> ConfigError:
        return self.error(f"field {name!r} is {json.dumps(self.value(name))}; it {right}")

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self._source}: {message}")


def _require_kv_cache(fields: _Fields) -> None:
    """Raise a ConfigError for a model of which some layers do not keep K and V of all tokens."""
    if fields.value("is_encoder_decoder") is True:
        raise fields.wrong("is_encoder_decoder", "must be false: only decoder-only KV is restored")
    for name, meaning in _UNPLANNED.items():
        if fields.value(name) is not None:
            raise fields.error(f"field {name!r} means {meaning}")
    if state := sorted(_STATE_LAYERS & set(_layer_types(fields))):
        raise fields.error(f"field 'layer_types' has {', '.join(state)}: {_STATE}")


def _layer_types(fields: _Fields) -> list[str]:
    """Kinds of all layers by Hugging Face's names, none if they are not listed; checked."""
    if (value := fields.value("layer_types")) is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.wrong("layer_types", "must be a list with the kind of every layer")
    if unknown := sorted(set(value) - _STATE_LAYERS - _WINDOW_LAYERS - _FULL_LAYERS):
        raise fields.error(f"field 'layer_types' has {', '.join(unknown)}: its cache is not known")
    return value


def _sides(fields: _Fields) -> Sides | None:
    """Layers with a window or a recurrent state, and its bytes; None if there are none with a pool
    of their own, or their size is unknown."""
    count = fields.integer("number of layers", _LAYERS)
    kinds = _layer_types(fields)[:count]  # Step-3.5's list has its draft layers, too
    pattern = fields.value("hybrid_layer_pattern")
    interval = fields.value("full_attention_interval")
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if windowed else "full" for windowed in pattern]
    elif fields.family.startswith("llama4"):
        kinds = ["chunked_attention" if n % 4 else "full" for n in range(1, count + 1)]
    elif not kinds and interval:
        kinds = ["linear_attention" if n % interval else "full" for n in range(1, count + 1)]
    windows = sum(kind in _WINDOW_LAYERS for kind in kinds)
    states = sum(kind in _STATE_LAYERS for kind in kinds)
    if fields.value("linear_num_value_heads") and states:
        key_heads, key, value_heads, value, width = (
            fields.integer(name, (f"linear_{name}",)) for name in _DELTA_NET
        )
        # Bytes of a layer: the last inputs of the convolution, 16 bits each, and a float32 matrix.
        inputs = (2 * key_heads * key + value_heads * value) * (width - 1) * 2
        return Sides("state", states, states * (4 * value_heads * key * value + inputs))
    if windows == 0 or states or not fields.architecture.startswith(_WINDOW_POOLS):
        return None
    heads = fields.integer("number of attention heads", _HEADS)
    head_dim = _head_dim(fields, fields.integer("hidden size", _HIDDEN), heads)
    kv_heads = fields.integer("KV heads", ("swa_num_key_value_heads",), _kv_heads(fields, heads))
    key = fields.integer("head size", ("swa_head_dim",), head_dim)
    value = fields.integer("head size of V", ("swa_v_head_dim",), key)
    tokens = fields.integer("tokens of a window", ("sliding_window", "attention_chunk_size"))
    element = 4 if _dtype(fields) == "float32" else 2
    return Sides("window", windows, windows * tokens * kv_heads * (key + value) * element)


def _windowed(fields: _Fields) -> bool:
    """True if some layers attend to the last tokens only."""
    if kinds := _layer_types(fields):
        return bool(_WINDOW_LAYERS & set(kinds))
    used = fields.value("use_sliding_window") is not False
    return used and fields.value("sliding_window") is not None


def _latent(fields: _Fields) -> Latent | None:
    """The widths of MLA's latent; None: the model has K and V."""
    if fields.value("kv_lora_rank") is None or fields.value("use_mla") is False:
        return None
    rank = fields.integer("width of the latent", ("kv_lora_rank",))
    rope_dim = fields.integer("head size of RoPE", ("qk_rope_head_dim",))
    query_rank = fields.integer("width of the query latent", ("q_lora_rank",), 0)
    return Latent(rank=rank, rope_dim=rope_dim, query_rank=query_rank or None)


def _index_bytes(fields: _Fields, loops: int) -> int:
    """Bytes of a token's index keys in all layers; 0 without an indexer. A layer has none if it
    attends to the tokens that a layer before it chose (``shared``)."""
    if fields.value("index_topk") is None:
        return 0
    layers = range(loops * fields.integer("number of layers", _LAYERS))
    period = fields.integer("layers that share", ("cli_factor", "index_topk_freq"), 1)
    least = 2 if fields.value("cli_factor") is None else 1
    first = fields.integer("first layers", ("index_skip_topk_offset",), least)
    shared = [max(layer - first + 1, 0) % period > 0 for layer in layers]
    kinds = fields.value("indexer_types") or fields.value("index_topk_pattern")
    if isinstance(kinds, (list, str)):
        shared = [kind in ("shared", "S") for kind in kinds[: len(layers)]]
    return (len(layers) - sum(shared)) * INDEX_KEY_BYTES


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    if head_dim := fields.integer("head size", _HEAD_DIM, 0):
        return head_dim
    if hidden % heads:
        wide = f"hidden size {hidden} is no multiple of {heads} heads"
        raise fields.error(f"{wide}; 'head_dim' must say how wide a head is")
    return hidden // heads


def _kv_heads(fields: _Fields, heads: int) -> int:
    if fields.value("multi_query") is True and not fields.value("new_decoder_architecture"):
        kv_heads = 1  # Falcon-7B, GPT-BigCode: whatever num_kv_heads says
    else:
        kv_heads = fields.integer("number of KV heads", _KV_HEADS, heads)
    if heads % kv_heads:
        names = "'num_key_value_heads' must divide 'num_attention_heads'"
        raise fields.error(f"{names}: {heads} is no multiple of {kv_heads}")
    return kv_heads


def _dtype(fields: _Fields) -> str:
    """Name of the type in which the model is served; float16 if the config has none."""
    name = next((n for n in ("torch_dtype", "dtype") if fields.value(n) is not None), None)
    if name is None:
        return "float16"
    if (dtype := _DTYPES.get(str(fields.value(name)).removeprefix("torch."))) is None:
        raise fields.wrong(name, f"must be one of {', '.join(_DTYPES)}")
    return dtype


def _weight_bytes(fields: _Fields, shape: ModelShape) -> int:
    """Bytes of all weights on a GPU: 16 bits a value, and fewer in layers if they are quantised.
    Configs of quantisation methods name the bits, or the format."""
    method = json.dumps(fields.value("quantization_config")).lower()
    named = (n for n in (4, 8) if re.search(rf'bits": {n}\b|fp{n}|in_{n}bit": true', method))
    mlp_width = _mlp_width(fields, shape.hidden, all_experts=True)
    full = shape.model_copy(update={"mlp_width": mlp_width})
    layers = shape.layers // fields.integer("loops over the layers", _LOOPS, 1)
    words = fields.integer("number of words", ("vocab_size",), 0)
    embeddings = words * shape.hidden * (1 + (fields.value("tie_word_embeddings") is False))
    values = layers * full.dense_flops // 2
    return values * next(named, 16) // 8 + 2 * embeddings


def _mlp_width(fields: _Fields, hidden: int, *, all_experts: bool = False) -> int:
    """Inner width that a token passes, averaged over the layers; or that of ``all_experts``."""
    default = 4 * hidden if fields.family in _FOUR_WIDE else None
    experts = fields.integer("number of experts", _EXPERTS, 1)
    if experts == 1:
        width = fields.integer("width of the MLP", _MLP_WIDTH, default)
        return width // 2 if fields.family == "qwen" else width  # Qwen-1 counts gate and up as one
    expert = fields.integer("width of an expert", (*_EXPERT_WIDTH, *_MLP_WIDTH))
    dense = fields.integer("width of the MLP", ("intermediate_size_mlp", *_MLP_WIDTH), expert)
    used = experts if all_experts else fields.integer("number of active experts", _ACTIVE)
    sparse = expert * used
    if fields.family.startswith("longcat_flash"):  # experts beside every other dense MLP
        return dense + sparse // 2
    if shared := fields.integer("width of the shared expert", _SHARED_WIDTH, 0):
        sparse += shared
    else:  # the one of Llama 4 is not in its config
        llama4 = int(fields.family.startswith("llama4"))
        sparse += expert * fields.integer("number of shared experts", _SHARED, llama4)
    layers = fields.integer("number of layers", _LAYERS)
    sparse_layers = sum(_is_sparse(fields, layer) for layer in range(layers))
    return round((sparse * sparse_layers + dense * (layers - sparse_layers)) / layers)


def _is_sparse(fields: _Fields, layer: int) -> bool:
    """True if a layer has experts in the place of one dense MLP."""
    if layer < max(fields.integer("dense layers", (name,), 0) for name in _DENSE_FIRST):
        return False
    if layer in (fields.value("mlp_only_layers") or ()):
        return False
    if isinstance(listed := fields.value("moe_layers_enum"), str):  # Step3: "4,5,6"
        return str(layer) in listed.split(",")
    step = fields.integer("step", ("decoder_sparse_step", "interleave_moe_layer_step"), 1)
    return (layer + 1) % step == 0
