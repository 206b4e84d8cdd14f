"""Conversations from a ShareGPT file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.workload.base import Turn, WorkloadError
from bench.workload.sharegpt import sharegpt_file


class Words:
    """A token for each word: its length."""

    def encode(self, text: str) -> Sequence[int]:
        return [len(word) for word in text.split()]


def entry(*said: tuple[str, str]) -> dict[str, object]:
    return {
        "id": "x",
        "conversations": [{"from": who, "value": text} for who, text in said],
    }


def saved(folder: Path, content: object) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(content))
    return path


def test_questions_stand_as_they_are_and_replies_have_their_length(tmp_path: Path) -> None:
    path = saved(
        tmp_path, [entry(("human", "a bb"), ("gpt", "x y z"), ("human", "ccc"), ("gpt", "q"))]
    )
    workload = sharegpt_file(path, Words(), 1, 0)
    assert workload.sessions[0].turns == (Turn(2, 3, (1, 2)), Turn(1, 1, (3,)))
    assert workload.prompt_ids(0, 0, vocabulary=2) == [1, 2]


def test_a_system_prompt_and_an_unanswered_question_are_left_out(tmp_path: Path) -> None:
    path = saved(
        tmp_path,
        [entry(("system", "s"), ("human", "a"), ("gpt", "b"), ("human", "never answered"))],
    )
    assert sharegpt_file(path, Words(), 1, 0).sessions[0].turns == (Turn(1, 1, (1,)),)


def test_openchats_names_are_understood(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    path = saved(tmp_path, [{"items": items}])
    assert sharegpt_file(path, Words(), 1, 0).sessions[0].turns == (Turn(2, 1, (1, 1)),)


def test_a_history_ends_at_the_cap(tmp_path: Path) -> None:
    said = [("human", "a a"), ("gpt", "b b")] * 5
    path = saved(tmp_path, [entry(*said)])
    assert len(sharegpt_file(path, Words(), 1, 0, max_tokens=13).sessions[0].turns) == 3


def test_the_seed_chooses_the_conversations(tmp_path: Path) -> None:
    path = saved(tmp_path, [entry(("human", "a" * n), ("gpt", "b")) for n in range(1, 51)])
    chosen = {
        seed: [s.turns[0].ids for s in sharegpt_file(path, Words(), 5, seed).sessions]
        for seed in (1, 2)
    }
    again = sharegpt_file(path, Words(), 5, 1)
    assert chosen[1] == [session.turns[0].ids for session in again.sessions] != chosen[2]
    assert len(set(chosen[1])) == 5


def test_a_scale_shortens_questions(tmp_path: Path) -> None:
    path = saved(tmp_path, [entry(("human", "a bb ccc dddd"), ("gpt", "x y"))])
    small = sharegpt_file(path, Words(), 1, 0).scaled(0.5)
    assert small.sessions[0].turns == (Turn(2, 1, (1, 2)),)
    large = sharegpt_file(path, Words(), 1, 0).scaled(2)
    assert large.sessions[0].turns[0].prompt == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"conversations": []}, "must be a list of conversations, and is an object"),
        (["text"], "conversation 0 must be an object, and is a text"),
        ([{"id": 1}], "conversation 0 has no list 'conversations'"),
        ([{"conversations": [{"from": "human"}]}], "conversation 0: a turn must have the texts"),
        ([entry(("gpt", "x"))], "--num-clients 1: .* has only 0 conversations"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        sharegpt_file(saved(tmp_path, content), Words(), 1, 0)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"--sharegpt .*: No such file"):
        sharegpt_file(tmp_path / "none.json", Words(), 1, 0)
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(WorkloadError, match="not JSON"):
        sharegpt_file(path, Words(), 1, 0)
