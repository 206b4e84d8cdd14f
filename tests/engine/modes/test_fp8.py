"""K and V in FP8. Models with FP8 weights are rows of `test_matrix.py`."""

import json
from pathlib import Path

import pytest

from bench.harness.models import LAYERS
from bench.harness.server import Server, ServerOptions
from tests.engine.harness.conversations import converse, make_conversations
from tests.engine.harness.ours import assert_nothing_went_wrong, assert_own_pages_of_kv, our_server

pytestmark = pytest.mark.engine


def fp8_kv(model: Path, folder: Path, scale: float) -> ServerOptions:
    """A server whose K and V are FP8 of this scale, and K and V in own pages."""
    by_layer = {str(layer): scale for layer in range(LAYERS)}
    kv = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": by_layer}}
    path = folder / f"scales-{scale}.json"
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": kv}))
    return our_server(
        model,
        folder,
        log=folder / f"{scale}.log",
        hcache={"mode": "kv"},
        extra_args=("--kv-cache-dtype", "fp8_e4m3", "--quantization-param-path", str(path)),
    )


def test_fp8_kv_comes_back_and_other_scales_find_none(model: Path, tmp_path: Path) -> None:
    """A reply behind K and V from L3 is that behind the same K and V on the device."""
    [conversation] = make_conversations(1, turns=2, tokens=400)
    with Server(fp8_kv(model, tmp_path, 0.5)) as server:
        converse(server, [conversation], flush=False)
        assert_own_pages_of_kv(server)
        there = conversation.turns[1]
        assert there.cached.device >= there.history_tokens - 64
        server.flush_cache()
        again = server.generate(there.prompt, len(there.reply.output_ids))
        assert again.cached.storage >= len(there.prompt) - 64
        server.flush_cache()
        last = server.generate([*there.prompt[: there.cached.device], 1], 1)
        assert last.cached.storage == there.cached.device
        behind = server.generate(there.prompt, len(there.reply.output_ids))
        assert behind.cached.device == there.cached.device
        assert behind.output_ids == there.reply.output_ids
        assert_nothing_went_wrong(server)
    for scale, found in ((0.25, False), (0.5, True)):
        with Server(fp8_kv(model, tmp_path, scale)) as server:
            assert (server.generate(there.prompt, 1).cached.storage > 0) == found
