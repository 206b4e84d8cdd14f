"""Talks with a real model on real SGLang servers, and brings the conversation back from disk.

A model answers three questions about a module of Python's standard library. Between them its cache
is evicted, as if others had used the server. One server computes the conversation anew, one reads
it by SGLang's `file` backend, and one by this backend. The model is SmolLM2-135M-Instruct in two
forms with the same function: with multi-head attention, hidden states are stored; with
grouped-query attention, as published, options are the defaults, except that every hit is read. If
the model cannot be had, a random one is used.

Exit status: 0; 1 when a reply differs or nothing came from L3; 2 when the demo could not run.
"""

import asyncio
import inspect
import random
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE, ModelMissing, source_facts
from bench.harness.client import Reply, StreamingClient
from bench.harness.machine import Machine
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY
from bench.harness.program import Advance, Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Picture, Results, Series, Table, by
from bench.harness.restorer import l3_bytes
from bench.harness.server import CachedTokens, Server
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

REPLY_TOKENS = 48
RANDOM = "a random Llama of 2 layers"
QUESTIONS = (
    "In two sentences: what is this code for?",
    "Which function would you call to add a prefix to every line? Answer in one sentence.",
    "Write one line of Python that calls it.",
)
COMPUTED, FILE, OURS = "computed", "file", "ours"
METHODS_OF = {COMPUTED: "recompute", FILE: "file", OURS: "hcache-eager"}
SHOWN = {COMPUTED: "computed", FILE: "SGLang `file`", OURS: "hcache"}


class Form(NamedTuple):
    """A form of the model, also with random weights, and what ours stores of it.

    Attributes:
        options: Of ours besides the defaults. Every hit is read, also on a machine that is busy.
    """

    model: str
    kv_heads: int
    stored: str
    options: Mapping[str, Any]


FORMS = {
    # By default a CPU stores K and V of this one: it projects slowly compared with its copies.
    "multi-head": Form("smollm2-mha", 8, "hidden states", {"mode": "hidden"}),
    "grouped-query": Form("smollm2", 2, "K and V", {}),
}


class Words:
    """Questions about a module of the standard library, in the model's chat template."""

    def __init__(self, model: Path, tokens: int) -> None:
        stub_torchvision()
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        source = self._tokenizer.encode(inspect.getsource(textwrap), add_special_tokens=False)
        self._source = self._tokenizer.decode(source[:tokens])

    def question(self, number: int) -> list[int]:
        """The tokens that the next prompt adds to all before it."""
        asked = QUESTIONS[number]
        if not number:
            asked = f"This is a part of a Python module:\n\n{self._source}\n\n{asked}"
        start = "" if not number else "<|im_end|>\n"
        said = f"{start}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = self._tokenizer.encode(said, add_special_tokens=False)
        return ids

    def text(self, reply: Sequence[int]) -> str | None:
        return str(self._tokenizer.decode(reply, skip_special_tokens=True)).strip()


