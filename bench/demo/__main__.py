"""Talks with a real model on real SGLang servers, and brings the conversation back from disk.

A model answers three questions about a module of Python's standard library. Between them its cache
is evicted, as if others had used the server. One server computes the conversation anew, one reads
it by SGLang's `file` backend, and one by this backend. The model is SmolLM2-135M-Instruct in two
forms with the same function: with multi-head attention, hidden states are stored; with
grouped-query attention, as published, options are the defaults, except that every hit is read. If
the model cannot be had, a random one is used.

Exit status: 0; 1 when a reply differs or nothing came from L3; 2 when the demo could not run.
"""

from pathlib import Path

from bench.demo.report import build_report, form_report, headline, said, turns
from bench.demo.talk import (
    COMPUTED,
    FILE,
    FORMS,
    OURS,
    QUESTIONS,
    SHOWN,
    Heads,
    Talk,
    Tokens,
    Words,
    converse,
)
from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE, ModelMissing, source_facts
from bench.harness.models import TinyLlama
from bench.harness.program import Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Picture, Results, Series, Table, by

RANDOM = "a random Llama of 2 layers"
_KV_HEADS = {"multi-head": 8, "grouped-query": 2}
_REAL = {"multi-head": "smollm2-mha", "grouped-query": "smollm2"}


def measure(run: Run) -> Results:
    why = "asked for by --random" if run.given.random else _why_random()
    forms = []
    with steps(len(FORMS) * (1 + 3 * len(QUESTIONS))) as advance, scratch() as folder:
        for heads in FORMS:
            advance(f"{heads}: building the model (once)")
            model, talk = _model(heads, Path(folder), run.given.tokens, random=why is not None)
            place = Path(folder) / heads
            runs = {
                method: converse(method, heads, model, talk, run.machine, place, advance)
                for method in (COMPUTED, FILE, OURS)
            }
            forms.append(form_report(heads, runs, talk))
    about = {"model": TITLE if why is None else RANDOM, "why_random": why}
    return build_report(forms, {**about, "text_tokens": run.given.tokens})


def _model(heads: Heads, folder: Path, tokens: int, *, random: bool) -> tuple[Path, Talk]:
    if random:
        shape = TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=_KV_HEADS[heads])
        return shape.build(folder), Tokens(shape.vocabulary, tokens)
    model = real_model(_REAL[heads])
    return model, Words(model, tokens)


def _why_random() -> str | None:
    """Why the real model cannot be had, or None."""
    try:
        source_facts()
    except ModelMissing as lacking:
        return str(lacking)
    return None


PROGRAM = Program(
    name="demo",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--tokens", at_least(128), 1500, "tokens of the text"),
        Setting("--random", None, False, "use the random model"),
    ),
    tables=Table(
        turns,
        (
            "attention: stored = form | bytes per token: `file` / hcache = bytes | "
            "history, tokens = history_tokens :,",
            *(f"{SHOWN[name]}, ms = ttft_ms.{name} :,.0f" for name in (COMPUTED, FILE, OURS)),
            "same reply = same",
        ),
    ),
    said=said,
    draw=Picture(
        title=headline,
        panels=by("form", turns),
        x="name",
        x_label="the next reply, evicted before",
        y_label="ms to the first token",
        series=(
            Series("computed", f"ttft_ms.{COMPUTED}", "computed"),
            Series("SGLang file", f"ttft_ms.{FILE}", "file"),
            Series("hcache", f"ttft_ms.{OURS}", "ours"),
        ),
        bars="%.0f",
    ),
    wrong=lambda results: results["problems"],
)

if __name__ == "__main__":
    PROGRAM.run()
