"""What a real model's conversations get back from disk, beside SGLang's `file` backend.

SmolLM2-135M-Instruct has read parts of Python's standard library in eight conversations. Its server
is ended by SIGKILL and started anew. One conversation goes on, then all do at once; a page on disk
is damaged; the disk hangs. These servers compute in float32, which is soonest on most CPUs. Others
store bfloat16, or hidden states of the model's multi-head form (`mode: hidden`); all other options
are the defaults, and nothing else is slowed down. If there is no such model, a random one is used.

Exit status: 0; 1 when a reply differs that must not or nothing came from L3; 2 when the demo could
not run.
"""

import asyncio
import inspect
import logging
import os
import random
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.fixtures.models import real_model
from bench.fixtures.smollm2 import TITLE, ModelMissing, source_facts
from bench.harness.client import Reply, StreamingClient
from bench.harness.methods import METHODS, PAGE_SIZE, server_options
from bench.harness.models import TinyLlama
from bench.harness.options import ADMIN_KEY, ServerOptions
from bench.harness.program import Advance, Program, Run, Setting, at_least, scratch, steps
from bench.harness.report import Picture, Results, Series, Table
from bench.harness.restorer import Restorer, forget_files, l3_bytes, page_files, restorer
from bench.harness.server import Server
from tests.cpu_engine.hcache_cpu_engine import cache_dir, stub_torchvision

REPLY_TOKENS = 16
RANDOM = "a random Llama of 2 layers"
MODULES = ("textwrap", "heapq", "random", "shlex", "string", "copy", "ast", "calendar")
QUESTIONS = (
    "In two sentences: what is this code for?",
    "Which function would you call first? Answer in one sentence.",
    "Write one line of Python that uses it.",
    "What is the name of its longest function?",
)
COMPUTED, FILE, OURS = "computed", "file", "ours"
METHODS_OF = {COMPUTED: "host", FILE: "file", OURS: "hcache-eager"}
KV_HEADS = {"smollm2": 2, "smollm2-mha": 8}  # of the random models in the place of these
HANG_S = 10.0  # after which the disk goes on
SECTOR = 4096  # bytes that are damaged
SHORT = 256  # tokens of the text when only bytes and replies are compared
WARM_UP = [1] * 8  # a prompt, because a server on a CPU does not warm up by itself


class Words:
    """Questions about modules of the standard library, in the model's chat template."""

    def __init__(self, model: Path, tokens: int) -> None:
        stub_torchvision()
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        self._tokens = tokens

    def question(self, number: int, module: str = MODULES[0]) -> list[int]:
        """The tokens that the next prompt adds to all before it."""
        asked = QUESTIONS[number]
        if not number:
            source = inspect.getsource(import_module(module))
            ids = self._tokenizer.encode(source, add_special_tokens=False)[: self._tokens]
            text = self._tokenizer.decode(ids)
            asked = f"This is a part of a Python module:\n\n{text}\n\n{asked}"
        start = "" if not number else "<|im_end|>\n"
        said = f"{start}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer.encode(said, add_special_tokens=False))

    def text(self, reply: Sequence[int]) -> str | None:
        return str(self._tokenizer.decode(reply, skip_special_tokens=True)).strip()


