"""What a slot keeps of two layers: what comes back, its bytes, and what does not fit."""

import hashlib
import math

import pytest
import torch

from hcache_backend.format.units import units_per_group
from hcache_backend.krul.pair_forms import PAIR_FORMS, MergedPair, PairSlot
from hcache_kernels.codecs import Codec, Cut, Int8, UnsupportedRows

DIM = 16
CUT = Cut(width=2 * DIM, tokens=32, groups=2, pieces=2)
SHAPE = (3, 2, CUT.units, CUT.tokens, CUT.width)
DTYPES = (torch.bfloat16, torch.float16)


MERGED = MergedPair(CUT, DIM, torch.bfloat16)


def layer(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


def encode(form: Codec, *layers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return form.encode_units(torch.cat(layers, dim=1))


def decode(form: Codec, encoded: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return form.decode_units(encoded).split(2, dim=1)


def vectors(units: torch.Tensor) -> torch.Tensor:
    return units.float().unflatten(-1, (-1, DIM))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_the_same_directions_come_back(dtype: torch.dtype) -> None:
    first = layer(1, dtype)
    second = 3 * first
    form = MergedPair(CUT, DIM, dtype)
    encoded, fits = encode(form, first, second)
    assert fits.all()
    for found, wanted in zip(decode(form, encoded), (first, second), strict=True):
        error = (vectors(found) - vectors(wanted)).abs()
        # A direction, a magnitude and their product are each rounded by half an epsilon at most.
        bound = 1.6 * torch.finfo(dtype).eps * vectors(wanted).abs() + 1e-6
        assert (error <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes_stay_and_directions_meet_halfway(dtype: torch.dtype) -> None:
    first, second = layer(1, dtype), 2 * layer(2, dtype)
    form = MergedPair(CUT, DIM, dtype)
    back = [vectors(part) for part in decode(form, encode(form, first, second)[0])]
    exact = [vectors(part) for part in (first, second)]
    kept = (back[0] == exact[0]).flatten(-2).all(-1)
    assert (kept.sum(-1) == CUT.tokens // 16).all()
    merged, cosines = ~kept, []
    for found, wanted in zip(back, exact, strict=True):
        lengths = [part.norm(dim=-1)[merged] for part in (found, wanted)]
        torch.testing.assert_close(*lengths, rtol=0.01, atol=0)
        cosines.append(torch.cosine_similarity(found, wanted, dim=-1)[merged])
    torch.testing.assert_close(*cosines, rtol=0, atol=0.02)
    torch.testing.assert_close(back[1][merged].sign(), back[0][merged].sign())


def test_tokens_that_differ_most_come_back_exactly() -> None:
    first = layer(1)
    second = first + 0.1 * layer(2)
    far = torch.tensor([5, 20])  # one of 16 tokens of a unit
    second[..., far, :] = -first[..., far, :] + 0.1 * layer(3)[..., far, :]
    back = decode(MERGED, encode(MERGED, first, second)[0])
    for found, wanted in zip(back, (first, second), strict=True):
        assert torch.equal(found[..., far, :], wanted[..., far, :])
        assert not torch.equal(found, wanted)


def test_opposite_directions_and_zeros_come_back_finite() -> None:
    first = layer(1)
    first[0, 0, 0, :, :DIM] = 0
    second = -first
    second[1] = 0
    encoded, fits = encode(MERGED, first, second)
    assert fits.all()
    back = decode(MERGED, encoded)
    assert all(part.isfinite().all() for part in back)
    assert not back[1][1].any()
    assert not back[0][0, 0, 0, :, :DIM].any()


def test_a_page_has_the_same_bytes_alone_beside_others_and_on_every_machine() -> None:
    # Exact sums of few bits, from which no random generator can differ.
    numbers = torch.arange(layer(0).numel(), dtype=torch.int64)
    first, second = (
        ((numbers * step % 509 - 254) / 64).to(torch.bfloat16).view(SHAPE) for step in (7919, 7927)
    )
    digests = {}
    for name, form in PairSlot(CUT, DIM, torch.bfloat16).forms.items():
        encoded, fits = encode(form, first, second)
        assert fits.all()
        assert encoded.shape == (SHAPE[0], form.segment_bytes)
        for page in range(SHAPE[0]):
            alone, _ = encode(form, first[page : page + 1], second[page : page + 1])
            assert torch.equal(alone[0], encoded[page])
        digests[name] = hashlib.sha256(encoded.numpy().tobytes()).hexdigest()[:16]
    assert digests == {"merged": "87f3d2ded4e53f28", "int8": "241e49525244b88b"}


@pytest.mark.parametrize(
    ("dtype", "value"),
    # A magnitude of 60,000 is more than float16 holds.
    [*((DTYPES[0], value) for value in (math.nan, math.inf, 1e30, 1e-30)), (DTYPES[1], 60000.0)],
)
def test_a_page_that_cannot_be_held_is_said_not_to_fit(dtype: torch.dtype, value: float) -> None:
    first, second = layer(1, dtype), layer(2, dtype)
    second[1, 1, 3, 7, :DIM] = value  # a whole vector, which has no other values
    _, fits = encode(MergedPair(CUT, DIM, dtype), first, second)
    assert fits.tolist() == [True, False, True]


def test_any_bytes_are_decoded() -> None:
    for form in PairSlot(CUT, DIM, torch.bfloat16).forms.values():
        for byte in (0, 0x7F, 0xFF):
            damaged = torch.full((2, form.segment_bytes), byte, dtype=torch.uint8)
            assert [part.shape[1:] for part in decode(form, damaged)] == [SHAPE[1:]] * 2


def test_both_layers_in_int8_are_those_of_the_codec() -> None:
    first, second = layer(1), layer(2)
    form, codec = Int8(CUT, DIM, torch.bfloat16, "kvkv"), Int8(CUT, DIM, torch.bfloat16)
    encoded, fits = encode(form, first, second)
    assert fits.all()
    for found, wanted in zip(decode(form, encoded), (first, second), strict=True):
        assert torch.equal(found, codec.decode_units(codec.encode_units(wanted)[0]))


@pytest.mark.parametrize(("heads", "dim"), [(2, 64), (8, 128), (32, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_of_the_layers_in_pairs_take_at_most_0_78_of_plain_pages(
    heads: int, dim: int, dtype: torch.dtype
) -> None:
    width, tokens, layers = heads * dim, 64, 32
    pieces = units_per_group(tokens, width)
    slot = PairSlot(Cut(width, tokens // pieces, pieces=pieces), dim, dtype).slot_bytes
    plain = 2 * tokens * width * dtype.itemsize
    assert 0.75 < (layers / 2 * plain + layers / 4 * slot) / (layers * plain) <= 0.78


def test_other_types_and_parts_of_heads_are_refused() -> None:
    for kind in PAIR_FORMS.values():
        with pytest.raises(UnsupportedRows, match=r"bfloat16 or float16, not torch\.float32"):
            kind(CUT, DIM, torch.float32)
        with pytest.raises(UnsupportedRows, match="whole heads"):
            kind(CUT, 24, torch.bfloat16)
