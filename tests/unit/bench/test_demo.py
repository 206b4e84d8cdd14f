"""The demo's report and verdict, from canned turns; no server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import demo as program
from bench.demo import (
    COMPUTED,
    FILE,
    OURS,
    Conversation,
    Tokens,
    Turn,
    Words,
    build_report,
    finding,
    form_report,
    problems,
)
from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import ModelMissing
from bench.harness.server import CachedTokens

ABOUT: dict[str, object] = {
    "date": "2026-01-01T00:00:00+00:00",
    "device": "a machine",
    "sglang_version": "0.5.21",
    "model": "a model",
    "why_random": None,
}


def make_form(heads: str = "multi-head", ours: tuple[int, ...] = (7, 8)) -> dict[str, Any]:
    """Three questions; the first one has no history."""

    def turns(ms: float, storage: int, last: tuple[int, ...] = (7, 8)) -> list[Turn]:
        here = CachedTokens(0, 0, storage, 0)
        replies = ((1, 2), (3, 4), last)
        nothing = CachedTokens(0, 0, 0, 0)
        return [
            Turn(640 * n, ms if n else 900.0, here if n else nothing, reply)
            for n, reply in enumerate(replies)
        ]

    runs = {
        COMPUTED: Conversation(turns(1000.0, 0), None),
        FILE: Conversation(turns(400.0, 640), 1000.0),
        OURS: Conversation(turns(250.0, 640, ours), 520.0),
    }
    return form_report(heads, runs, Tokens(10, 640))


def test_replies_that_agree_succeed_and_the_finding_is_what_the_numbers_say() -> None:
    report = build_report([make_form(), make_form("grouped-query")], ABOUT)
    assert report["succeeded"] and json.loads(json.dumps(report)) == report
    assert finding(report) == (
        "From disk the next reply begins 4 times sooner than computed anew; "
        "hidden states take 0.52 of the bytes."
    )
    assert len(program.PROGRAM.table(report).splitlines()) == 2 + 4  # the first has no history


def test_a_reply_that_differs_and_a_hit_that_did_not_come_are_problems() -> None:
    form = make_form(ours=(7, 9))
    assert problems([form]) == ["multi-head, question 3: replies differ"]
    form = make_form()
    form["turns"][1]["from_l3"][OURS] = 0
    assert problems([form]) == ["multi-head, question 2: nothing came from L3"]
    assert "| NO |" in program.PROGRAM.table({"forms": [make_form(ours=(0,))]})


def test_the_program_ends_with_one_when_a_reply_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = build_report([make_form(ours=(7, 9))], {**ABOUT, "why_random": "there is no wheel"})
    out = tmp_path / "deep"
    demo = replace(program.PROGRAM, measure=lambda run: report, serves=False)
    assert demo.main(["--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "The model is random: there is no wheel." in said
    assert "FAILED multi-head, question 3: replies differ" in said
    assert f"Results: {out}/demo.json" in said
    assert json.loads((out / "demo.json").read_text())["problems"]
    assert (out / "demo.png").exists()


def test_without_the_wheel_the_random_model_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking() -> dict[str, str]:
        raise ModelMissing("the wheel could not be installed")

    monkeypatch.setattr(program, "source_facts", lacking)
    assert program._why_random() == "the wheel could not be installed"


def test_words_follow_each_other_as_the_model_was_taught() -> None:
    try:
        model = real_model("smollm2")
    except ModelMissing as missing:
        pytest.skip(str(missing))
    words = Words(model, 100)
    first, second = words.question(0), words.question(1)
    assert 100 < len(first) < 200
    said = words._tokenizer.decode(first + second)
    assert said.startswith("<|im_start|>user\nThis is a part of a Python module:")
    assert said.count("<|im_start|>assistant\n") == 2 and said.count("<|im_end|>") == 3
    assert words.text(words._tokenizer.encode(" Paris.<|im_end|>")) == "Paris."