class Tokens:
    """Random tokens, for a random model."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary, self._tokens = vocabulary, tokens

    def question(self, number: int, module: str = MODULES[0]) -> list[int]:
        dice = random.Random(f"{number} {module}")
        return [dice.randrange(self._vocabulary) for _ in range(20 if number else self._tokens)]


Talk = Words | Tokens


class Turn(NamedTuple):
    """A reply without the end of its message, and tokens of the prompt that came from L3."""

    ms: float
    from_l3: int
    reply: list[int]


class Reference(NamedTuple):
    """Conversations that begin with ``firsts``; the first of them on a server that lives on:
    ``prompts`` are its history and a question each, ``logprobs`` those of the first reply, and
    ``computed_ms`` is until the first token if all of a prompt is computed anew."""

    firsts: list[list[int]]
    history: list[int]
    prompts: list[list[int]]
    replies: list[list[int]]
    logprobs: list[float]
    computed_ms: list[float]


@dataclass(frozen=True)
class Stage:
    """What all parts of the demo need."""

    run: Run
    folder: Path
    why_random: str | None
    advance: Advance

    def model(self, form: str, tokens: int) -> tuple[Path, Talk]:
        from transformers.utils import logging as loading

        loading.set_verbosity_error()
        loading.disable_progress_bar()
        if self.why_random is not None:
            shape = TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=KV_HEADS[form])
            return shape.build(self.folder), Tokens(shape.vocabulary, tokens)
        model = real_model(form)
        return model, Words(model, tokens)

    def options(self, name: str, model: Path, case: str, tokens: int, **more: Any) -> ServerOptions:
        """Of a server whose device holds about four histories of ``tokens``."""
        place = self.folder / case / name
        place.mkdir(parents=True, exist_ok=True)
        pool = (71 * tokens // 16 // PAGE_SIZE + 8) * PAGE_SIZE
        method = METHODS[METHODS_OF[name]]
        return server_options(method, self.run.machine, model, place, pool_tokens=pool, **more)


def ask(server: Server, *prompts: Sequence[int], tokens: int = REPLY_TOKENS) -> list[Turn]:
    """Streamed greedy requests at once, up to the end of the message."""

    async def answers() -> list[Reply]:
        async with StreamingClient(server.url, ADMIN_KEY) as client:
            asked = (client.generate(prompt, tokens, ignore_eos=False) for prompt in prompts)
            return await asyncio.gather(*asked)

    return [
        Turn(1e3 * one.ttft_s, one.cached.storage, one.output_ids[: -1 if one.stopped else None])
        for one in asyncio.run(answers())
    ]


def refer(server: Server, firsts: list[list[int]], questions: list[list[int]]) -> Reference:
    server.generate(WARM_UP, 1)
    history = firsts[0] + ask(server, firsts[0])[0].reply
    prompts = [history + question for question in questions]
    replies = [ask(server, prompt)[0].reply for prompt in prompts]
    logprobs, times = scored(server, prompts[0], replies[0]), list[float]()
    for prompt in prompts:
        server.flush_cache(300)
        times.append(ask(server, prompt)[0].ms)
    return Reference(firsts, history, prompts, replies, logprobs, times)


def scored(server: Server, prompt: list[int], reply: list[int]) -> list[float]:
    """Log-probabilities of a forced reply."""
    return server.score(prompt + reply, len(prompt))[1]


def restart(stage: Stage) -> dict[str, Any]:
    """One conversation, all of them at once, a damaged page and a disk that hangs."""
    tokens = stage.run.given.tokens
    model, talk = stage.model("smollm2", tokens)
    firsts = [talk.question(0, module) for module in MODULES]
    questions = [talk.question(number) for number in range(1, len(QUESTIONS))]
    stage.advance("a server that computes")
    with Server(stage.options(COMPUTED, model, "restart", tokens)) as server:
        known = refer(server, firsts, questions)
    found: dict[str, Any] = {}
    for name in (FILE, OURS):
        options = stage.options(name, model, "restart", tokens)
        l3 = options.log.parent / "l3"
        stage.advance(f"{name}: eight conversations are stored")
        with Server(options) as server:
            ask(server, firsts[0])
            server.flush_cache(300)
            pages = sorted(page_files(l3), key=lambda path: path.stat().st_mtime)
            for first in firsts[1:]:
                server.generate(first, 1)
                server.flush_cache(300)
        stage.advance(f"{name}: killed and started again")
        with restorer(options, l3) as restored:
            found[name] = come_back(stage, restored, known, pages)
    parts = {part: {name: one[part] for name, one in found.items()} for part in found[OURS]}
    return {"history_tokens": len(known.history), "computed_ms": known.computed_ms, **parts}


def come_back(
    stage: Stage, restored: Restorer, known: Reference, pages: Sequence[Path]
) -> dict[str, Any]:
    """On a server that was started again; L3 is cold before each request."""
    server = restored.server
    server.generate(WARM_UP, 1)

    def cold(*prompts: list[int], tokens: int = REPLY_TOKENS) -> list[Turn]:
        server.flush_cache(300)
        forget_files(restored.l3)
        return ask(server, *prompts, tokens=tokens)

    turns = [cold(prompt)[0] for prompt in known.prompts]
    question = known.prompts[0][len(known.history) :]
    burst = cold(*(first + question for first in known.firsts), tokens=1)
    damage(pages[len(pages) // 2])
    spoiled = cold(known.prompts[0])[0]
    server.flush_cache(300)
    logprobs = scored(server, known.prompts[0], known.replies[0])
    server.flush_cache(300)
    hung = hang(restored, known.prompts[1]) if stage.run.machine.device == "cpu" else None
    whole = sum(len(first) // PAGE_SIZE * PAGE_SIZE for first in known.firsts)
    return {
        "restart": {
            "ms": [turn.ms for turn in turns],
            "from_l3": [turn.from_l3 for turn in turns],
            "same_replies": [turn.reply for turn in turns] == known.replies,
        },
        "burst": {
            "seconds": max(turn.ms for turn in burst) / 1e3,
            "share": min(1.0, sum(turn.from_l3 for turn in burst) / whole),
        },
        "damaged": {
            "from_l3": spoiled.from_l3,
            "same_reply": spoiled.reply == known.replies[0],
            "change": max(abs(a - b) for a, b in zip(logprobs, known.logprobs, strict=True)),
        },
        "hung": hung and {"seconds": hung.ms / 1e3, "same_reply": hung.reply == known.replies[1]},
    }


def damage(page: Path) -> None:
    """Invert a sector in the middle of a file."""
    content = bytearray(page.read_bytes())
    start = max(0, (len(content) - SECTOR) // 2)
    content[start : start + SECTOR] = (255 - byte for byte in content[start : start + SECTOR])
    page.write_bytes(content)


def hang(restored: Restorer, prompt: list[int]) -> Turn:
    """A request while no read of L3 ends; they do after :data:`HANG_S`."""
    forget_files(restored.l3)
    restored.slow_down(l3=-1.0)
    end = threading.Timer(HANG_S, restored.slow_down)
    end.start()
    try:
        return ask(restored.server, prompt)[0]
    finally:
        end.cancel()
        restored.slow_down()


def stored(stage: Stage, form: str, dtype: str, hcache: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of a token, and whether anything changes when a conversation comes back: each server
    computes it, forgets it and restores it. Log-probabilities compared are those of `file`'s."""
    model, talk = stage.model(form, SHORT)
    first, question = talk.question(0), talk.question(1)
    found: dict[str, Any] = {}
    known: list[Any] = []
    for name in (FILE, OURS):
        stage.advance(f"{name}: {form}, {dtype}")
        more = {"hcache": hcache} if name == OURS else {}
        options = stage.options(name, model, f"{form}-{dtype}", SHORT, dtype=dtype, **more)
        with Server(options) as server:
            prompt = first + ask(server, first)[0].reply + question
            reply = ask(server, prompt)[0].reply
            known = known or [prompt, reply, scored(server, prompt, reply)]
            server.flush_cache(300)
            pages = page_files(options.log.parent / "l3")
            size = l3_bytes(options.log.parent / "l3") / (PAGE_SIZE * len(pages))
            turn = ask(server, known[0])[0]
            server.flush_cache(300)
            logprobs = scored(server, known[0], known[1])
        found[name] = {
            "bytes_per_token": size,
            "from_l3": turn.from_l3,
            "same_reply": turn.reply == known[1],
            "same_logprobs": logprobs == known[2],
        }
    return found


