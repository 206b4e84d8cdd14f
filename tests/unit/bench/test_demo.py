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
from bench.demo.conversations import POOL_TOKENS, MethodRun, Script, Turn, steps
from bench.demo.report import METHODS, build_report, draw, problems, table, table_lines
from bench.harness.models import TinyLlama
from bench.harness.restorer import Restore

PAGE = 64
ABOUT: dict[str, object] = {
    "date": "2026-01-01T00:00:00+00:00",
    "device": "a machine",
    "sglang_version": "0.5.21",
    "model": TinyLlama().describe(),
    "conversations": 2,
    "turns_each": 2,
}


def make_turns(restores: Sequence[Restore], l3_tokens: int = 192) -> list[Turn]:
    """Two conversations of two turns; the second turns have 200 tokens of history."""
    first = [Turn(c, 0, 0, 0, (c, 1), None) for c in (0, 1)]
    second = [Turn(c, 1, 200, l3_tokens, (c, 2), restores[c]) for c in (0, 1)]
    return first + second


def make_runs() -> dict[str, MethodRun]:
    return {
        "recompute": MethodRun(make_turns([Restore(200, 40.0), Restore(200, 60.0)], l3_tokens=0)),
        "file": MethodRun(
            make_turns([Restore(192, 9.6, 4.8, 2.4), Restore(192, 19.2, 9.6, 4.8)]), 512, 512 * 8192
        ),
        "hcache-hidden": MethodRun(
            make_turns([Restore(192, 1.92, 0.96, 0.96), Restore(192, 3.84, 0.96, 2.88)]),
            512,
            512 * 4112,
            note="hidden mode: 4 layers",
        ),
    }


def with_turn(run: MethodRun, index: int, **changes: Any) -> MethodRun:
    turns = list(run.turns)
    turns[index] = replace(turns[index], **changes)
    return replace(run, turns=turns)


def test_report_has_every_turn_and_the_medians_of_every_method() -> None:
    report = json.loads(json.dumps(build_report(make_runs(), PAGE, ABOUT)))
    assert report["identical_tokens"] is True
    assert report["succeeded"] is True
    assert list(report["methods"]) == list(METHODS)
    ours = report["methods"]["hcache-hidden"]
    assert ours["stored_bytes_per_token"] == 4112
    assert ours["restore_ms_per_1k_tokens"] == 15.0
    assert ours["l3_ms_per_1k_tokens"] == 5.0
    assert ours["load_ms_per_1k_tokens"] == 10.0
    assert report["methods"]["recompute"]["restore_ms_per_1k_tokens"] == 250.0
    assert report["methods"]["recompute"]["stored_bytes_per_token"] == 0
    assert "identical_tokens" not in report["methods"]["recompute"]
    assert len(report["turns"]) == 4
    assert report["turns"][3] | {"restore_ms": None} == {
        "conversation": 1,
        "turn": 1,
        "history_tokens": 200,
        "l3_tokens": 192,
        "file_l3_tokens": 192,
        "identical_tokens": True,
        "restore_ms": None,
    }


@pytest.mark.parametrize("method", ["file", "hcache-hidden"])
def test_another_token_fails_the_demo(method: str) -> None:
    runs = make_runs()
    runs[method] = with_turn(runs[method], 3, output_ids=(1, 3))
    report = build_report(runs, PAGE, ABOUT)
    assert report["identical_tokens"] is False
    assert report["succeeded"] is False
    assert [turn["identical_tokens"] for turn in report["turns"]] == [True, True, True, False]
    assert problems(runs, PAGE) == [
        f"{method}: conversation 1, turn 1: the reply differs from that without a cache"
    ]


@pytest.mark.parametrize("method", ["file", "hcache-hidden"])
def test_history_that_did_not_come_from_l3_fails_the_demo(method: str) -> None:
    runs = make_runs()
    runs[method] = with_turn(runs[method], 2, l3_tokens=200 - PAGE)
    assert problems(runs, PAGE) == []
    runs[method] = with_turn(runs[method], 2, l3_tokens=200 - PAGE - 1)
    (problem,) = problems(runs, PAGE)
    assert "135 of 200 history tokens came from L3" in problem
    assert build_report(runs, PAGE, ABOUT)["succeeded"] is False


def test_a_restore_without_a_trace_fails_the_demo() -> None:
    runs = make_runs()
    runs["hcache-hidden"] = with_turn(runs["hcache-hidden"], 2, restore=None)
    assert problems(runs, PAGE) == [
        "hcache-hidden: conversation 0, turn 1: the trace shows no restore"
    ]


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
    report = json.loads(json.dumps(build_report(make_runs(), PAGE, ABOUT, codecs)))
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
    report = build_report(make_runs(), PAGE, ABOUT, codec_report(runs, TinyLlama()))
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
    console.print(table(build_report(make_runs(), PAGE, ABOUT)))
    text = console.export_text()
    for cell in (
        "recompute",
        "KV, SGLang file L3",
        "HCache, hidden states",
        "8,192",
        "4,112",
        "250.0",
        "15.0",
        "yes",
    ):
        assert cell in text


def test_the_table_of_the_documentation_has_a_row_for_each_method() -> None:
    lines = table_lines(build_report(make_runs(), PAGE, ABOUT)).splitlines()
    assert lines[2:] == [
        "| recompute | - | - | 250.0 | - | - | - |",
        "| KV, SGLang file L3 | 8,192 | 384 | 75.0 | 37.5 | 18.8 | yes |",
        "| HCache, hidden states | 4,112 | 384 | 15.0 | 5.0 | 10.0 | yes |",
    ]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(build_report(make_runs(), PAGE, ABOUT)).savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def fake_demo(monkeypatch: pytest.MonkeyPatch, runs: dict[str, MethodRun]) -> None:
    def measure(script: Script, shape: TinyLlama, codecs: bool) -> dict[str, Any]:
        return build_report(runs, PAGE, ABOUT)

    monkeypatch.setattr("bench.demo.__main__.measure", measure)


def test_json_is_all_that_stands_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_demo(monkeypatch, make_runs())
    out = tmp_path / "deep" / "demo.json"
    assert main(["--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_exit_status_is_1_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = make_runs()
    runs["hcache-hidden"] = with_turn(runs["hcache-hidden"], 2, output_ids=(7,))
    fake_demo(monkeypatch, runs)
    out = tmp_path / "demo.json"
    assert main(["--out", str(out)]) == 1
    assert json.loads(out.read_text())["identical_tokens"] is False
    assert "FAILED hcache-hidden: conversation 0, turn 1" in capsys.readouterr().out


def test_more_turns_than_the_pool_holds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--turns", "1000"])
    assert "--turns 1000: the device pool holds at most" in capsys.readouterr().err


def test_the_default_script_is_the_same_every_time_and_fits_the_pool() -> None:
    script = Script()
    assert script.question(1, 2) == Script().question(1, 2)
    assert script.question(1, 2) != script.question(2, 1)
    assert script.longest_prompt <= POOL_TOKENS
    assert steps(Script(conversations=2, turns=3)) == 7
