"""Times to the first token at each speed of L3, and when L3 stops."""

import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.harness.program import Advance
from bench.harness.rounds import median_interval
from bench.harness.turns import NO_L3, Answer, Turns, differing
from bench.hits.cases import ALWAYS, OURS

Row = dict[str, Any]
_LEARNING, _COMPUTED = 4, 2
"""Requests at a new speed that do not count, because a server measures it: hits, and before them
requests without hits, which show a server the time of computing."""
_TRYING_SECONDS = 60.0  # how long a server may take to see that L3 is fast again
_COMPARED = (OURS, NO_L3)  # these have every round; others if they are at first half as fast


def at_speed(turns: Turns, speed: float, rounds: int, advance: Advance) -> Row:
    """Seconds to the first token, in rounds of one request to every server in changing order."""
    rate = learn(turns, OURS, speed)
    names, wrong = list(turns.servers), 0
    found: dict[str, list[Answer]] = {name: [] for name in names}
    for number in range(rounds):
        advance(f"L3 at {speed:g} times the speed of computing, round {number + 1}")
        answers = turns.round(names, number)
        wrong += differing(answers)
        for name, answer in answers.items():
            found[name].append(answer)
        if not number:
            most = 2 * min(answer.seconds for answer in answers.values())
            names = [n for n in names if n in _COMPARED or answers[n].seconds < most]
    seconds = {name: [answer.seconds for answer in all_] for name, all_ in found.items()}
    shares = {name: median(answer.share for answer in all_) for name, all_ in found.items()}
    return {
        "speed": speed,
        "mb_per_s": rate / 1e6,
        "ms": {name: 1e3 * median(taken) for name, taken in seconds.items()},
        "share_from_l3": shares,
        "rounds_ms": {name: [round(1e3 * s, 1) for s in taken] for name, taken in seconds.items()},
        "differing_replies": wrong,
        **compared(seconds[OURS], seconds[NO_L3], seconds[ALWAYS]),
    }


def learn(turns: Turns, name: str, speed: float) -> float:
    """Slow L3 down, and let a server see that in requests of its own; returns bytes per second.

    A server for which L3 was slow, or hung, tries it again only after some time.
    """
    rate = turns.slow_down(speed, ALWAYS)
    for _ in range(_COMPUTED):
        turns.ask(name, turns.new_history())
    for _ in range(_LEARNING):
        turns.ask(name, turns.new_question())
    is_fast, deadline = not speed or speed > 1, time.monotonic() + _TRYING_SECONDS
    while is_fast and time.monotonic() < deadline:
        if turns.ask(name, turns.new_question()).share:
            break
    return rate


def stalled(turns: Turns, name: str, seconds: float | None) -> float:
    """Seconds to the first token when L3, twice as fast as computing, stops in the middle, and goes
    on after ``seconds``; None: when the reply is there."""
    restored, prompt = turns.servers[name], turns.new_question()
    rate = learn(turns, name, 2.0)
    before = turns.computing / 5  # of the half that reading takes
    events = [threading.Timer(before, restored.slow_down, kwargs={"l3": -1.0})]
    if seconds is not None:
        events.append(threading.Timer(before + seconds, restored.slow_down, kwargs={"l3": rate}))
    with restored.turn():
        for event in events:
            event.start()
        start = time.perf_counter()
        restored.server.generate(prompt, 1)
        taken = time.perf_counter() - start
        for event in events:
            event.cancel()
            event.join()
        restored.slow_down(l3=rate)
        restored.server.flush_cache(300)
    return taken


def compared(ours: Sequence[float], *others: Sequence[float]) -> Row:
    """Compare ours with the better one of the others, round by round.

    Returns:
        ``of_better``, the median difference as a ratio of the better one's median, and
        ``interval``, the ends of its 95% interval; None with too few rounds.
    """
    better = min(others, key=median)
    least = median(better)
    differences = [mine - other for mine, other in zip(ours, better, strict=False)]
    ends = median_interval(differences)
    return {
        "of_better": 1 + median(differences) / least,
        "interval": None if ends is None else [1 + end / least for end in ends],
    }
