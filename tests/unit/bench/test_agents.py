"""Conversations of agents in the formats of clients that this project did not write."""

from itertools import chain, pairwise

from bench.workload.agents import agentic_trace, conversation, mooncake_trace, short_sessions


def test_both_formats_say_what_is_new_in_each_turn() -> None:
    sessions = short_sessions(3, 4, 45_000, 1)
    talks = [conversation(session, 40, "x".__mul__) for session in sessions]
    for session, talk in zip(sessions, talks, strict=True):
        assert all(later.shared == before.prompt for before, later in pairwise(session))
        whole = session[-1].prompt / 40
        assert len(session) == 4 and whole - 4 <= sum(map(len, talk)) <= whole + 4
    first = agentic_trace(talks)["conversations"][0]
    assert [turn["messages"][0]["content"] for turn in first] == talks[0]
    lines = [*mooncake_trace(talks, sessions, 10.0, 8)]
    assert [line["text_input"] for line in lines] == [*chain(*talks)]
    assert {line["session_id"] for line in lines[:4]} == {"0"} and lines[0]["delay"] == 0
    idle = sessions[0][1].time - sessions[0][0].answered
    assert lines[1]["delay"] == round(100 * idle)