class Tokens:
    """Random tokens, for a random model."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary, self._tokens = vocabulary, tokens

    def question(self, number: int) -> list[int]:
        dice = random.Random(number)
        return [dice.randrange(self._vocabulary) for _ in range(20 if number else self._tokens)]

    def text(self, reply: Sequence[int]) -> str | None:
        return None


Talk = Words | Tokens


@dataclass(frozen=True)
class Turn:
    """One question behind ``history`` tokens. ``reply`` is without the end of the message."""

    history: int
    ttft_ms: float
    cached: CachedTokens
    reply: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """A conversation on one server; ``bytes_per_token`` of its L3, if it has one."""

    turns: Sequence[Turn]
    bytes_per_token: float | None


def converse(
    method: str,
    heads: str,
    model: Path,
    talk: Talk,
    machine: Machine,
    folder: Path,
    said: Advance,
) -> Conversation:
    """Have the conversation on a server of ``method``; device and host memory are emptied between
    turns, as if others had used them meanwhile.

    Raises:
        ServerError: The server did not start.
        RequestError: A request failed.
    """
    place, ours = folder / method, FORMS[heads].options if method == OURS else None
    way = METHODS[METHODS_OF[method]]
    options = server_options(way, machine, model, place, pool_tokens=8192, hcache=ours)
    turns: list[Turn] = []
    history: list[int] = []
    place.mkdir(parents=True, exist_ok=True)
    with Server(options) as server:
        for number in range(len(QUESTIONS)):
            said(f"{heads}, {SHOWN[method]}: question {number + 1}")
            prompt = history + talk.question(number)
            turn = _ask(server, prompt, len(history))
            turns.append(turn)
            history = [*prompt, *turn.reply]
            server.flush_cache(300)
        stored = l3_bytes(place / "l3")
    whole = len(history) // PAGE_SIZE * PAGE_SIZE
    return Conversation(turns, stored / whole if stored else None)


def _ask(server: Server, prompt: Sequence[int], history: int) -> Turn:
    """One streamed request, greedy, up to the end of the message."""

    async def ask() -> Reply:
        async with StreamingClient(server.url, ADMIN_KEY) as client:
            return await client.generate(prompt, REPLY_TOKENS, ignore_eos=False)

    reply = asyncio.run(ask())
    ids = reply.output_ids[:-1] if reply.stopped else reply.output_ids
    return Turn(history, 1e3 * reply.ttft_s, reply.cached, tuple(ids))


def form_report(heads: str, runs: Mapping[str, Conversation], talk: Talk) -> dict[str, Any]:
    computed = runs[COMPUTED].turns
    turns = [
        {
            "history_tokens": turn.history,
            "ttft_ms": {name: run.turns[number].ttft_ms for name, run in runs.items()},
            "from_l3": {name: run.turns[number].cached.storage for name, run in runs.items()},
            "same_reply": all(run.turns[number].reply == turn.reply for run in runs.values()),
            "reply": talk.text(turn.reply),
        }
        for number, turn in enumerate(computed)
    ]
    sizes = {name: runs[name].bytes_per_token for name in (FILE, OURS)}
    return {"heads": heads, "stored": FORMS[heads].stored, "bytes_per_token": sizes, "turns": turns}


def build_report(forms: Sequence[Mapping[str, Any]], about: Mapping[str, object]) -> dict[str, Any]:
    """The content of ``demo.json``; ``about`` comes first in it."""
    found = problems(forms)
    return {**about, "succeeded": not found, "problems": found, "forms": list(forms)}


def problems(forms: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line each; empty when the demo succeeded."""
    found = []
    for form in forms:
        for number, turn in enumerate(form["turns"], 1):
            where = f"{form['heads']}, question {number}"
            if not turn["same_reply"]:
                found.append(f"{where}: replies differ")
            if number > 1 and not turn["from_l3"][OURS]:
                found.append(f"{where}: nothing came from L3")
    return found


def times_sooner(report: Mapping[str, Any]) -> float:
    """How many times sooner than by computing the first token comes, at the median."""
    return statistics.median(
        turn["ttft_ms"][COMPUTED] / turn["ttft_ms"][OURS]
        for form in report["forms"]
        for turn in form["turns"][1:]
    )


def finding(report: Mapping[str, Any]) -> str:
    hidden, file = (report["forms"][0]["bytes_per_token"][name] for name in (OURS, FILE))
    return (
        f"From disk the next reply begins {times_sooner(report):.0f} times sooner than computed "
        f"anew; hidden states take {hidden / file:.2f} of the bytes."
    )


def turns(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The questions behind a history, of both forms of the model."""
    return [
        {
            **turn,
            "form": f"{form['heads']}: {form['stored']}",
            "bytes": " / ".join(f"{form['bytes_per_token'][name]:,.0f}" for name in (FILE, OURS)),
            "same": "yes" if turn["same_reply"] else "NO",
            "name": f"{turn['history_tokens']:,} tokens, of history",
        }
        for form in results["forms"]
        for turn in form["turns"][1:]
    ]


def headline(results: Mapping[str, Any]) -> str:
    return (
        f"From disk the next reply begins {times_sooner(results):.0f} times sooner "
        f"({results['model']}, float32, {results['device']})"
    )


def said(results: Mapping[str, Any]) -> list[str]:
    """The conversation, the finding, and problems."""
    lines = [f"The model is random: {results['why_random']}."] if results["why_random"] else []
    for question, turn in zip(QUESTIONS, results["forms"][0]["turns"], strict=True):
        if turn["reply"] is not None:
            lines += [f"> {question}", turn["reply"], ""]
    lines.append(
        f"{results['model']}, float32; the cache was evicted before each of these replies."
    )
    return [*lines, finding(results), *(f"FAILED {problem}" for problem in results["problems"])]


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


def _model(heads: str, folder: Path, tokens: int, *, random: bool) -> tuple[Path, Talk]:
    if random:
        shape = TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=FORMS[heads].kv_heads)
        return shape.build(folder), Tokens(shape.vocabulary, tokens)
    model = real_model(FORMS[heads].model)
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