def size_gb(folder: Path) -> float:
    """Of all files below; a link counts as nothing."""
    places = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    return sum(path.lstat().st_size for path in places if not path.is_symlink()) / 1e9


def introduce(set_up_gb: float) -> None:
    said = (
        "Conversations with SGLang servers on this machine are stored by SGLang's `file` backend "
        "and by hcache with default options. Servers are killed and started again, a page is "
        "damaged, the disk hangs. This takes up to four minutes on two cores, and about 1 GB of "
        f"{tempfile.gettempdir()}, which is freed at the end. The set-up (Python packages and "
        f"models) takes {set_up_gb:.1f} GB."
    )
    print(textwrap.fill(said, 80), end="\n\n", flush=True)


def measure(run: Run) -> Results:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    why = "asked for by --random" if run.given.random else None
    try:
        source_facts()
    except ModelMissing as lacking:
        why = why or str(lacking)
    about: dict[str, Any] = {"model": RANDOM if why else TITLE, "why_random": why}
    set_up_gb = size_gb(Path(sys.prefix)) + size_gb(cache_dir())
    introduce(set_up_gb)
    with steps(9) as advance, scratch() as place:
        stage = Stage(run, Path(place), why, advance)
        parts = {
            **restart(stage),
            "bfloat16": stored(stage, "smollm2", "bfloat16", {}),
            "hidden": stored(stage, "smollm2-mha", "float32", {"mode": "hidden"}),
        }
        about["disk_gb"] = {"set_up": set_up_gb, "used": size_gb(stage.folder)}
    return {**about, **parts, "problems": problems(parts)}


def problems(results: Mapping[str, Any]) -> list[str]:
    """One line each; empty when the demo succeeded."""
    parts = {part: results[part][OURS] or {} for part in dict.fromkeys(row[1] for row in ROWS)}
    found = []
    for part, ours in parts.items():
        if not ours.get("same_replies", ours.get("same_reply", True)):
            found.append(f"{part}: the reply of hcache differs")
        from_l3 = ours.get("from_l3", ours.get("share", 1))
        if part != "damaged" and not (min(from_l3) if isinstance(from_l3, list) else from_l3):
            found.append(f"{part}: nothing came from L3")
    return found


