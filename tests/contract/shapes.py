"""What SGLang makes of models' config.json files: heads, layers, and bytes of K and V.

    python -m tests.contract.shapes < CONFIGS > NUMBERS

CONFIGS and NUMBERS are tables in JSON, by the names of models. It runs in the environment of the
CPU engine, with the SGLang that is imported there. ``python -m tests.contract.shapes --record``
writes the numbers into ``tests/unit/partition/public_models.json``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hcache_cpu_engine import stub_torchvision

from tests.contract.versions import ROOT

stub_torchvision()

from sglang.srt.configs import model_config  # noqa: E402
from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402

RECORDED = ROOT / "tests" / "unit" / "partition" / "public_models.json"


def loaded(table: Mapping[str, Any]) -> Any:
    """SGLang's ModelConfig. Fields alone are read if the model brings its own class for them."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(table))
        own = model_config.get_config
        try:
            return model_config.ModelConfig(folder)
        except Exception:  # of several libraries
            fields = PretrainedConfig.from_dict(dict(table))
            if "block_configs" in table:  # Nemotron-NAS makes objects of them
                blocks = json.dumps(table["block_configs"])
                fields.block_configs = json.loads(
                    blocks, object_hook=lambda d: SimpleNamespace(**d)
                )
            model_config.get_config = lambda *_, **__: fields
            return model_config.ModelConfig(folder)
        finally:
            model_config.get_config = own


def numbers(table: Mapping[str, Any]) -> dict[str, Any]:
    """``layers`` keep K and V of all tokens, those ``beside`` them a window or a state; ``bytes``
    are a token's, in all of ``layers``. With latents, K and V have no heads."""
    config = loaded(table)
    latent = config.attention_arch == model_config.AttentionArch.MLA
    layers = max(config.num_hidden_layers, config.num_attention_layers)
    full, kind = layers, None
    if (states := mambaish_config(config)) is not None:
        full, kind = len(states.full_attention_layer_ids), "state"
    elif config.swa_attention_layer_ids:
        full, kind = len(config.full_attention_layer_ids), "window"
    heads = config.get_num_kv_heads(1)
    width = heads * (config.head_dim + config.v_head_dim)
    if latent:
        width = config.kv_lora_rank + config.qk_rope_head_dim
    return {
        "layers": full,
        "beside": [kind, layers - full] if kind else None,
        "heads": config.num_attention_heads,
        "kv_heads": None if latent else heads,
        "head_dim": None if latent else config.head_dim,
        "bytes": full * width * config.dtype.itemsize,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        models = json.loads(RECORDED.read_text())
        for model in models.values():
            model["sglang"] = numbers(model["config"])
        lines = (f"{json.dumps(name)}: {json.dumps(model)}" for name, model in models.items())
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    else:
        found = {name: numbers(table) for name, table in json.load(sys.stdin).items()}
        print("\n" + json.dumps(found))
