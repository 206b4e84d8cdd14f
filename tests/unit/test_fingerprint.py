"""Other weights, another namespace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hcache_backend.fingerprint import fingerprint_tensors, model_tensors, namespace

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def one(tensor: torch.Tensor, name: str = "w") -> bytes:
    return fingerprint_tensors([(name, tensor)])


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
    both = fingerprint_tensors([("a", a), ("b", b)])
    assert both == fingerprint_tensors([("b", b), ("a", a)])  # by name, not by order
    assert both != fingerprint_tensors([("a", b), ("b", a)])
    assert one(a) != one(a, "v")
    assert one(a) != one(a.reshape(6, 8))
    assert one(a) != one(a.view(torch.int32))
    assert one(a) != one(a.flip(0))


def test_views_and_odd_places_in_memory_do_not_matter() -> None:
    base = torch.randn(101)
    assert one(base[1:]) == one(base[1:].clone())
    matrix = torch.randn(7, 5)
    assert one(matrix.t()) == one(matrix.t().contiguous())
    assert one(torch.tensor(2.5)) == one(torch.tensor(2.5))


def test_a_model_is_its_parameters_and_buffers() -> None:
    model = torch.nn.BatchNorm1d(4)
    before = fingerprint_tensors(model_tensors(model))
    assert model.running_mean is not None
    model.running_mean[0] = 1.0
    assert before != fingerprint_tensors(model_tensors(model))


def test_any_field_makes_another_namespace() -> None:
    fields = {"weights": "ab", "page_size": 64, "partition": ["hidden"] * 4}
    base = namespace(fields)
    assert len(base) == 16
    assert base == namespace(dict(reversed(fields.items())))
    for key, value in {"weights": "ac", "page_size": 16, "partition": ["kv"] * 4, "x": 1}.items():
        assert namespace({**fields, key: value}) != base
