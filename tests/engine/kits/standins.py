"""The smallest stand-ins for what SGLang's kits take from the network or from a trained model."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import random
import sys
import unittest
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from bench.harness.models import build_model
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

VOCABULARY = 32_000
"""Kits draw token ids up to 31,999."""
UNKNOWN = "<unknown>"
SPOKEN = (
    *("kits.pause_generation_kit", "kits.abort_timeout_kit"),
    *("kits.streaming_session_kit", "server_fixtures.streaming_session_fixture"),
)
"""Modules with texts."""


def kit(name: str) -> Any:
    """The module `name` of `sglang.test`; a test that needs one that is missing is skipped."""
    if not _is_there(name):
        pytest.skip(f"this version of SGLang has no sglang.test.{name}")
    with _no_datasets():
        return import_module(f"sglang.test.{name}")


def _is_there(name: str) -> bool:
    stub_torchvision()
    return find_spec(f"sglang.test.{name}") is not None


@contextlib.contextmanager
def _no_datasets() -> Iterator[None]:
    """Modules that kits import want Hugging Face's `datasets`, which nothing here downloads."""
    if find_spec("datasets") is not None:
        yield
        return
    stub = ModuleType("datasets")
    vars(stub)["load_dataset"] = None
    with mock.patch.dict(sys.modules):  # what is imported meanwhile stays, below
        sys.modules["datasets"] = stub
        yield
        imported = dict(sys.modules)
    del imported["datasets"]
    sys.modules.update(imported)


def case(mixin: type, **attributes: Any) -> Any:
    """An instance of a kit's class of tests; its tests are called as methods, one by one."""
    return type(mixin.__name__, (mixin, unittest.TestCase), attributes)("run")


def speaking_model(model_cache: Path, folder: Path) -> Path:
    """Folder of a random Llama with a tokenizer that knows the words in the texts of the kits."""
    model = build_model("llama", model_cache, vocab_size=VOCABULARY)
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    spoken = [kit(name) for name in SPOKEN if _is_there(name)]
    names = sorted({word for module in spoken for word in _words(module)})
    names = [UNKNOWN, *names, *(f"w{n}" for n in range(VOCABULARY - len(names) - 1))]
    _save_tokenizer(names, folder)
    return folder


def _pieces() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )


def _words(module: ModuleType) -> set[str]:
    """The words in the string constants of a module, and digits."""
    pieces, texts = _pieces(), ["0 1 2 3 4 5 6 7 8 9"]
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
    return {word for text in texts for word, _ in pieces.pre_tokenize_str(text)}


def _save_tokenizer(names: Sequence[str], folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids = {name: number for number, name in enumerate(names)}
    assert len(ids) == VOCABULARY
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = _pieces()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def texts_to_draw(file: Path, tokenizer: Any, count: int, tokens: int) -> Path:
    """A file like the one of conversations that a kit downloads: random texts of known words."""
    rng = random.Random(5)
    words = [word for word, number in tokenizer.get_vocab().items() if 0 < number < 200]
    words = sorted(word for word in words if word.isalpha())
    texts = [" ".join(rng.choices(words, k=tokens)) for _ in range(count)]
    talks = [{"conversations": [{"value": text}, {"value": "."}]} for text in texts]
    file.write_text(json.dumps(talks))
    return file


def random_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 30_000) for _ in range(tokens)] for _ in range(count)]
