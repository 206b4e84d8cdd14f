"""The demo's statistics, report and verdict, from canned turns; no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.demo.__main__ import main
from bench.demo.codecs import codec_problems, codec_report, codec_table
from bench.demo.conversations import MethodRun, Script, Turn, steps
from bench.demo.report import build_report, draw, problems, table, table_lines
from bench.demo.settings import _restore_ms
from bench.harness.models import TinyLlama
from bench.harness.restorer import Restore
from bench.harness.turns import Answer

ABOUT: dict[str, object] = {
    "date": "2026-01-01T00:00:00+00:00",
    "device": "a machine",
    "sglang_version": "0.5.21",
    "history_tokens": 1024,
    "rounds": 7,
}


def make_models() -> list[dict[str, Any]]:
    """A model in two settings: over a disk that is fast, and over one that is slow."""

    def setting(disk: str, rate: float | None, ours: float, share: float) -> dict[str, Any]:
        return {
            "disk": disk,
            "mb_per_s": rate,
            "ttft_ms": {"none": 1000.0, "file": 4200.0, "ours": ours},
            "restore_ms": {"file": 4100.0, "ours": 300.0 if share else None},
            "share_from_l3": {"file": 1.0, "ours": share},
            "identical_tokens": {"file": True, "ours": True},
            "ours": {"of_better": ours / 1000, "interval": [0.9, 1.1]},
        }

    settings = [
        setting("this disk", None, 400.0, 1.0),
        setting("0.24x computing", 2.5, 1010.0, 0.0),
    ]
    sizes = {"file": 8192.0, "ours": 4112.0}
    return [{"model": "MHA", "bytes_per_token": sizes, "settings": settings}]


def make_turns(restores: Sequence[Restore], l3_tokens: int = 192) -> list[Turn]:
    """Two conversations of two turns; the second turns have 200 tokens of history."""
    first = [Turn(c, 0, 0, 0, (c, 1), None) for c in (0, 1)]
    second = [Turn(c, 1, 200, l3_tokens, (c, 2), restores[c]) for c in (0, 1)]
    return first + second


def with_turn(run: MethodRun, index: int, **changes: Any) -> MethodRun:
    turns = list(run.turns)
    turns[index] = replace(turns[index], **changes)
    return replace(run, turns=turns)


def test_a_report_of_replies_that_agree_succeeded() -> None:
    report = json.loads(json.dumps(build_report(make_models(), ABOUT)))
    assert report["succeeded"] is True
    assert report["models"] == make_models()


def test_what_a_trial_loads_is_no_restore() -> None:
    loaded = Restore(tokens=64, ms=73.0, l3_ms=60.0, load_ms=13.0, ttft_ms=900.0)
    answers = [Answer(1.0, share, (1,), loaded) for share in (0.06, 0.06, 1.0)]
    assert _restore_ms(answers) is None
    assert _restore_ms(answers[1:]) == 73.0


@pytest.mark.parametrize(
    ("method", "title"), [("file", "KV, SGLang file L3"), ("ours", "HCache, default options")]
)
def test_another_token_fails_the_demo(method: str, title: str) -> None:
    models = make_models()
    models[0]["settings"][1]["identical_tokens"][method] = False
    assert build_report(models, ABOUT)["succeeded"] is False
    assert problems(models) == [
        f"MHA, 0.24x computing: a reply with {title} differs from that without a cache"
    ]


def test_a_history_that_does_not_come_from_a_disk_as_it_is_fails_the_demo() -> None:
    models = make_models()
    models[0]["settings"][0]["share_from_l3"]["ours"] = 0.0
    assert problems(models) == ["MHA, this disk: nothing came from L3"]


def make_codec_runs() -> dict[str, MethodRun]:
    turns = make_turns([Restore(192, 2.0), Restore(192, 2.0)])
    sizes = {"none": 2176, "exp4": 1728, "int8": 1216, "fp8": 1216}
    return {
        name: MethodRun(turns, 512, 512 * size, f"hidden mode: 4 layers, codec {name}")
        for name, size in sizes.items()
    } | {"recompute": MethodRun(turns)}


def test_codecs_are_compared_with_recomputation_with_exact_hidden_states_and_with_kv() -> None:
    runs = make_codec_runs()
    runs["int8"] = with_turn(runs["int8"], 3, output_ids=(1, 3))
    runs["recompute"] = with_turn(runs["recompute"], 2, output_ids=(7, 2))
    codecs = codec_report(runs, TinyLlama())
    report = json.loads(json.dumps(build_report(make_models(), ABOUT, codecs)))
    assert report["succeeded"] is True  # int8 may differ
    assert report["codecs"]["codecs"]["int8"] == {
        "stored_bytes_per_token": 1216,
        "share_of_kv": round(1216 / 4096, 4),
        "l3_tokens": 2 * 192,
        "as_recomputed": 5,
        "as_uncoded": 7,
        "reply_tokens": 8,
    }
    assert report["codecs"]["codecs"]["none"]["as_recomputed"] == 6
    assert report["codecs"]["codecs"]["none"]["as_uncoded"] is None
    assert list(report["codecs"]["codecs"]) == ["none", "exp4", "int8", "fp8"]
    console = Console(width=80, record=True, file=StringIO())
    console.print(codec_table(report["codecs"]))
    text = console.export_text()
    for cell in ("none", "exp4", "1,728", "0.42", " 5 ", " 7 ", " 8 "):
        assert cell in text


@pytest.mark.parametrize(
    ("codec", "changes", "problem"),
    [
        ("exp4", {"output_ids": (2, 2)}, "codec exp4: 2 of 8 tokens differ, and it is lossless"),
        ("fp8", {"l3_tokens": 64}, "codec fp8, conversation 1, turn 1: 64 of 200 history tokens"),
        ("int8", {"restore": None}, "codec int8, conversation 1, turn 1: the trace shows no"),
    ],
)
def test_a_codec_that_does_not_do_what_it_says_fails_the_demo(
    codec: str, changes: dict[str, Any], problem: str
) -> None:
    runs = make_codec_runs()
    runs[codec] = with_turn(runs[codec], 3, **changes)
    report = build_report(make_models(), ABOUT, codec_report(runs, TinyLlama()))
    (found,) = report["problems"]
    assert found.startswith(problem)
    assert report["succeeded"] is False


def test_a_codec_that_gave_way_to_another_fails_the_demo() -> None:
    runs = make_codec_runs()
    runs["int8"] = replace(runs["int8"], note="hidden mode: 4 layers, codec none")
    assert codec_problems(runs) == [
        "codec int8: the server says 'hidden mode: 4 layers, codec none'"
    ]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table(build_report(make_models(), ABOUT)))
    text = console.export_text()
    for cell in ("MHA 8,192 / 4,112", "this disk", "4,200", "1,010", "refused", "yes"):
        assert cell in text


def test_the_table_of_the_documentation_has_a_row_for_each_model_and_disk() -> None:
    lines = table_lines(build_report(make_models(), ABOUT)).splitlines()
    assert lines[2:] == [
        "| MHA, 8,192 / 4,112 | this disk | 1,000 | 4,200 | 400 | 0.40 | 4,100 | 300 | yes |",
        "| MHA, 8,192 / 4,112 | 0.24x computing, 2.5 MB/s | 1,000 | 4,200 | 1,010 | 1.01 "
        "| 4,100 | refused | yes |",
    ]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(build_report(make_models(), ABOUT)).savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def fake_demo(monkeypatch: pytest.MonkeyPatch, models: list[dict[str, Any]]) -> None:
    def measure(tokens: int, rounds: int, codecs: bool) -> dict[str, Any]:
        return build_report(models, ABOUT)

    monkeypatch.setattr("bench.demo.__main__.measure", measure)


def test_json_is_all_that_stands_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_demo(monkeypatch, make_models())
    out = tmp_path / "deep" / "demo.json"
    assert main(["--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_exit_status_is_1_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = make_models()
    models[0]["settings"][0]["identical_tokens"]["ours"] = False
    fake_demo(monkeypatch, models)
    assert main(["--out", str(tmp_path / "demo.json")]) == 1
    assert "FAILED MHA, this disk: a reply with HCache" in capsys.readouterr().out


def test_the_default_script_is_the_same_every_time() -> None:
    script = Script()
    assert script.question(1, 1) == Script().question(1, 1)
    assert script.question(0, 1) != script.question(1, 0)
    assert steps(Script(conversations=2, turns=3)) == 7
