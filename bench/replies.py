"""Replies in bfloat16 behind histories from L3, beside those of a server that computes each prompt.

SmolLM2-135M-Instruct has read parts of Python's standard library. Each server computes and stores
these histories, and forgets them. It is then asked questions behind them, at temperature 0, and
forgets each one. A front is recomputed only if a hit ends earlier by it. So one of the servers with
default options has an L3 that is held at the speed of computing, as measured on this server.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench import real
from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE
from bench.harness.methods import PAGE_SIZE, Method, server_options
from bench.harness.program import Program, Run, Setting, at_least, names, scratch, steps
from bench.harness.report import Column, Results, Table
from bench.harness.restorer import Restorer, l3_bytes, restorer
from bench.harness.server import Reply
from bench.harness.turns import NO_L3, QUESTION
from hcache_backend.cli.metrics_page import fetch

FRONT, PLAIN = "front", "plain"
COMPARED = {
    NO_L3: real.COMPARED[NO_L3],
    FRONT: Method("default options, L3 as fast as computing", storage="dynamic"),
    real.OURS: Method("default options", storage="dynamic"),
    real.NEVER: Method("`recompute: never`", storage="dynamic", hcache={"recompute": "never"}),
    PLAIN: Method("`mode: plain`", storage="dynamic", hcache={"mode": "plain"}),
    real.FILE: replace(real.COMPARED[real.FILE], title="SGLang's `file`"),
}
_LEARNING = 4  # hits in which a server sees how slow L3 has become
Prompts = Sequence[list[int]]


def asked(
    run: Run, name: str, model: Path, folder: Path, histories: Prompts, prompts: Prompts
) -> tuple[list[Reply], float]:
    """Replies of a server to all but the last few prompts, and how many tokens of these were
    recomputed as the front of a hit."""
    tokens, ours = len(histories[0]), COMPARED[name].storage == "dynamic"
    options = server_options(
        *(COMPARED[name], run.machine, model, folder / name),
        pool_tokens=2 * (tokens + QUESTION + run.given.reply + PAGE_SIZE),
        hicache_ratio=2.0 * len(histories),
        dtype="bfloat16",
        metrics=ours,
    )
    with restorer(options, folder / name / "l3") as restored:
        server = restored.server
        for history in histories if name != NO_L3 else ():
            computing = restored.recompute(history).ms / 1e3
            server.flush_cache(300)
        if name == FRONT:
            restored.slow_down(l3=l3_bytes(restored.l3) / len(histories) / computing)
            for prompt in prompts[-_LEARNING:]:
                server.generate(prompt, 1)
                server.flush_cache(300)
        before = _recomputed(restored) if ours else 0.0
        found = list[Reply]()
        for prompt in prompts[:-_LEARNING]:
            found.append(server.generate(prompt, run.given.reply, logprobs=True))
            server.flush_cache(300)
        return found, _recomputed(restored) - before if ours else 0.0


def _recomputed(restored: Restorer) -> float:
    return fetch(restored.server.url).counters["l3_tokens"].get("recomputed", 0.0)


def compared(got: Sequence[Reply], want: Sequence[Reply]) -> dict[str, Any]:
    """Replies that differ, with how close the two best tokens of ``want`` are there; and changes of
    the best token's log-probability before the first one that differs."""
    changes, ties = list[float](), list[float]()
    for mine, its in zip(got, want, strict=True):
        same = zip(mine.output_ids, its.output_ids, strict=True)
        at = next((n for n, (one, other) in enumerate(same) if one != other), None)
        if at is not None:
            ties.append(its.top2[at][0] - its.top2[at][1])
        pairs = list(zip(mine.top2, its.top2, strict=True))[:at]
        changes += [abs(one[0] - other[0]) for one, other in pairs]
    found = {"mean": fmean(changes), "largest": max(changes)} if changes else {}
    return {"differ": len(ties), "ties": sorted(ties), **found}


def measure(run: Run) -> Results:
    given, rows = run.given, list[dict[str, Any]]()
    torch.set_num_threads(1)
    tokens = given.tokens // PAGE_SIZE * PAGE_SIZE
    model, asking = real_model("smollm2"), given.questions + _LEARNING
    text = real.Text(model, given.histories * tokens)
    histories = [text.history[n * tokens :][:tokens] for n in range(given.histories)]
    prompts = [
        [*histories[n % given.histories], *text.prompt(n)[-QUESTION:]] for n in range(asking)
    ]
    with steps(len(given.methods) + 1) as advance, scratch() as folder:
        for name in (NO_L3, *given.methods):
            advance(COMPARED[name].title)
            got, front = asked(run, name, model, Path(folder), histories, prompts)
            if name == NO_L3:
                want = got
                continue
            hits = sum(reply.cached.storage for reply in got)
            rows.append(
                {
                    "method": COMPARED[name].title,
                    "hit": hits / (tokens * len(got)),
                    "recomputed": front / (tokens * len(got)),
                    "replies": len(got),
                    **compared(got, want),
                }
            )
    about = {"model": TITLE, "histories": given.histories, "tokens": tokens}
    return {**about, "reply_tokens": given.reply, "rows": rows}


_OTHERS = [name for name in COMPARED if name != NO_L3]
PROGRAM = Program(
    name="replies",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--methods", names(_OTHERS), _OTHERS, "beside the server that computes"),
        Setting("--histories", at_least(1), 2, "that each server stores"),
        Setting("--tokens", at_least(PAGE_SIZE), 1000, "of a history"),
        Setting("--questions", at_least(1), 25, "behind all of them together"),
        Setting("--reply", at_least(1), 16, "tokens of a reply"),
    ),
    tables=Table(
        "rows",
        [
            "K and V of the history = method | of a hit = hit | recomputed = recomputed",
            "replies | that differ = differ | mean change, nats = mean :.4f",
            "largest = largest :.3f",
            Column(
                "two best tokens apart at most, where replies differ",
                lambda row: max(row["ties"], default=None),
            ),
        ],
    ),
)

if __name__ == "__main__":
    PROGRAM.run()
