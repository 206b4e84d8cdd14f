"""The demo's report and verdict, from canned turns; no server."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.demo import (
    COMPUTED,
    FILE,
    OURS,
    PROGRAM,
    Conversation,
    Tokens,
    Turn,
    build_report,
    form_report,
)
from bench.harness.server import CachedTokens

ABOUT: dict[str, object] = {
    "date": "2026-01-01T00:00:00+00:00",
    "device": "a machine",
    "sglang_version": "0.5.21",
    "model": "a model",
    "why_random": None,
}
NOTHING = CachedTokens(0, 0, 0, 0)


def make_form(last: tuple[int, ...] = (7, 8), storage: int = 640) -> dict[str, Any]:
    """Three questions, the first without a history; ``last`` is the last reply behind ours."""

    def turns(ms: float, storage: int, last: tuple[int, ...] = (7, 8)) -> list[Turn]:
        cached = CachedTokens(0, 0, storage, 0)
        first = Turn(0, 900.0, NOTHING, (1, 2))
        return [first, Turn(640, ms, cached, (3, 4)), Turn(1280, ms, cached, last)]

    runs = {
        COMPUTED: Conversation(turns(1000.0, 0), None),
        FILE: Conversation(turns(400.0, 640), 1000.0),
        OURS: Conversation(turns(250.0, storage, last), 520.0),
    }
    return form_report("multi-head", runs, Tokens(10, 640))


def test_the_program_ends_with_one_when_a_reply_differs_or_a_hit_did_not_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = build_report([make_form((7, 9)), make_form(storage=0)], ABOUT)
    demo = replace(PROGRAM, measure=lambda run: report, serves=False)
    assert demo.main(["--out", str(tmp_path / "deep")]) == 1
    said = capsys.readouterr().out
    assert "FAILED multi-head, question 3: replies differ" in said
    assert "FAILED multi-head, question 2: nothing came from L3" in said
    assert json.loads((tmp_path / "deep" / "demo.json").read_text())["problems"]
    assert (tmp_path / "deep" / "demo.png").exists()
