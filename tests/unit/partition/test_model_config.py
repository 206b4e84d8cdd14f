"""Shapes from config.json files of many families, and what is said about wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from hcache_backend.config import ConfigError
from hcache_backend.plan.model_config import read_model, shape_from_config
from hcache_backend.plan.model_shape import Sides
from tests.unit.partition.pipelines import CONFIGS, public_model, public_models

LLAMA = json.loads((CONFIGS / "llama-2-7b.json").read_text())
DEEPSEEK = json.loads((CONFIGS / "deepseek-v3.json").read_text())


@pytest.mark.parametrize(
    ("name", "attention", "layers", "hidden_bytes", "kv_bytes", "billions"),
    [
        # Billions of weights that work on a token, without embeddings: those the authors count.
        ("llama-2-7b", "MHA", 32, 8192, 16384, 6.738 - 2 * 0.131),
        ("opt-30b", "MHA", 48, 14336, 28672, 29.975 - 0.360 - 0.015),
        (
            "opt-350m",
            "MHA",
            24,
            2048,
            4096,
            None,
        ),  # layers see hidden_size, not word_embed_proj_dim
        ("gpt2", "MHA", 12, 1536, 3072, 0.085),
        ("qwen3-8b", "GQA", 36, 8192, 4096, 6.95),
        ("mixtral-8x7b", "GQA", 32, 8192, 4096, 12.88 - 2 * 0.131),
        ("qwen1.5-moe", "MHA", 24, 4096, 8192, 2.69 - 2 * 0.311),
        ("gemma-3-12b", "GQA", 48, 7680, 8192, None),
        ("falcon-7b", "MQA", 32, 9088, 256, 6.922 - 0.295),
        ("deepseek-v3", "MLA", 61, 14336, 1152, 37 - 0.927),
        ("deepseek-v3.2", "DSA", 61, 14336, 1152, 37 - 0.927),  # without the indexer's
        ("glm-5", "DSA", 78, 12288, 1152, None),
    ],
)
def test_bytes_and_flops_are_those_of_the_public_model(
    name: str,
    attention: str,
    layers: int,
    hidden_bytes: int,
    kv_bytes: int,
    billions: float | None,
) -> None:
    shape = public_model(name)
    assert shape.attention == attention
    assert (shape.layers, shape.hidden_bytes, shape.kv_bytes) == (layers, hidden_bytes, kv_bytes)
    if billions is not None:
        assert shape.layers * shape.dense_flops == pytest.approx(2e9 * billions, rel=0.02)


MODELS = public_models()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_as_large_as_sglang_says_or_the_field_is_named(
    name: str, tmp_path: Path
) -> None:
    """tests/contract/test_shapes.py asks SGLang whether it still says so."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    if (field := MODELS[name].get("refused")) is not None:
        with pytest.raises(ConfigError, match=f"field '{field}' "):
            read_model(tmp_path)
        return
    shape, sides, *_ = read_model(tmp_path)
    layers = shape.layers - (sides.layers if sides else 0)
    assert MODELS[name]["sglang"] == {
        "layers": layers,
        "beside": [sides.kind, sides.layers] if sides else None,
        "heads": shape.heads,
        "kv_heads": None if shape.latent else shape.kv_heads,
        "head_dim": None if shape.latent else shape.head_dim,
        "bytes": layers * shape.kv_bytes,
    }


def test_models_that_are_refused_are_few() -> None:
    assert len(MODELS) >= 60
    assert sum("refused" in model for model in MODELS.values()) <= 8


@pytest.mark.parametrize(
    ("name", "width"),
    [
        ("Step3", (56 * (3 * 5120 + 5120) + 5 * 18432) / 61),
        ("LongCat-Flash", 12288 + 12 * 2048 / 2),
        ("ERNIE-4.5-21B-A3B", (27 * (6 + 2) * 1536 + 12288) / 28),
        ("Hunyuan-A13B", (8 + 1) * 3072),
        ("Ling-lite-1.5", (6 + 2) * 1408),
        ("DeepSeek-OCR", (11 * (6 + 2) * 896 + 6848) / 12),
        ("gpt-oss-120b", 4 * 2880),
    ],
)
def test_active_experts_are_counted(name: str, width: float) -> None:
    assert shape_from_config(MODELS[name]["config"], name).mlp_width == round(width)


