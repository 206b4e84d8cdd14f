"""How ``bench.accuracy`` chooses what it scores, and how it scores; no model."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.accuracy import pairs
from bench.accuracy.measure import Found, Sizes, by_distance
from bench.accuracy.methods import paired
from bench.fixtures.text import Recalled, Text
from bench.harness.methods import PAGE_SIZE
from hcache_backend.krul.pairs import closest_pairs
from hcache_kernels.codecs import Cut

SIZES = Sizes(texts=1, history=64, turn=32)


def log_probabilities(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_only_values_that_the_history_gave_are_asked_for() -> None:
    recalled = [
        Recalled(start=40, stop=41, given=10),  # asked in the history
        Recalled(start=64, stop=65, given=30),  # the turn's first token: no place is behind it
        Recalled(start=70, stop=72, given=63),
        Recalled(start=90, stop=91, given=70),  # given in the turn
    ]
    assert list(SIZES.asks(Text([0] * 96, recalled))) == [(slice(5, 7), 7)]


def test_values_are_counted_by_the_power_of_two_above_their_distance() -> None:
    found = by_distance([(3, True), (32, False), (33, True), (300, True), (512, True)])
    assert found == {"32": [1, 2], "64": [1, 1], "512": [2, 2]}


def test_a_value_of_several_tokens_is_recalled_when_all_of_them_are() -> None:
    said = log_probabilities([0.9, 0.1], [0.9, 0.1], [0.1, 0.9])
    found = Found()
    found.add(said, torch.tensor([0, 1, 1]), iter([(slice(0, 2), 40), (slice(2, 3), 50)]))
    assert found.report()["recall"] == {"64": [1, 2]}
    assert found.nll == pytest.approx([-math.log(p) for p in (0.9, 0.1, 0.9)])


def test_divergence_is_from_the_reference_and_zero_only_where_both_say_the_same() -> None:
    reference, said = (
        log_probabilities([0.5, 0.5], [0.8, 0.2]),
        log_probabilities([0.5, 0.5], [0.4, 0.6]),
    )
    found = Found()
    found.add(said, torch.tensor([0, 0]), iter([]))
    found.compare("int8", said, reference)
    assert found.kl == pytest.approx([0.0, 0.8 * math.log(2) + 0.2 * math.log(1 / 3)], abs=1e-6)
    assert found.same == [True, False]
    assert found.report()["same"] == 1


@pytest.mark.parametrize("layers", [4, 6, 8, 22])
def test_every_choice_makes_as_many_pairs(layers: int) -> None:
    distances = torch.rand(layers, layers, generator=torch.Generator().manual_seed(layers))
    chosen = closest_pairs(distances + distances.T, range(layers), pairs.PAIRED)
    fixed = pairs.fixed(layers)
    assert len(fixed) == len(chosen)
    assert fixed[-1] == (layers - 2, layers - 1)


HEADS, DIM, TOKENS = 2, 8, 32


def history(layers: int, tokens: int = TOKENS) -> tuple[Any, Any]:
    """An engine, and a history of two pages of random K, V and queries."""
    source = torch.Generator().manual_seed(0)

    def values() -> torch.Tensor:
        return torch.randn(tokens, HEADS, DIM, generator=source).bfloat16()

    engine = SimpleNamespace(
        layers=[SimpleNamespace(kernel=SimpleNamespace(scaling=0.3))] * layers,
        page_cut=Cut(HEADS * DIM, tokens // 2, pieces=1),
        kv_shape=(HEADS, DIM),
        dtype=torch.bfloat16,
    )
    every = range(layers)
    kv = [(values(), values()) for _ in every]
    return engine, SimpleNamespace(kv=kv, queries=[values()[-8:] for _ in every])


def test_of_two_layers_that_are_alike_a_merge_changes_least() -> None:
    engine, text = history(4)
    text.kv[3] = tuple(2 * part for part in text.kv[1])
    changes = pairs.merge_changes(engine, text)
    assert float(changes[1, 3]) < 0.01 and float(changes[0, 2]) > 0.3


def test_pairs_of_layers_come_back_by_every_form_in_their_bytes() -> None:
    engine, text = history(4, 2 * PAGE_SIZE)
    stored: list[Any] = []
    engine.pool = SimpleNamespace(store=lambda kernel, slots, k, v: stored.append((k, v)))
    engine.kv_bytes, text.slots = 2 * HEADS * DIM * 2, torch.arange(2 * PAGE_SIZE)
    found = list(paired(engine))
    assert [method.name.rpartition(", ")[2] for method in found] == ["merged", "merged", "fp8"]
    for method in found:
        stored.clear()
        assert method.restore(text) == 0
        assert [part.shape for part, _ in stored] == [k.shape for k, _ in text.kv]
        assert 0.5 < method.bytes_per_token / (4 * engine.kv_bytes) < 0.9
