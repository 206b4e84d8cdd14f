"""``bench/gpu/serve.sh``: the comparison with the shapes of real models, as far as it goes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from bench.gpu.serve_models import MODELS
from hcache_backend.partition.model_config import read_model
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bench" / "gpu" / "serve.sh"
SHAPES = {
    # parameters in billions, as published; layers; hidden size; heads
    "Llama-2-7B": (6.74, 32, 4096, 32),
    "Llama-2-13B": (13.02, 40, 5120, 40),
    "OLMo-2-7B": (7.30, 32, 4096, 32),
}


def serve(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_a_script_that_bash_can_read() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    helped = serve("--help")
    assert helped.returncode == 0
    assert "--dry-run" in helped.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--modles",), "--modles: there is no such option"),
        (("--results",), "--results: a value is missing"),
        (("--models", "Llama-3-8B"), "must be of Llama-2-7B, Llama-2-13B, OLMo-2-7B"),
    ],
)
def test_bad_options_are_named(arguments: tuple[str, ...], message: str) -> None:
    refused = serve(*arguments, "--dry-run")
    assert refused.returncode == 2
    assert message in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path) -> None:
    refused = serve("--results", tmp_path, TMPDIR=str(tmp_path))
    assert refused.returncode == 2
    assert "no CUDA device; --dry-run does without" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_python_that_is_not_there_is_named() -> None:
    refused = serve("--dry-run", PYTHON="no-such-python")
    assert refused.returncode == 2
    assert "PYTHON=no-such-python" in refused.stderr


@pytest.mark.parametrize("name", SHAPES)
def test_models_are_those_that_they_are_called(name: str, tmp_path: Path) -> None:
    stub_torchvision()
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / name
    write = [sys.executable, "-m", "bench.gpu.serve_models", name, folder]
    subprocess.run(write, check=True, cwd=ROOT)
    found = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(found)
    billions, layers, hidden, heads = SHAPES[name]
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(
        billions, abs=0.005
    )
    shape = read_model(folder)
    assert (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (
        *(layers, hidden, heads),
        heads,
    )
    assert shape.element_bytes == 2
    subprocess.run([*write, "--tiny"], check=True, cwd=ROOT)
    tiny = AutoConfig.from_pretrained(folder)
    assert type(tiny) is type(found)
    assert tiny.hidden_size == 256
    assert list(MODELS) == list(SHAPES)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU engine is for machines without one")
def test_the_dry_run_serves_all_models(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as short:  # names of sockets in it have a limit
        done = serve("--dry-run", "--results", tmp_path, TMPDIR=short)
        assert list(Path(short).iterdir()) == []
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for name in SHAPES:
        report = json.loads((tmp_path / f"compare-{name.lower()}.json").read_text())
        assert report["model"].startswith(f"{name} (")
        hidden = report["restore"]["methods"]["hcache-hidden"]
        assert hidden["said"].startswith("hidden mode")
        assert hidden["disk"]["ms"] > 0
        assert hidden["bytes_per_token"] < report["restore"]["methods"]["file"]["bytes_per_token"]
