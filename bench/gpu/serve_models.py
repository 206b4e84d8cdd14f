"""Models that bench/gpu/serve.sh serves with random weights: it needs only their config.json.

    python -m bench.gpu.serve_models --list
    python -m bench.gpu.serve_models Llama-2-7B FOLDER [--tiny]

Shapes, vocabularies and constants are those of the published models. Positions go further than
theirs (4096 each), for histories of the workloads do; with random weights that changes nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

POSITIONS = 32_768
_LLAMA_2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32_000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float16",
}
_OLMO_2 = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 100_352,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "bos_token_id": None,
    "eos_token_id": 100_257,
    "pad_token_id": 100_277,
    "torch_dtype": "bfloat16",
}


def _shape(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7B": _LLAMA_2 | _shape(32, 4096, 32, 11_008),
    "Llama-2-13B": _LLAMA_2 | _shape(40, 5120, 40, 13_824),
    "OLMo-2-7B": _OLMO_2 | _shape(32, 4096, 32, 11_008),
}


def config(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """The config.json of a model, or of a tiny one of its architecture.

    Raises:
        KeyError: There is no model of that name.
    """
    found = {
        **MODELS[name],
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": POSITIONS,
    }
    return found | _shape(4, 256, 4, 512) if tiny else found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("folder", nargs="?", type=Path, help="for config.json; it is made")
    parser.add_argument("--list", action="store_true", help="print the models' names")
    parser.add_argument("--tiny", action="store_true", help="the same architecture, for a dry run")
    options = parser.parse_args()
    if options.list:
        print("\n".join(MODELS))
        return 0
    if options.model is None or options.folder is None:
        parser.error("give a model and a folder, or --list")
    options.folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(config(options.model, tiny=options.tiny), indent=1)
    (options.folder / "config.json").write_text(content + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