def test_a_nested_text_model_takes_the_outer_dtype() -> None:
    text = {k: v for k, v in LLAMA.items() if k != "torch_dtype"}
    outer = {"model_type": "llava", "text_config": text, "dtype": "float32", "hidden_size": 7}
    shape = shape_from_config(outer, "a test")
    assert (shape.family, shape.hidden, shape.element_bytes) == ("llama", 4096, 4)
    deep = {"thinker_config": {"text_config": text}, "model_type": "qwen2_5_omni"}
    assert shape_from_config(deep, "a test").hidden == 4096


def test_experts_and_dense_layers_are_averaged() -> None:
    shape = shape_from_config(DEEPSEEK, "a test")
    assert shape.mlp_width == 9 * 2048  # the dense layers are as wide, on purpose
    wider = {**DEEPSEEK, "intermediate_size": 61 * 9 * 2048}
    expected = (58 * 9 * 2048 + 3 * 61 * 9 * 2048) / 61
    assert shape_from_config(wider, "a test").mlp_width == round(expected)
    every_other = {
        **LLAMA,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1000,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    expected = (15 * 2000 + 17 * 11008) / 32
    assert shape_from_config(every_other, "a test").mlp_width == round(expected)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, False),
        ({"layer_types": ["sliding_attention", "full_attention"] * 16}, True),
    ],
)
def test_sliding_windows_are_noticed(changes: dict[str, Any], windowed: bool) -> None:
    assert shape_from_config({**LLAMA, **changes}, "a test").windowed is windowed


DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
POOL = {"architectures": ["GptOssForCausalLM"], "sliding_window": 100}
STATE = 4 * 4 * 32 * 64 + 2 * 3 * (2 * 2 * 32 + 4 * 64)  # bytes of a layer
WINDOW = 100 * 32 * 256 * 2


