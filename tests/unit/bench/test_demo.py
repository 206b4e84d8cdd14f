"""The demo's subject, report and verdict, from canned times; no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from bench.demo import measure as measuring
from bench.demo import talk
from bench.demo.__main__ import main
from bench.demo.measure import COMPARED, _conversation, _disk
from bench.demo.report import (
    build_report,
    draw,
    finding,
    headline,
    problems,
    short_lines,
    table,
    table_lines,
    talk_lines,
)
from bench.demo.talk import QUESTIONS, Subject, find_subject, random_subject
from bench.fixtures.smollm2 import ModelMissing
from bench.harness.turns import Answer

ABOUT: dict[str, object] = {
    "date": "2026-01-01T00:00:00+00:00",
    "device": "a machine",
    "sglang_version": "0.5.21",
    "model": {
        "name": "a model",
        "parameters": "135 million",
        "layers": 30,
        "weights": "trained",
        "dtype": "float32",
    },
    "rounds": 3,
}


def make_models() -> list[dict[str, Any]]:
    """A model on a disk that is fast, and on one that is slow."""

    def disk(name: str, rate: float | None, file: float, ours: float) -> dict[str, Any]:
        return {
            "disk": name,
            "mb_per_s": rate,
            "ttft_ms": {"none": 1000.0, "file": file, "ours": ours},
            "share_from_l3": {"file": 1.0, "ours": 1.0},
            "same_reply": {"file": True, "ours": True},
            "ours": {"of_better": ours / 1000, "interval": [0.9, 1.1]},
        }

    turn = {
        "question": "What is it?",
        "reply": "A module.",
        "prompt_tokens": 747,
        "history_tokens": 730,
        "reply_tokens": 3,
        "same_reply": {"file": True, "ours": True},
    }
    return [
        {
            "model": "9 KV heads (MHA)",
            "stored": "hidden states",
            "history_tokens": 832,
            "conversation": [turn],
            "bytes_per_token": {"file": 8192.0, "ours": 4112.0},
            "disks": [
                disk("this disk", None, 300.0, 250.0),
                disk("slow disk", 13.5, 4200.0, 1010.0),
            ],
        }
    ]


def test_a_report_of_replies_that_agree_succeeded() -> None:
    report = json.loads(json.dumps(build_report(make_models(), ABOUT)))
    assert report["succeeded"] is True
    assert report["models"] == make_models()


@pytest.mark.parametrize(("method", "title"), [("file", "KV, SGLang file L3"), ("ours", "HCache")])
def test_another_reply_fails_the_demo(method: str, title: str) -> None:
    models = make_models()
    models[0]["disks"][1]["same_reply"][method] = False
    models[0]["conversation"][0]["same_reply"][method] = False
    report = build_report(models, ABOUT)
    assert report["succeeded"] is False
    said = f"a reply with {title} differs from that without a cache"
    assert problems(models) == [
        f"9 KV heads (MHA), {where}: {said}" for where in ("turn 1", "slow disk")
    ]
    assert table_lines(report).count("| NO |") == 2


def test_a_history_that_does_not_come_from_the_disk_as_it_is_fails_the_demo() -> None:
    models = make_models()
    for disk in models[0]["disks"]:
        disk["share_from_l3"]["ours"] = 0.0  # from a slow disk a hit may be refused
    assert problems(models) == ["9 KV heads (MHA), this disk: nothing came from L3"]


def test_what_is_printed_fits_a_terminal_of_80_columns() -> None:
    report = build_report(make_models(), ABOUT)
    console = Console(width=80, record=True, file=StringIO())
    console.print(headline(report), table(report))
    text = console.export_text() + "\n".join(talk_lines(report))
    assert max(map(len, text.splitlines())) <= 80
    for part in ("135 million", "medians of 3 rounds", "8,192", "4,112", "0.25", "yes"):
        assert part in text
    for part in ("> What is it?", "  A module.", "730 of 747 tokens were evicted"):
        assert part in text


def test_the_table_of_the_documentation_has_a_row_for_each_model_and_disk() -> None:
    report = build_report(make_models(), ABOUT)
    rows = [line for line in table_lines(report).splitlines() if line.startswith("| 9 KV")]
    assert rows == [
        "| 9 KV heads (MHA); hidden states | this disk | 1.00 | 0.30 | 0.25 | 8,192 "
        "| 4,112 | yes |",
        "| 9 KV heads (MHA); hidden states | slow disk, 13.5 MB/s | 1.00 | 4.20 | 1.01 | 8,192 "
        "| 4,112 | yes |",
    ]
    assert "0.25 of the time and 0.50 of the bytes with hidden states" in finding(report)
    assert short_lines(report).splitlines() == ["> **What is it?**", ">", "> A module."]


def test_the_picture_is_a_png_that_is_readable_at_850_pixels(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(build_report(make_models(), ABOUT))
    figure.savefig(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert figure.get_figwidth() <= 8.5
    assert min(text.get_fontsize() for axes in figure.axes for text in axes.texts) >= 10


class CannedTurns:
    """Servers that answer at once: our reply to a prompt is that of the others, or another."""

    def __init__(self, ours: int = 7) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.computing, self.speed = 0.0, 0.0
        self._ours = ours

    def ask(self, name: str, prompt: Sequence[int], reply_tokens: int = 1) -> Answer:
        self.asked.append((name, tuple(prompt)))
        seconds = {"none": 2.0, "file": 1.0, "ours": 0.5}[name]
        reply = (7, self._ours if name == "ours" else 7)[:reply_tokens]
        return Answer(seconds, 1.0, reply, None, from_l3=64)

    def new_question(self) -> list[int]:
        return [1, 2]

    def slow_down(self, speed: float, like: str) -> float:
        self.speed = speed * 1e6 / self.computing
        return self.speed


def test_all_servers_are_asked_the_same_and_a_reply_is_part_of_the_next_prompt() -> None:
    turns, subject = CannedTurns(ours=8), random_subject()
    found, ids = _conversation(turns, subject, [5], "M", lambda _: None)  # type: ignore[arg-type]
    assert [name for name, _ in turns.asked] == [*COMPARED] * len(QUESTIONS)
    prompts = [prompt for name, prompt in turns.asked if name == "ours"]
    assert prompts[1] == (5, 7, 7, *QUESTIONS[1].encode())
    assert ids == [*prompts[2], 7, 7]
    assert [turn["same_reply"] for turn in found] == [{"file": True, "ours": False}] * 3
    assert [turn["history_tokens"] for turn in found] == [0, 3, len(prompts[1]) + 2]


def test_a_slow_disk_is_as_fast_as_computing_was_on_the_disk_as_it_is() -> None:
    turns = CannedTurns()
    found = [_disk(turns, "M", speed, 3, lambda _: None) for speed in (0.0, 1.0)]  # type: ignore[arg-type]
    assert [row["mb_per_s"] for row in found] == [None, 0.5]
    assert found[0]["ttft_ms"] == {"none": 2000.0, "file": 1000.0, "ours": 500.0}
    assert found[1]["ours"]["of_better"] == 0.5


def test_a_message_that_was_cut_off_is_ended() -> None:
    def encode(text: str) -> list[int]:
        return [len(text)]

    subject = Subject({}, [], encode, str, end=2)
    question = len("\n" + talk._message("Why?"))
    assert subject.next_prompt([9], [5, 2], "Why?") == [9, 5, 2, question]
    assert subject.next_prompt([9], [5, 6], "Why?") == [9, 5, 6, 2, question]


def test_every_further_question_is_another_one() -> None:
    subject = random_subject()
    questions = {tuple(subject.further_question(number)) for number in range(50)}
    assert len(questions) == 50
    assert max(subject.first_prompt()) < 1024


def test_a_model_that_cannot_be_had_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Subject:
        raise ModelMissing("the model is not here")

    monkeypatch.setattr(talk, "real_subject", missing)
    subject, reason = find_subject()
    assert subject.about["weights"] == "random"
    assert reason == ("the model is not here; a random model instead, whose replies mean nothing")


def fake_demo(monkeypatch: pytest.MonkeyPatch, models: list[dict[str, Any]]) -> None:
    monkeypatch.setattr("bench.demo.__main__.run", lambda *_: build_report(models, ABOUT))


def test_json_is_all_that_stands_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_demo(monkeypatch, make_models())
    out = tmp_path / "deep" / "demo.json"
    assert main(["--random", "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_exit_status_is_1_when_a_reply_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = make_models()
    models[0]["disks"][0]["same_reply"]["ours"] = False
    fake_demo(monkeypatch, models)
    assert main(["--random", "--out", str(tmp_path / "demo.json")]) == 1
    assert "FAILED 9 KV heads (MHA), this disk: a reply with" in capsys.readouterr().out


def test_disks_are_slowed_down_on_the_cpu_engine_only() -> None:
    for device, names in (("cpu", ["this disk", "slow disk"]), ("cuda", ["this disk"])):
        assert list(measuring.disks_of(SimpleNamespace(device=device))) == names  # type: ignore[arg-type]
