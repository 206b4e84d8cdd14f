"""The guide's arithmetic is that of pages that servers wrote."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIZE = runpy.run_path(str(ROOT / "docs" / "size.py"))
CODECS = json.loads((ROOT / "bench" / "results" / "codecs.json").read_text())
MEASURED = [row for row in CODECS["codecs"] if "stored_bytes_per_token" in row]


def plan(
    element_bytes: int, layers: dict[str, int], ranks: int = 1, hidden: int = 256
) -> dict[str, Any]:
    """What ``hcache plan --json`` says of models with as many values of K as of hidden states."""
    count = sum(layers.values())
    head = {"head_dim": hidden // 4, "value_dim": hidden // 4, "element_bytes": element_bytes}
    model = {"layers": count, "hidden": hidden, "kv_heads": 4, **head}
    return {"model": model, "tp": ranks, "layers": layers}


ALL_HIDDEN = {"recompute": 0, "hidden": 4, "kv": 0}


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row['codec']}-{row['dtype']}")
def test_files_are_as_large_as_those_of_servers(row: dict[str, Any]) -> None:
    width = {"float32": 4, "bfloat16": 2}[row["dtype"]]
    layers = {**ALL_HIDDEN, "hidden": CODECS["model"]["layers"]}
    page = SIZE["page_size"](plan(width, layers), 64, row["codec"], False)
    assert page.file_bytes == 64 * row["stored_bytes_per_token"]


def test_pages_and_shadows_are_those_of_servers() -> None:
    """As the log of a server said that had 4,352 tokens on the device and 202 pages of host memory.

    What a server makes of that memory today is tested by tests/engine/in_process/start.
    """
    said = (
        "hidden mode: 8 layers from hidden states, 2101248 bytes a 64-token page, codec none, "
        "202 host pages, 69 shadows"
    )
    found = SIZE["size"](
        plan(4, {"recompute": 0, "hidden": 8, "kv": 0}, hidden=1024),
        device_tokens=4352,
        histories=202,
        tokens=64 + 63,  # what is no full page is not kept
    )
    assert f"{found.page.rank_bytes} bytes a 64-token page" in said
    assert said.endswith(f"{found.pages} host pages, {found.shadows} shadows")


def test_ranks_share_hidden_states_and_have_kv_of_their_own() -> None:
    whole, half = (SIZE["page_size"](plan(4, ALL_HIDDEN, n), 64, "none", False) for n in (1, 2))
    assert half.rank_bytes - 4096 == (whole.rank_bytes - 4096) // 2
    assert (whole.files, half.files) == (1, 2)
    mixed = {"recompute": 1, "hidden": 2, "kv": 1}
    page = SIZE["page_size"](plan(4, mixed, 2), 64, "none", False)
    assert page.rank_bytes == 4096 + 2 * 64 * 1024 // 2 + 64 * 2048 // 2
    assert page.file_bytes == 4096 + page.rank_bytes


def test_pages_of_k_and_v_have_no_shadows() -> None:
    given = {"device_tokens": 640, "histories": 3, "tokens": 128, "kv_mode": True}
    found = SIZE["size"](plan(4, ALL_HIDDEN), **given)
    assert (found.pages, found.shadows) == (6, 0)
    assert found.host_bytes == 6 * (4096 + 64 * 8192)
    assert found.disk_bytes == 6 * (2 * 4096 + 64 * 8192)
    assert found.ratio == found.host_bytes / (640 * 8192)


def test_by_default_values_of_16_bits_are_encoded() -> None:
    mixed = {"recompute": 0, "hidden": 3, "kv": 1}
    sizes = {
        codec: SIZE["page_size"](plan(2, mixed), 64, codec, False).rank_bytes
        for codec in ("auto", "none", "exp4")
    }
    assert sizes["auto"] == sizes["exp4"] < 0.78 * sizes["none"]
