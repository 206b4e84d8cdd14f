"""What the commands say in cases that other tests do not come to."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hcache_backend.cli import doctor, ingest, profile, store, top
from hcache_backend.cli.common import human_bytes
from hcache_backend.config import ConfigError, config_from_environment, parse_config


def shown(call: Any, module: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """What a function prints."""
    call()
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("count", "text"),
    [(5, "5 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5.0 PiB")],
)
def test_bytes_as_people_read_them(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_rates_as_people_read_them() -> None:
    assert [profile._rate(rate, "B/s") for rate in (5.0, 2e9, 3e12)] == [
        "5.0 B/s",
        "2.0 GB/s",
        "3.0 TB/s",
    ]


# ---- hcache ingest ----


def test_a_document_that_is_gone_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name)
    documents = ingest.find_documents([tmp_path / "a.txt", tmp_path / "b.txt"], {})
    assert next(documents).content == "a.txt"
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ingest.DocumentError, match=r"b\.txt: No such file"):
        next(documents)


def test_a_journal_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ingest.UnusableServer, match=f"--journal {tmp_path}"):
        ingest.Journal(tmp_path)


def test_what_happened_to_documents_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said: dict[str, Any] = {
        "stored": 2,
        "already_stored": 0,
        "failed": {f"doc {n}": "refused" for n in range(ingest.SHOWN_FAILURES + 3)},
        "tokens": 10,
        "tokens_found_in_l3": 0,
        "tokens_per_second": 5.0,
        "shorter_than_a_page": 1,
        "l3": {"bytes_written": 2048, "pages_dropped": 4, "pages_evicted": 6},
    }
    text = shown(lambda: ingest.show(said), ingest, capsys)
    assert "1 documents are shorter than a page" in text
    assert "L3 dropped 4 pages" in text and "6" in text and "2.0 KiB" in text
    assert "doc 0: refused" in text and "and 3 more" in text


# ---- hcache store, top, plan, profile, doctor ----


def test_files_that_are_no_pages_have_no_codecs(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x" * 8192)
    assert store.codecs_of(tmp_path / "other") is None
    assert store.codecs_of(tmp_path / "none") is None


def test_a_short_page_has_no_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").write_bytes(b"x" * 8192)
    for length in (4, 64):  # less than a prefix, then none of ours
        table = SimpleNamespace(segments=[SimpleNamespace(length=length)])
        header = SimpleNamespace(layout=SimpleNamespace(table=table))
        monkeypatch.setattr(store, "header_length", len)
        monkeypatch.setattr(store, "parse_header", lambda data, header=header: header)
        assert store.codecs_of(tmp_path / "page") is None


def test_more_findings_than_are_shown_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    names = [f"a{n}.page" for n in range(store._SHOWN_AT_MOST + 5)]
    found = {"pages": 0, "bytes": 0, "damaged": [], "missing": names, "unknown": [], "index": []}
    text = shown(lambda: store._show_findings({"/mnt": {**found, "repaired": 0}}), store, capsys)
    assert "and 5 more (see --json)" in text


def test_a_server_without_metrics_is_an_error_in_json() -> None:
    watched = top.Watched("http://server")
    watched.problem = "no answer"
    assert watched.as_json() == {"url": "http://server", "error": "no answer"}


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


# ---- options ----


def test_options_that_are_no_toml_are_told(
    tmp_path: Path,
) -> None:
    (tmp_path / "hcache.toml").write_text("dirs = [")
    with pytest.raises(ConfigError, match="is not TOML"):
        config_from_environment({"HCACHE_CONFIG": f"@{tmp_path / 'hcache.toml'}"})


def test_pairs_of_layers_are_numbers() -> None:
    table = {"dirs": ["/mnt"], "codec": "krul", "mode": "kv", "krul": {"pairs": [[0, 2], [1, 3]]}}
    assert parse_config(table, "test").krul.pairs == ((0, 2), (1, 3))