@pytest.mark.parametrize(
    ("changes", "sides"),
    [
        ({}, None),
        (DELTA_NET | {"full_attention_interval": 4}, Sides("state", 24, 24 * STATE)),
        (
            DELTA_NET | {"layer_types": ["linear_attention", "full_attention"] * 16},
            Sides("state", 16, 16 * STATE),
        ),
        (
            POOL | {"layer_types": ["sliding_attention"] * 2 + ["full"] * 30},
            Sides("window", 2, 2 * WINDOW),
        ),
        (
            POOL
            | {"hybrid_layer_pattern": [0, 1] * 16}
            | {"swa_num_key_value_heads": 8, "swa_head_dim": 96, "swa_v_head_dim": 64},
            Sides("window", 16, 16 * 100 * 8 * 160 * 2),
        ),
        ({"sliding_window": 100, "layer_types": ["sliding_attention", "full"] * 16}, None),
        (POOL | {"layer_types": ["full_attention"] * 32}, None),
    ],
)
def test_windows_and_states_beside_the_pages(
    changes: dict[str, Any], sides: Sides | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    shape, found, *_ = read_model(tmp_path)  # of a model's folder
    assert (shape.layers, found) == (32, sides)


@pytest.mark.parametrize("changes", [{"layer_types": ["mamba"] * 32}, {"mamba_d_state": 16}])
def test_states_of_unknown_size_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ConfigError, match="recurrent state"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (LLAMA, {"hidden_size": "4096"}, ("hidden_size", '"4096"', "positive integer")),
        (LLAMA, {"hidden_size": 4096.0}, ("hidden_size", "4096.0", "positive integer")),
        (LLAMA, {"hidden_size": None}, ("hidden_size", "n_embd", "missing")),
        (LLAMA, {"num_hidden_layers": 0}, ("num_hidden_layers", "0", "positive integer")),
        (LLAMA, {"num_hidden_layers": True}, ("num_hidden_layers", "true", "positive integer")),
        (LLAMA, {"num_attention_heads": 33}, ("4096", "33", "head_dim")),
        (LLAMA, {"num_key_value_heads": 12}, ("32", "12", "num_key_value_heads")),
        (LLAMA, {"num_key_value_heads": [8, 4]}, ("num_key_value_heads", "[8, 4]", "positive")),
        (LLAMA, {"num_key_value_heads": []}, ("num_key_value_heads", "[]", "positive integer")),
        (LLAMA, {"intermediate_size": None}, ("intermediate_size", "missing")),
        (LLAMA, {"torch_dtype": "int3"}, ("torch_dtype", "int3", "bfloat16")),
        (LLAMA, {"num_local_experts": 8}, ("active experts", "num_experts_per_tok", "missing")),
        (LLAMA, {"layer_types": "full"}, ("layer_types", "full", "list")),
        (LLAMA, {"layer_types": ["mamba", "full_attention"]}, ("mamba", "KV mode")),
        (LLAMA, {"mamba_d_state": 16}, ("mamba_d_state", "KV mode")),
        (LLAMA, {"is_encoder_decoder": True}, ("is_encoder_decoder", "true", "decoder-only")),
        (LLAMA, {"layer_types": ["jet", "full_attention"]}, ("layer_types", "jet", "not known")),
        (LLAMA, {"compress_ratios": [4]}, ("compress_ratios", "DeepSeek-V4", "are not planned")),
        (LLAMA, {"global_head_dim": 512}, ("global_head_dim", "Gemma 4", "are not planned")),
        (DEEPSEEK, {"q_lora_rank": -1}, ("q_lora_rank", "-1", "positive integer")),
        (DEEPSEEK, {"qk_nope_head_dim": None}, ("qk_nope_head_dim", "missing")),
        (DEEPSEEK, {"v_head_dim": 1.5}, ("v_head_dim", "1.5", "positive integer")),
    ],
)
def test_wrong_fields_are_named(
    base: dict[str, Any], changes: dict[str, Any], said: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_config({**base, **changes}, "that/config.json")
    for words in ("that/config.json", *said):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"), [("{", "not JSON"), ("[1]", "table of fields"), (b"\xff\xfe\x00", "not JSON")]
)
def test_files_that_are_no_config(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        read_model(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_model(tmp_path / "meta-llama" / "Llama-2-7b-hf")


def test_encoded_hidden_states_are_compared_with_encoded_k_and_v() -> None:
    """Codecs round: an eighth of a percent does not make hidden states the smaller ones."""
    shape = public_model("llama-3-8b").model_copy(update={"kv_heads": 16})
    assert shape.hidden_bytes == shape.kv_bytes == 8192
    encoded = {"hidden_row_bytes": 6264, "kv_row_bytes": 6272}
    assert not shape.model_copy(update=encoded).hidden_is_smaller
    assert shape.model_copy(update={"kv_row_bytes": 6272}).kv_bytes == 6272
    assert not shape.hidden_is_smaller
    halved = shape.model_copy(update=encoded | {"kv_row_bytes": 2 * 6272})
    assert halved.hidden_is_smaller


# Billions of weights that the authors count, with two embeddings of 32,000 words at most.
WEIGHTS = {
    "Llama-2-7B": 6.7,
    "Llama-2-70B": 69,
    "Llama-4-Scout": 107,
    "Mixtral-8x7B": 46.7,
    "Qwen2-57B-A14B": 56.5,
    "Qwen3-235B-A22B": 234,
    "DeepSeek-V3": 671,
    "Kimi-K2": 1026,
    "LongCat-Flash": 560,
    "gpt-oss-120b": 116,
    "GLM-4.5": 353,
    "IQuest-Loop-Coder": 39,
}


def weights(config: dict[str, Any], folder: Path) -> int:
    (folder / "config.json").write_text(json.dumps(config))
    return read_model(folder).weight_bytes


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_about_those_that_the_authors_count(name: str, tmp_path: Path) -> None:
    found = weights(MODELS[name]["config"], tmp_path)
    assert found == pytest.approx(2e9 * WEIGHTS[name], rel=0.04)


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, 4),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, 4),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        ({"quant_method": "unknown"}, 16),
    ],
)
def test_quantised_weights_are_smaller_and_embeddings_are_not(
    how: dict[str, Any] | None, bits: int, tmp_path: Path
) -> None:
    values = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    for changes, tables in (({}, 1), ({"tie_word_embeddings": False}, 2)):
        config = LLAMA | {"vocab_size": 32000, "quantization_config": how} | changes
        found = weights(config, tmp_path)
        assert found == values * bits // 8 + tables * 32000 * 4096 * 2
        # The language model of one with images says it outside.
        outer = {"text_config": config | {"quantization_config": None}, "quantization_config": how}
        assert weights(outer, tmp_path) == found
    assert weights(config | {"torch_dtype": "float32"}, tmp_path) == found
