"""The methods' servers: what they have in common, and what tells them apart."""

from pathlib import Path
from typing import Any

import pytest

from bench.harness.machine import Machine, MachineError, find_machine
from bench.harness.methods import METHODS, SERVED, server_options

CPU, GPU = Machine("cpu", "a CPU", "0"), Machine("cuda", "a GPU", "0")


def config(name: str, folder: Path, **options: Any) -> dict[str, Any]:
    made = server_options(METHODS[name], CPU, "org/model", folder, pool_tokens=512, **options)
    assert isinstance(made.extra_config, dict)
    found: dict[str, Any] = made.extra_config["hcache"]
    return found


@pytest.mark.parametrize("name", SERVED)
def test_methods_differ_in_what_brings_histories_back(name: str, tmp_path: Path) -> None:
    options = server_options(
        METHODS[name], GPU, "org/model", tmp_path, pool_tokens=512, extra_args=["--last", "1"]
    )
    command, environment = options.arguments(30000), options.environment()
    assert command[-2:] == ["--last", "1"]
    assert "--enable-cache-report" in command
    assert "--skip-tokenizer-init" not in command
    assert "HCACHE_RESTORE_TRACE" not in environment
    assert ("--enable-hierarchical-cache" in command) == (name not in ("ideal", "recompute"))
    assert ("--disable-radix-cache" in command) == (name == "recompute")
    assert ("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR" in environment) == (name == "file")
    if name.startswith("hcache"):
        restore = {} if name.endswith("-eager") else {"restore": "layerwise"}
        modes = {"hcache": "auto", "hcache-kv": "kv", "hcache-hidden": "hidden"}
        mode = modes[name.removesuffix("-eager")]
        every_hit = {"dirs": [str(tmp_path / "l3")], "min_gain": 0}
        assert config(name, tmp_path) == {**every_hit, "mode": mode, **restore}


def test_a_gpu_has_nothing_of_the_cpu_engine(tmp_path: Path) -> None:
    command = {}
    for machine in (CPU, GPU):
        options = server_options(METHODS["host"], machine, "org/model", tmp_path, pool_tokens=512)
        command[machine.device] = options.arguments(30000)
        assert ("SGLANG_USE_CPU_ENGINE" in options.environment()) == (machine is CPU)
        assert options.forks == (machine is CPU)
    for option in ("--device", "--dtype", "--attention-backend", "--disable-overlap-schedule"):
        assert option in command["cpu"]
        assert option not in command["cuda"]


def test_a_server_may_have_more_options(tmp_path: Path) -> None:
    assert config("hcache-hidden-eager", tmp_path, hcache={"io_threads": 2}) == {
        "dirs": [str(tmp_path / "l3")],
        "min_gain": 0,
        "mode": "hidden",
        "io_threads": 2,
    }


def test_a_model_without_a_tokenizer_is_served_without_one(tmp_path: Path) -> None:
    options = server_options(METHODS["host"], CPU, tmp_path, tmp_path, pool_tokens=512)
    assert "--skip-tokenizer-init" in options.arguments(30000)
    (tmp_path / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in options.arguments(30000)


def test_without_sglang_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.harness.machine.find_spec", lambda name: None)
    with pytest.raises(MachineError, match="SGLang is not installed"):
        find_machine()
