"""The smallest stand-ins for what SGLang's kits take from the network or from a trained model."""

import contextlib
import sys
import unittest
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from bench.harness.models import build_model
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

UNKNOWN = "<unknown>"


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
    """Folder of a random Llama with a tokenizer whose tokens are the characters of ASCII."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [UNKNOWN, *map(chr, range(128))]
    model = build_model("llama", model_cache, vocab_size=len(names))
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    ids = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
