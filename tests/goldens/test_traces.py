from __future__ import annotations
from pathlib import Path
import pytest
from bench.harness.server import Server
from tests.goldens.golden import compare
from tests.goldens.traced import *
from bench.harness.models import build_model

@pytest.fixture(scope="module")
def model(pytestconfig) -> Path:
    return build_model("llama", pytestconfig.cache.mkdir("models"))

def test_first(model: Path, tmp_path: Path) -> None:
    options = traced(model, tmp_path, hcache={"partition": {"recompute": 1, "hidden": 2, "kv": 1}})
    with Server(options) as server:
        script = Script(server)
        script.settle("conversation")
        print(conversation(script))
        compare("first.txt", script.lines())
