"""Rows belong to one allocation of their slot."""

from __future__ import annotations

import pytest
import torch

from hcache_backend.capture.mirror import HiddenMirror
from hcache_kernels.codecs import make_codec

EXACT = make_codec("none", 16, torch.bfloat16)
EXP4 = make_codec("exp4", 16, torch.bfloat16)


def mirror_with(slots: torch.Tensor, first_position: int = 0) -> HiddenMirror:
    mirror = HiddenMirror(slots=64, layers=2, codec=EXACT)
    for layer in range(2):
        rows = torch.randn(len(slots), 16).bfloat16() + layer
        mirror.put_layer(layer, slots, rows)
        assert torch.equal(EXACT.decode(mirror.rows[layer][slots]), rows)
    positions = torch.arange(first_position, first_position + len(slots))
    assert mirror.commit(slots, positions, positions + 500) == len(slots)
    return mirror


def test_rows_are_valid_only_after_all_layers_are_committed() -> None:
    mirror = HiddenMirror(64, 2, EXACT)
    slots = torch.tensor([5, 3, 9])
    mirror.put_layer(0, slots, torch.ones(3, 16).bfloat16())
    assert not mirror.all_valid(slots)
    mirror.commit(slots, torch.arange(3), torch.arange(3))
    assert mirror.all_valid(slots)
    assert not mirror.all_valid(torch.tensor([5, 4]))


def test_allocating_a_slot_again_invalidates_its_row_alone() -> None:
    slots = torch.arange(16, 32)
    mirror = mirror_with(slots)
    mirror.invalidate(torch.tensor([20]))
    assert not mirror.all_valid(slots)
    assert mirror.valid(slots).tolist() == [slot != 20 for slot in range(16, 32)]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_row_that_the_codec_cannot_hold_stays_invalid_until_its_slot_is_allocated_again(
    layer: int,
) -> None:
    mirror = HiddenMirror(64, 2, EXP4)
    slots = torch.tensor([5, 3, 9])
    rows = torch.ones(2, 3, 16).bfloat16()
    rows[layer, 1] *= 2.0 ** torch.arange(-60, 100, 10).bfloat16()
    for index in range(2):
        mirror.put_layer(index, slots, rows[index])
    assert mirror.commit(slots, torch.arange(3), torch.arange(3)) == 2
    assert mirror.valid(slots).tolist() == [True, False, True]
    assert mirror.any_unencodable(slots)
    assert not mirror.any_unencodable(slots[[0, 2]])
    mirror.invalidate(slots)
    assert not mirror.any_unencodable(slots)
    for index in range(2):
        mirror.put_layer(index, slots, rows[1 - layer])
    mirror.commit(slots, torch.arange(3), torch.arange(3))
    assert mirror.all_valid(slots)


def test_rows_that_are_encoded_already_are_kept_as_they_are() -> None:
    mirror = HiddenMirror(64, 1, EXP4)
    slots = torch.tensor([7, 2])
    encoded, _ = EXP4.encode(torch.randn(2, 16).bfloat16())
    mirror.put_encoded(0, slots, encoded)
    assert torch.equal(mirror.rows[0][slots], encoded)


def test_clear_forgets_everything() -> None:
    slots = torch.arange(16)
    mirror = mirror_with(slots)
    mirror.clear()
    assert not mirror.valid(slots).any()


def test_tokens_come_back_in_the_order_asked_for() -> None:
    slots = torch.tensor([40, 7, 21])
    positions, ids = mirror_with(slots, first_position=10).tokens(torch.tensor([21, 40]))
    assert positions.tolist() == [12, 10]
    assert ids.tolist() == [512, 510]


def test_consecutive_means_from_a_page_boundary_without_gaps() -> None:
    slots = torch.arange(16)
    assert mirror_with(slots, 32).are_consecutive(slots, page_size=16)
    assert not mirror_with(slots, 33).are_consecutive(slots, page_size=16)
    assert not mirror_with(slots, 32).are_consecutive(slots.flip(0), page_size=16)
