"""The demo's conversation with every server, and times behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.demo.talk import QUESTIONS, REPLY_TOKENS, Form, Subject
from bench.harness.machine import Machine
from bench.harness.methods import METHODS, PAGE_SIZE, Method
from bench.harness.restorer import l3_bytes
from bench.harness.turns import NO_L3, Answer, Turns, empty_servers
from bench.hits.measure import compared

FILE, OURS = "file", "ours"
COMPARED: dict[str, Method] = {
    NO_L3: Method("computed", "none"),
    FILE: METHODS[FILE],
    OURS: Method("HCache", storage="dynamic", hcache={"min_gain": 1.0}),
}
DISKS = {"this disk": 0.0, "slow disk": 1.0}
"""How many times as fast as computing L3 brings K and V as `file` stores them; 0: no limit."""
_LEARNING = 2
"""Questions at a new speed that do not count: two in a row are believed."""
DTYPE = "float32"
"""Of the servers: in it, replies are the same token for token."""
Advance = Callable[[str], None]


def disks_of(machine: Machine) -> Mapping[str, float]:
    """Those that can be had: the CPU engine can slow L3 down."""
    return {name: speed for name, speed in DISKS.items() if machine.device == "cpu" or not speed}


def steps(subject: Subject, rounds: int, machine: Machine) -> int:
    """How often :func:`measure` calls ``advance``."""
    return len(subject.forms) * (1 + len(QUESTIONS) + rounds * len(disks_of(machine)))


def measure(
    subject: Subject, machine: Machine, scratch: Path, rounds: int, advance: Advance
) -> list[dict[str, Any]]:
    """Every form of the model: the conversation, then further questions behind it.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    return [_form(form, subject, machine, scratch, rounds, advance) for form in subject.forms]


def _form(
    form: Form,
    subject: Subject,
    machine: Machine,
    scratch: Path,
    rounds: int,
    advance: Advance,
) -> dict[str, Any]:
    first = subject.first_prompt()
    most = len(first) + len(QUESTIONS) * (REPLY_TOKENS + PAGE_SIZE)
    ours = COMPARED[OURS]
    methods = COMPARED | {OURS: replace(ours, hcache={**ours.hcache, **form.hcache})}
    advance(f"{form.name}: starting three servers")
    model = form.build(scratch)
    with empty_servers(machine, model, methods, most, scratch, dtype=DTYPE) as turns:
        turns.question = subject.further_question
        talk, ids = _conversation(turns, subject, first, form.name, advance)
        turns.history = ids[: len(ids) // PAGE_SIZE * PAGE_SIZE]
        turns.bytes = {name: l3_bytes(server.l3) for name, server in turns.servers.items()}
        # Of a last reply's last token there is no K and V, so a page more may be missing.
        stored = (len(ids) - 1) // PAGE_SIZE * PAGE_SIZE
        disks = [
            _disk(turns, f"{form.name}, {name}", speed, rounds, advance) | {"disk": name}
            for name, speed in disks_of(machine).items()
        ]
        return {
            "model": form.name,
            "stored": form.stored,
            "conversation": talk,
            "history_tokens": turns.tokens,
            "computing_ms": round(1e3 * turns.computing, 1),
            "bytes_per_token": {name: turns.bytes[name] / stored for name in (FILE, OURS)},
            "disks": disks,
        }


def _conversation(
    turns: Turns, subject: Subject, prompt: list[int], name: str, advance: Advance
) -> tuple[list[dict[str, Any]], list[int]]:
    """All turns on all servers, which have only L3 between them.

    Returns:
        A row of results for each turn, and the token ids of the whole conversation.
    """
    talk, before = [], 0
    for number, question in enumerate(QUESTIONS):
        advance(f"{name}: {question}")
        answers = {method: turns.ask(method, prompt, REPLY_TOKENS) for method in COMPARED}
        reply = answers[NO_L3].output_ids
        talk.append(
            {
                "question": question,
                "reply": subject.text(reply),
                "prompt_tokens": len(prompt),
                "history_tokens": before,
                "reply_tokens": len(reply),
                "ttft_ms": {method: _ms(answer) for method, answer in answers.items()},
                "from_l3": {method: answers[method].from_l3 for method in (FILE, OURS)},
                "same_reply": {
                    method: answers[method].output_ids == reply for method in (FILE, OURS)
                },
            }
        )
        before = len(prompt) + len(reply)
        if number + 1 < len(QUESTIONS):
            prompt = subject.next_prompt(prompt, reply, QUESTIONS[number + 1])
    return talk, [*prompt, *reply]


def _disk(turns: Turns, name: str, speed: float, rounds: int, advance: Advance) -> dict[str, Any]:
    """Times to the first token of further questions; the disk as it is must come first."""
    rate = turns.slow_down(speed, FILE) if speed else 0.0
    for _ in range(_LEARNING if speed else 0):  # of the disk as it is, the conversation told
        turns.ask(OURS, turns.new_question())
    answers: dict[str, list[Answer]] = {method: [] for method in COMPARED}
    for number in range(rounds):
        advance(f"{name}: round {number + 1}")
        prompt = turns.new_question()
        order = list(COMPARED)
        for method in order[number % 3 :] + order[: number % 3]:
            answers[method].append(turns.ask(method, prompt))
    seconds = {method: [answer.seconds for answer in all_] for method, all_ in answers.items()}
    if not speed:
        turns.computing = median(seconds[NO_L3])
    replies = {method: [answer.output_ids for answer in all_] for method, all_ in answers.items()}
    return {
        "mb_per_s": round(rate / 1e6, 2) or None,
        "ttft_ms": {method: round(1e3 * median(all_), 1) for method, all_ in seconds.items()},
        "share_from_l3": {
            method: median(answer.share for answer in answers[method]) for method in (FILE, OURS)
        },
        "same_reply": {method: replies[method] == replies[NO_L3] for method in (FILE, OURS)},
        "ours": compared(seconds[OURS], seconds[NO_L3], seconds[FILE]),
        "rounds_ms": {method: [_ms(answer) for answer in all_] for method, all_ in answers.items()},
    }


def _ms(answer: Answer) -> float:
    return round(1e3 * answer.seconds, 1)
