"""What the commands say: ``hcache config``, what a server left in its store, and rare cases."""

import errno
import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hcache_backend.cli import common, doctor, ingest, plan, store
from hcache_backend.cli.common import human_bytes
from hcache_backend.cli.main import app
from hcache_backend.config import ConfigError, config_from_environment, parse_config, start_config
from hcache_backend.format.page import PageLayout, StoredLayer, hidden_layer, kv_layer
from hcache_backend.format.units import Segment, SegmentTable
from hcache_backend.server_report import LayerGroup, ServerReport, read_report, write_report
from hcache_backend.store import SERVER_REPORT, PageStore


def shown(call: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    call()
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5.0 PiB")]
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_rates_as_people_read_them() -> None:
    shown = [plan._rate(rate, "FLOP/s") for rate in (5.0, 2e9, 3e12)]
    assert shown == ["5 FLOP/s", "2.0 GFLOP/s", "3.0 TFLOP/s"]


# ---- hcache ingest ----


def test_a_document_that_is_gone_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    documents = ingest.find_documents([tmp_path / "a.txt", tmp_path / "b.txt"], {})
    assert next(documents).content == "a.txt"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(OSError, match=r"No such file.*b\.txt"):
        next(documents)


def test_what_happened_to_documents_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[str, Any] = {
        "stored": 2,
        "already_stored": 0,
        "failed": {"doc 0": "too {long}", "doc 1": "[red]"},
        "shorter_than_a_page": 1,
        "l3": {"bytes_written": 2048, "pages_dropped": 4, "pages_evicted": 6},
    }
    text = shown(lambda: ingest.show(said), capsys)
    assert "1 shorter than a page" in text and "already stored" not in text
    assert "4 pages dropped (L3)" in text and "2,048 bytes written (L3)" in text
    assert "L3 has too little room" in text
    assert "- doc 0: too {long} - doc 1: [red]" in text and "2 refused" in text


# ---- hcache store, top, plan, profile, doctor ----


def test_files_that_are_no_pages_have_no_codecs(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 8192)
    assert store.codecs_of(tmp_path / "other") is None
    assert store.codecs_of(tmp_path / "none") is None


def test_more_findings_than_are_shown_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a{n}.page" for n in range(store._SHOWN_AT_MOST + 5)]
    found: dict[str, Any] = {"pages": 0, "bytes": 0, "repaired": 0, "missing": names}
    found |= {"damaged": [], "unknown": [], "index": [], "problems": len(names)}
    text = shown(lambda: store._show_findings({"folders": {"/mnt": found}}), capsys)
    assert "and 5 more (see --json)" in text


def test_a_python_without_sglang_or_without_our_plugin_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "version", missing)
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    first, second, *_ = doctor._sglang()
    assert (first.subject, "not installed" in first.detail) == ("SGLang", True)
    assert "not registered with SGLang" in second.detail


# ---- errors ----


def test_a_reader_that_goes_away_is_no_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``hcache ls | head``."""

    def gone(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(common, "existing_store", gone)
    ended = CliRunner().invoke(app, ["ls"])
    assert (ended.exit_code, ended.output) == (1, "")


# ---- options ----


def test_options_that_are_no_toml_are_told(tmp_path: Path) -> None:
    (tmp_path / "hcache.toml").write_text("dirs = [")
    with pytest.raises(ConfigError, match="is not TOML"):
        config_from_environment({"HCACHE_CONFIG": f"@{tmp_path / 'hcache.toml'}"})


def test_pairs_of_layers_are_numbers() -> None:
    table = {"dirs": ["/mnt"], "codec": "krul", "mode": "kv", "krul": {"pairs": [[0, 2], [1, 3]]}}
    assert parse_config(table, "test").krul.pairs == ((0, 2), (1, 3))


EXTRA = {"module_path": "hcache_backend", "class_name": "HCacheStorage", "interface_v1": 1}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HCACHE_CONFIG", raising=False)


def checked(folder: Path, table: Any, *options: str) -> tuple[int, str]:
    path = folder / "config.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    done = CliRunner().invoke(app, ["config", str(path), *options], env={"COLUMNS": "500"})
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "change",
    [
        {"hcache": {"dir": ["/a"]}},
        {"hcache": {"dirs": ["a"]}},
        {"hcache": {"quota_bytes": "many"}},
        {"interface_v1": 0},
        {"dirs": ["/a"]},
        {"prefetch_treshold": 1},
    ],
)
def test_errors_are_those_of_a_start(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        start_config({**EXTRA, **change})
    status, said = checked(tmp_path, {**EXTRA, **change})
    assert (status, said) == (2, f"hcache: {error.value}\n")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({**EXTRA, "class_name": "Other"}, "'class_name' is 'Other'; it must be 'HCacheStorage'"),
        ({"hcache": {}}, "'module_path' is None; it must be 'hcache_backend'"),
        ({"mod": 1}, "HCACHE_CONFIG: unknown option 'mod' (value 1); did you mean 'mode'?"),
        ("{", "config.json: neither JSON nor @file.toml"),
    ],
)
def test_a_server_would_not_use_it(table: Any, said: str, tmp_path: Path) -> None:
    status, output = checked(tmp_path, table)
    assert status == 2 and said in output


def test_a_right_one_shows_its_options(tmp_path: Path) -> None:
    options = {"dirs": ["/a"], "quota_bytes": "1TB"}
    status, said = checked(tmp_path, {**EXTRA, "hcache": options})
    assert status == 0 and "quota_bytes = 1000000000000" in said
    status, said = checked(tmp_path, options, "--json")
    shown = {"dirs": ["/a"], "quota_bytes": 10**12}
    assert json.loads(said) == {"kind": "HCACHE_CONFIG", "options": shown}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("absent.toml", "absent.json"):
        done = CliRunner().invoke(app, ["config", str(tmp_path / name)])
        assert done.exit_code == 2 and "Traceback" not in done.output


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
