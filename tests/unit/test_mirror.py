"""Rows belong to one allocation of their slot."""

from __future__ import annotations

import torch

from hcache_backend.capture.mirror import HiddenMirror


def mirror_with(slots: torch.Tensor, first_position: int = 0) -> HiddenMirror:
    mirror = HiddenMirror(slots=64, layers=2, hidden_size=8, dtype=torch.bfloat16)
    for layer in range(2):
        rows = torch.randn(len(slots), 8).bfloat16() + layer
        mirror.put_layer(layer, slots, rows)
        assert torch.equal(mirror.rows[layer][slots], rows)
    positions = torch.arange(first_position, first_position + len(slots))
    mirror.commit(slots, positions, positions + 500)
    return mirror


def test_rows_are_valid_only_after_all_layers_are_committed() -> None:
    mirror = HiddenMirror(64, 2, 8, torch.float32)
    slots = torch.tensor([5, 3, 9])
    mirror.put_layer(0, slots, torch.ones(3, 8))
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