def first_ms(results: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds to the first token after a restart, the soonest first."""
    found = {name: median(one["ms"]) for name, one in results["restart"].items()}
    found[COMPUTED] = median(results["computed_ms"])
    return dict(sorted(found.items(), key=lambda one: one[1]))


def finding(results: Mapping[str, Any]) -> str:
    ways = {COMPUTED: "computed anew", FILE: "by SGLang's file backend", OURS: "by hcache"}
    times = ", ".join(f"{ms:,.0f} ms {ways[name]}" for name, ms in first_ms(results).items())
    return f"After a restart the first token comes in {times}"


def title(results: Mapping[str, Any]) -> str:
    ours, others = (results["burst"][name]["seconds"] for name in (OURS, FILE))
    at_once = f"eight conversations at once take {ours:.1f} s by hcache, {others:.1f} s by file"
    return f"{finding(results)}; {at_once}"


ROWS = (
    ("... the same replies", "restart", "same_replies", ""),
    ("eight at once: s until all have a token", "burst", "seconds", ".1f"),
    ("... share of the histories from disk", "burst", "share", ".0%"),
    ("bfloat16: bytes of a token on disk", "bfloat16", "bytes_per_token", ",.0f"),
    ("... the same log-probabilities, every bit", "bfloat16", "same_logprobs", ""),
    ("a damaged page: the same reply", "damaged", "same_reply", ""),
    ("... largest change of a log-probability", "damaged", "change", ".2g"),
    ("... tokens from disk", "damaged", "from_l3", ",.0f"),
    ("the disk hangs: s to the first token", "hung", "seconds", ".1f"),
    ("multi-head, hidden states: bytes of a token", "hidden", "bytes_per_token", ",.0f"),
    ("... the same reply", "hidden", "same_reply", ""),
)


def rows(results: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    first = {name: f"{ms:,.0f}" for name, ms in first_ms(results).items()}
    yield {"what": "killed and started: ms to the first token", **first}
    for what, part, key, form in ROWS:
        row = {"what": what, COMPUTED: "-"}
        for name, one in results[part].items():
            if one is not None:
                row[name] = format(one[key], form) if form else "yes" if one[key] else "NO"
                if part == "hung" and one[key] >= HANG_S:
                    row[name] = f"> {HANG_S:.0f}"
        if OURS in row:
            yield row


def said(results: Mapping[str, Any]) -> list[str]:
    """What the table shows, and what it does not; and problems."""
    spoiled = results["damaged"][FILE]["same_reply"]
    parts = (results["bfloat16"], results["hidden"])
    encoded, hidden = (p[OURS]["bytes_per_token"] / p[FILE]["bytes_per_token"] for p in parts)
    lines = [
        f"{results['model']}, float32. {finding(results)}: medians of "
        f"{len(results['computed_ms'])} questions behind {results['history_tokens']:,} tokens, "
        "their files not in memory.",
        f"A token in bfloat16 takes {encoded:.2f} of the bytes of `file`.",
        "A damaged page is a miss for hcache, which computes from there on. `file` serves it: "
        f"{'the same' if spoiled else 'another'} reply.",
        f"The disk that hangs goes on after {HANG_S:.0f} s. Both servers have the prefetch policy "
        "wait_complete; hcache computes when nothing comes.",
        f"Hidden states take {hidden:.2f} of the bytes of K and V with multi-head "
        "attention. A CPU projects them slowly, so their time is no gain here.",
        f"The demo used {results['disk_gb']['used']:.1f} GB of disk, which are free again.",
    ]
    if results["hung"][OURS] is None:  # on a GPU, no disk can be held
        del lines[3]
    if results["why_random"]:
        lines.insert(0, f"The model is random: {results['why_random']}.")
    lines += [f"FAILED {problem}" for problem in results["problems"]]
    return [*(textwrap.fill(line, 80) for line in lines), ""]


def bars(results: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Seconds to the first token in each case."""
    cases = {"eight at once": "burst", f"the disk hangs, for {HANG_S:.0f} s": "hung"}
    found = [{"name": "one conversation", **{n: v / 1e3 for n, v in first_ms(results).items()}}]
    for name, part in cases.items():
        seconds = {n: one and one["seconds"] for n, one in results[part].items()}
        found.append({"name": name, **seconds})
    return {f"{results['model']}, float32, {results['device']}": found}


PROGRAM = Program(
    name="demo",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--tokens", at_least(128), 896, "tokens of each text"),
        Setting("--random", None, False, "use the random model"),
    ),
    tables=Table(
        lambda results: list(rows(results)),
        f"server = what | computed = {COMPUTED} | `file` = {FILE} | hcache = {OURS}",
    ),
    said=said,
    draw=Picture(
        title=title,
        panels=bars,
        x="name",
        x_label="after a restart, from files that are not in memory",
        y_label="seconds to the first token",
        series=(
            Series("computed", COMPUTED, "computed"),
            Series("SGLang file", FILE, "file"),
            Series("hcache, default options", OURS, "ours"),
        ),
        bars="%.2f",
    ),
    wrong=lambda results: results["problems"],
)

if __name__ == "__main__":
    PROGRAM.run()
