"""Other weights, another namespace."""

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.fingerprint import (
    any_ranks_fingerprint,
    digest_tensors,
    fingerprint,
    model_tensors,
    namespace,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def of(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    return fingerprint([digest_tensors(tensors)])


def one(tensor: torch.Tensor, name: str = "w") -> bytes:
    return of([(name, tensor)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_any_changed_bit_changes_the_fingerprint(dtype: torch.dtype, data: st.DataObject) -> None:
    raw = torch.arange(1, 1000, dtype=torch.int64).remainder(251).to(torch.uint8)
    raw = raw[: 1000 // dtype.itemsize // 4 * 4 * dtype.itemsize - dtype.itemsize]
    changed = raw.clone()
    place = data.draw(st.integers(0, len(raw) - 1))
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert one(raw.view(dtype)) != one(changed.view(dtype))
    assert one(raw.view(dtype)) == one(raw.clone().view(dtype))


def test_order_names_shapes_and_dtypes_count() -> None:
    a, b = torch.randn(8, 6), torch.randn(8, 6)
    both = of([("a", a), ("b", b)])
    assert both == of([("b", b), ("a", a)])  # by name, not by order
    assert both != of([("a", b), ("b", a)])
    others = [one(a.reshape(6, 8)), one(a.view(torch.int32)), one(a.flip(0)), one(a, "v")]
    assert one(a) not in others


def test_views_and_odd_places_in_memory_do_not_matter() -> None:
    base = torch.randn(101)
    assert one(base[1:]) == one(base[1:].clone())
    matrix = torch.randn(7, 5)
    assert one(matrix.t()) == one(matrix.t().contiguous())
    assert one(torch.tensor(2.5)) == one(torch.tensor(2.5))


def test_a_model_is_its_parameters_and_buffers() -> None:
    model = torch.nn.BatchNorm1d(4)
    before = of(model_tensors(model))
    assert model.running_mean is not None
    model.running_mean[0] = 1.0
    assert before != of(model_tensors(model))


def whole(*ranks: dict[str, torch.Tensor]) -> bytes:
    return any_ranks_fingerprint([digest_tensors(rank.items(), {"o.weight"}) for rank in ranks])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_is_divided_over_ranks_has_the_fingerprint_of_the_whole(
    dtype: torch.dtype,
) -> None:
    weights = {
        "norm": torch.randn(6, dtype=dtype),
        "qkv.weight": torch.randn(8, 6, dtype=dtype),
        "qkv.bias": torch.randn(8, dtype=dtype),
        "o.weight": torch.randn(6, 10, dtype=dtype),
        "embedding": torch.randn(11, 6, dtype=dtype),
    }

    def rank(number: int) -> dict[str, torch.Tensor]:
        padded = torch.cat([weights["embedding"], torch.zeros(1, 6, dtype=dtype)])
        return {
            "norm": weights["norm"],
            "qkv.weight": weights["qkv.weight"][number::2],
            "qkv.bias": weights["qkv.bias"][number::2],
            "o.weight": weights["o.weight"].chunk(2, dim=1)[number],
            "embedding": padded.chunk(2)[number],
        }

    assert whole(rank(0), rank(1)) == whole(weights)
    for name in weights:
        changed = {key: value.clone() for key, value in weights.items()}
        changed[name].view(-1)[3] += 1
        assert whole(changed) != whole(weights), name
    experts = torch.randn(3, 6, 10, dtype=dtype)
    halves = [{"o.weight": half} for half in experts.chunk(2, dim=2)]
    assert whole(*halves) == whole({"o.weight": experts})


def test_any_field_makes_another_namespace() -> None:
    fields = {"weights": "ab", "page_size": 64, "partition": ["hidden"] * 4}
    base = namespace(fields)
    assert len(base) == 16
    assert base == namespace(dict(reversed(fields.items())))
    for key, value in {"weights": "ac", "page_size": 16, "partition": ["kv"] * 4, "x": 1}.items():
        assert namespace({**fields, key: value}) != base
