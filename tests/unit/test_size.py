"""The arithmetic of ``hcache size`` is that of pages that servers wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.cli.plan import Sizing, sizing
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.restore import Partition
from tests.unit.partition.pipelines import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
CODECS = json.loads((ROOT / "bench" / "results" / "codecs.json").read_text())
MEASURED = [row for row in CODECS["codecs"] if "stored_bytes_per_token" in row]
DTYPES = {2: "bfloat16", 4: "float32"}


def sized(element_bytes: int, partition: Partition, hidden: int = 256, **options: Any) -> Sizing:
    model = ModelShape(
        family="llama",
        layers=partition.layers,
        hidden=hidden,
        heads=4,
        kv_heads=4,
        head_dim=hidden // 4,
        value_dim=hidden // 4,
        mlp_width=hidden,
        element_bytes=element_bytes,
    )
    given = {"conversations": 1, "tokens": 64, **options}
    return sizing(model, DTYPES[element_bytes], partition, **given)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['codec']}-{row['dtype']}")
def test_files_are_as_large_as_those_of_servers(row: dict[str, Any]) -> None:
    width = {"float32": 4, "bfloat16": 2}[row["dtype"]]
    found = sized(width, Partition(0, CODECS["model"]["layers"], 0), codec=row["codec"])
    assert found.file_bytes == 64 * row["stored_bytes_per_token"]


def test_pages_and_shadows_are_those_of_servers() -> None:
    """As the log of a server said that had 4,352 tokens on the device and 202 pages of host memory.

    What a server makes of that memory today is tested by tests/engine/in_process/start.
    """
    said = (
        "hidden mode: 8 layers from hidden states, 2101248 bytes a 64-token page, codec none, "
        "202 host pages, 69 shadows"
    )
    memory = {"device_tokens": 4352, "conversations": 202}
    found = sized(4, Partition(0, 8, 0), 1024, **memory, tokens=64 + 63)  # a part is not kept
    assert f"{found.page_bytes} bytes a 64-token page" in said
    assert said.endswith(f"{found.pages} host pages, {found.shadows} shadows")


def test_ranks_share_hidden_states_and_have_kv_of_their_own() -> None:
    whole, half = (sized(4, Partition(0, 4, 0), tp=n) for n in (1, 2))
    assert half.page_bytes - 4096 == (whole.page_bytes - 4096) // 2
    assert (whole.files, half.files) == (1, 2)
    page = sized(4, Partition(1, 2, 1), tp=2)
    assert page.page_bytes == 4096 + 2 * 64 * 1024 // 2 + 64 * 2048 // 2
    assert page.file_bytes == 4096 + page.page_bytes


def test_pages_of_k_and_v_have_no_shadows() -> None:
    found = sized(4, Partition(0, 0, 4), device_tokens=128, conversations=3, tokens=128)
    assert (found.pages, found.shadows) == (6, 0)
    assert found.host_bytes == 6 * (4096 + 64 * 8192)
    assert found.disk_bytes == 6 * (2 * 4096 + 64 * 8192)
    assert found.ratio == found.host_bytes / (128 * 8192)


def test_by_default_values_of_16_bits_are_encoded() -> None:
    sizes = {
        codec: sized(2, Partition(0, 3, 1), codec=codec).page_bytes
        for codec in ("auto", "none", "exp3", "exp4")
    }
    assert sizes["auto"] == sizes["exp3"] < sizes["exp4"] < 0.78 * sizes["none"]


def arguments(model: str, *options: str) -> list[str]:
    given = ["size", str(CONFIGS / f"{model}.json"), "--conversations", "2000", "--tokens", "16384"]
    return [*given, *options]


def size(model: str, *options: str) -> str:
    done = CliRunner().invoke(app, arguments(model, *options), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("llama-3-8b", [], ["32 layers loaded as KV", "--hicache-size 3081\n", "3,082.8 GB in"]),
        ("llama-2-7b", [], ["from hidden states", "16,781,312 bytes per 64-token page and rank"]),
        ("llama-2-7b", ["--device-tokens", "40000"], ["(or --hicache-ratio 410.3)"]),
        ("llama-2-7b", ["--mode", "kv", "--folders", "2"], ["as KV", "each of 2 folder(s)"]),
        ("deepseek-v3", ["--tp", "8"], ["61 layers loaded as latents", " in 4,096,000 files"]),
    ],
)
def test_the_command_says_what_to_give_to_the_server(
    model: str, options: list[str], said: list[str]
) -> None:
    output = size(model, *options)
    assert all(part in output for part in said), output


def test_json_has_the_options() -> None:
    found = json.loads(size("llama-3-8b", "--json"))
    assert found["pages"] == 2000 * 16384 // 64
    assert found["hicache_size"] == 3081 and found["quota_bytes"] == found["disk_bytes"]


@pytest.mark.parametrize("option", ["conversations", "tokens", "device_tokens"])
def test_counts_have_units(option: str) -> None:
    given = f"--{option.replace('_', '-')}"
    found = {text: json.loads(size("llama-3-8b", given, text, "--json")) for text in ("3k", "3000")}
    assert found["3k"] == found["3000"] != json.loads(size("llama-3-8b", "--json"))
    done = CliRunner().invoke(app, arguments("llama-3-8b", given, "3kB"))
    assert done.exit_code == 2 and f"'{given}': '3kB' must be" in done.stderr


@pytest.mark.parametrize("codec", ["auto", "none"])
@pytest.mark.parametrize("partition", [Partition(0, 4, 0), Partition(0, 0, 4)])
def test_host_memory_is_larger_than_the_device_pool(partition: Partition, codec: str) -> None:
    found = sized(2, partition, device_tokens=6400, codec=codec)
    pool = 6400 * 4 * 1024
    assert found.ratio is not None and found.least_bytes == pytest.approx(found.ratio * pool)
    assert found.least_bytes > pool  # as SGLang counts, which may serve the model with plain pages
    assert found.least_bytes >= (101 + found.shadows) * found.page_bytes


@pytest.mark.parametrize("mode", ["kv", "hidden"])
def test_the_advice_is_never_below_the_device_pool(mode: str) -> None:
    options = ("--mode", mode, "--tokens", "640", "--conversations", "1", "--device-tokens", "40K")
    found = json.loads(size("llama-2-7b", *options, "--json"))
    pool = 40_000 * 32 * 16_384
    assert found["hicache_size"] * 1e9 > pool and found["ratio"] > 1
    assert "--hicache-size 22 (or --hicache-ratio 1.1)" in size("llama-2-7b", *options)


def test_without_the_device_pool_its_size_is_asked_for() -> None:
    asked = "Host memory must exceed the KV pool of the GPU: give --device-tokens"
    assert asked in size("llama-3-8b")
    assert asked not in size("llama-3-8b", "--device-tokens", "40K")


def test_short_conversations_fill_no_page_and_no_advice_is_0() -> None:
    options = ("--tokens", "20", "--conversations", "1")
    found = json.loads(size("llama-3-8b", *options, "--json"))
    assert (found["pages"], found["hicache_size"]) == (0, 1)
    assert found["quota_bytes"] == found["file_bytes"] > 0
    text = size("llama-3-8b", *options)
    assert "Nothing is stored: fewer than 64 tokens fill no page" in text
    assert "fill no page" not in size("llama-3-8b")


def test_ranks_are_added_up_and_heads_that_several_store_told() -> None:
    found = {tp: json.loads(size("llama-3-8b", "--tp", str(tp), "--json")) for tp in (8, 16)}
    assert found[16]["disk_bytes"] == pytest.approx(2 * found[8]["disk_bytes"], rel=0.01)
    for tp, each in found.items():
        text, rank = size("llama-3-8b", "--tp", str(tp)), each["host_bytes"] / 1e9
        assert f"{rank:,.1f} GB per rank, {tp * rank:,.1f} GB for {tp} ranks:" in text
        assert ("each of the 8 KV heads is stored by 2 ranks" in text) is (tp == 16)
    assert "ranks:" not in size("llama-3-8b")
    assert "is stored by" not in size("deepseek-v3", "--tp", "16")
    assert "is stored by" not in size("llama-3-8b", "--tp", "16", "--mode", "hidden")
