"""The demo's first table: default options over disks as fast and as slow as those people have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.machine import Machine
from bench.harness.methods import METHODS, Method
from bench.harness.models import TinyLlama
from bench.harness.turns import NO_L3, Answer, Turns, taking_turns
from bench.hits.measure import compared, learn

FILE, OURS = "file", "ours"
COMPARED: dict[str, Method] = {
    NO_L3: Method("computed", "none"),
    FILE: METHODS[FILE],
    OURS: Method("HCache, default options", storage="dynamic", hcache={"min_gain": 1.0}),
}
MODELS = {
    kind: TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=kv_heads, intermediate=2816)
    for kind, kv_heads in (("MHA", 8), ("GQA", 2))
}
SETTINGS = {
    "this disk": 0.0,
    "1.35x computing": 236 / 175,
    "0.24x computing": 84 / 351,
}
"""How many times as fast as computing L3 brings K and V; 0: no limit.

One SSD in an H100's server has about the first ratio for 8,192 tokens of Llama-3-8B, and the second
for 4,096 of Llama-2-7B (`hcache plan`). Nothing else of the settings is of these models.
"""
UNSLOWED = 3
"""So many times the rounds where L3 is not slowed down: milliseconds count there."""


def steps(rounds: int, machine: Machine) -> int:
    """How often :func:`measure` calls ``advance``."""
    asked = sum(_rounds(speed, rounds) for speed in settings_of(machine).values())
    return len(MODELS) * (1 + asked)


def _rounds(speed: float, rounds: int) -> int:
    return rounds if speed else UNSLOWED * rounds


def settings_of(machine: Machine) -> Mapping[str, float]:
    """Those that can be had: the CPU engine can slow L3 down."""
    slower = machine.device == "cpu"
    return {name: speed for name, speed in SETTINGS.items() if slower or not speed}


def measure(
    machine: Machine, scratch: Path, tokens: int, rounds: int, advance: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every model in every setting: a history comes back, and a question behind it is answered.

    Raises:
        ServerError: A server did not start, or a request failed.
    """
    found = []
    for kind, shape in MODELS.items():
        advance(f"{kind}: starting three servers")
        with taking_turns(machine, shape.build(scratch), COMPARED, tokens) as turns:
            settings = [
                _setting(turns, f"{kind}, {name}", speed, rounds, advance) | {"disk": name}
                for name, speed in settings_of(machine).items()
            ]
            found.append(
                {
                    "model": kind,
                    "computing_ms": round(1e3 * turns.computing, 1),
                    "bytes_per_token": {name: turns.bytes[name] / tokens for name in (FILE, OURS)},
                    "settings": settings,
                }
            )
    return found


def _setting(
    turns: Turns, name: str, speed: float, rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    rate = learn(turns, OURS, speed, FILE)
    answers: dict[str, list[Answer]] = {method: [] for method in COMPARED}
    for number in range(_rounds(speed, rounds)):
        advance(f"{name}: round {number + 1}")
        prompt = turns.new_question()
        order = list(COMPARED)
        for method in order[number % 3 :] + order[: number % 3]:
            answers[method].append(turns.ask(method, prompt))
    seconds = {method: [answer.seconds for answer in all_] for method, all_ in answers.items()}
    replies = {method: [answer.output_ids for answer in all_] for method, all_ in answers.items()}
    return {
        "mb_per_s": rate / 1e6 or None,
        "ttft_ms": {method: round(1e3 * median(all_), 1) for method, all_ in seconds.items()},
        "restore_ms": {method: _restore_ms(answers[method]) for method in (FILE, OURS)},
        "share_from_l3": {
            method: median(answer.share for answer in answers[method]) for method in (FILE, OURS)
        },
        "identical_tokens": {method: replies[method] == replies[NO_L3] for method in (FILE, OURS)},
        "ours": compared(seconds[OURS], seconds[NO_L3], seconds[FILE]),
        "rounds_ms": {
            method: [round(1e3 * s, 1) for s in all_] for method, all_ in seconds.items()
        },
    }


def _restore_ms(answers: Sequence[Answer]) -> float | None:
    """Median over those that were restored; None where most of the history was computed.

    A trial loads a few pages, and the load of a hit that was refused says nothing of a restore.
    """
    restored = [answer.restore.ms for answer in answers if answer.restore is not None]
    most_came = median(answer.share for answer in answers) >= 0.5
    return round(median(restored), 1) if most_came and restored else None
