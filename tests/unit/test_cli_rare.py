"""What the commands say in cases that other tests do not come to."""

import errno
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hcache_backend.cli import common, doctor, ingest, plan, store
from hcache_backend.cli.common import human_bytes
from hcache_backend.cli.main import app
from hcache_backend.config import ConfigError, config_from_environment, parse_config


def shown(call: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> str:
    """What a function prints."""
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
