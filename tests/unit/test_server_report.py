"""What a server leaves in a store's folder, and what ``hcache`` says about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.config import parse_config
from hcache_backend.format.page import PageLayout, StoredLayer, hidden_layer, kv_layer
from hcache_backend.format.units import Segment, SegmentTable
from hcache_backend.server_report import (
    LayerGroup,
    ServerReport,
    read_report,
    write_report,
)
from hcache_backend.store import SERVER_REPORT, PageStore

BY_SPEC = LayerGroup(
    layers=(0, 2), method="spec", detail="fused weight 512x256", exactness="100% equal"
)
BY_MODULE = LayerGroup(layers=(1,), method="generic", detail="V is nowhere", exactness="99% equal")
KV = ServerReport(
    time=0.0, model="m", mode="kv", pages="own", reason="LoRA", codec=None, projection=()
)
PLAIN = KV.model_copy(update={"pages": "plain"})
MIXED = ServerReport(
    time=0.0,
    model="m",
    mode="hidden",
    pages="own",
    reason=None,
    codec="exp4",
    projection=(BY_SPEC, BY_MODULE),
)
BEST = MIXED.model_copy(update={"projection": (BY_SPEC,)})
ENCODED = KV.model_copy(update={"codec": "exp4"})
RATES = KV.model_copy(update={"tokens_per_second": {"l3_read": 20480.4, "prefill": 915.0}})
RECOMPUTING = BEST.model_copy(update={"recomputation": "K 100% equal"})
WITHOUT = BEST.model_copy(update={"unused": {"recomputation": "LoRA", "b": "why"}})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    config = parse_config({"dirs": [str(folder)], "min_free_bytes": 0}, "test")
    PageStore(config, b"writer-1", background=False).close()
    return folder


def hcache(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def last_server(folder: Path) -> Any:
    [found] = json.loads(hcache("stats", "-d", folder, "--json"))["folders"]
    return found["last_server"]


def test_stats_says_what_mode_the_last_server_was_in(folder: Path) -> None:
    assert last_server(folder) is None
    assert "Last server" not in hcache("stats", "-d", folder)
    write_report(folder, KV)
    last = last_server(folder)
    assert (last["mode"], last["reason"]) == ("kv", "LoRA")
    write_report(folder, ENCODED)
    for command in ("stats", "ls"):
        said = hcache(command, "-d", folder)
        assert f"Last server of {folder}: m, started " in said
        assert said.endswith(": kv mode, own pages; LoRA; codec exp4\n")


@pytest.mark.parametrize(
    ("layers", "codec"),
    [
        ((hidden_layer(16, 98, 64, "exp4"), kv_layer(16, 32, 32, 2, 2)), "exp4, none"),
        ((StoredLayer(()), hidden_layer(16, 98, 64, "exp4")), "exp4"),
        (16384, None),
        (8, None),
    ],
)
def test_stats_say_by_what_each_namespace_is_encoded(
    layers: tuple[StoredLayer, ...] | int, codec: str | None, folder: Path
) -> None:
    """Plain pages, here of so many bytes, have no header of ours."""
    if isinstance(layers, int):
        page, table = np.zeros(layers, np.uint8), SegmentTable((Segment(layers),))
    else:
        layout = PageLayout(16, layers)
        page, table = np.zeros(layout.page_bytes, np.uint8), layout.table
        layout.begin(page, b"n" * 16, b"writer-1")
        layout.seal(page, bytes(32))
    store = PageStore(parse_config({"dirs": [str(folder)]}, "test"), b"writer-1", background=False)
    assert store.put(b"n" * 16, [bytes(32)], [[page.data]], table=table) == [True]
    store.close()
    [found] = json.loads(hcache("stats", "-d", folder, "--json"))["folders"]
    [space] = found["namespaces"].values()
    assert space["codec"] == codec
    assert (codec or "-") in hcache("stats", "-d", folder)


def test_ls_prints_what_the_last_server_said_as_json(folder: Path) -> None:
    write_report(folder, ENCODED)
    found = json.loads(hcache("ls", "-d", folder, "--json"))
    assert found["pages"] == []
    assert found["last_servers"][str(folder)]["codec"] == "exp4"


@pytest.mark.parametrize(
    ("report", "verdict", "said"),
    [
        (KV, "good", ": kv mode, own pages; LoRA"),
        (ENCODED, "good", "; LoRA; codec exp4"),
        (RATES, "good", "; LoRA; tokens per second: l3_read 20,480, prefill 915"),
        (PLAIN, "fair", ": kv mode, plain pages; LoRA"),
        (
            BEST,
            "good",
            ": hidden mode, own pages; codec exp4; layers 0, 2 by spec: fused weight 512x256 "
            "(100% equal)",
        ),
        (
            MIXED,
            "fair",
            "(100% equal); layers 1 by their attention modules: V is nowhere (99% equal)",
        ),
        (RECOMPUTING, "good", "(100% equal); recomputed layers: K 100% equal"),
        (WITHOUT, "good", "(100% equal); not used: recomputation (LoRA), b (why)"),
    ],
)
def test_doctor_says_how_the_last_server_projected_and_why(
    report: ServerReport, verdict: str, said: str, folder: Path
) -> None:
    write_report(folder, KV)
    write_report(folder, report)
    names = [path.name for path in folder.iterdir()]
    assert SERVER_REPORT in names
    assert not [name for name in names if name.startswith(".")]
    assert read_report(folder) == report
    checks = json.loads(hcache("doctor", "-d", folder, "--json"))["checks"]
    [check] = [check for check in checks if check["subject"] == f"{folder}: last server"]
    assert check["verdict"] == verdict
    assert check["detail"].endswith(said)
    assert (folder / SERVER_REPORT).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"time": "yesterday"}'])
def test_a_report_that_cannot_be_read_is_no_report(text: bytes, folder: Path) -> None:
    (folder / SERVER_REPORT).write_bytes(text)
    assert read_report(folder) is None
    assert "last server" not in hcache("doctor", "-d", folder)
