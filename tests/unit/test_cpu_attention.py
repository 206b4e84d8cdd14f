"""Attention of the CPU engine: as a plain softmax has it, in SGLang's calls of its operators."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.cpu_engine.hcache_cpu_engine import attention, reordering

SIZE, SLOTS, SCALE = 16, 4096, 0.3


@dataclass
class Sequences:
    """Sequences whose tokens lie anywhere in a pool.

    Attributes:
        lengths: Of each, tokens before the new ones, and new ones.
    """

    lengths: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    value_size: int = SIZE
    dtype: torch.dtype = torch.float32
    scales: tuple[float, float] = (1.0, 1.0)
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.totals = [sum(each) for each in self.lengths]
        self.new = [new for _, new in self.lengths]
        self.query = torch.randn(sum(self.new), self.heads, SIZE)
        sizes = SIZE, self.value_size
        self.pool = [torch.randn(SLOTS, self.kv_heads, size).to(self.dtype) for size in sizes]
        slots = torch.randperm(SLOTS)[: sum(self.totals)].split(self.totals)
        self.slots = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        self.output = torch.zeros(*self.query.shape[:2], self.value_size)

    def _tables(self) -> tuple:
        return self.slots, torch.arange(len(self.new)), torch.tensor(self.totals)

    def extend(self, tree: torch.Tensor | None = None, *, causal: bool = True) -> torch.Tensor:
        starts = torch.tensor([sum(self.new[:number]) for number in range(len(self.new))])
        given: list[Any] = [self.query, None, None, self.output, *self.pool, *self.scales]
        given += [*self._tables(), torch.tensor(self.new), starts, max(self.new), SCALE]
        given += [self.options.get("cap", 0.0), False, self.options.get("window", 0), None]
        given += [self.options.get("sinks"), tree, causal]
        attention.extend_attention(*given)
        return self.output

    def decode(self, key: torch.Tensor | None = None, value: torch.Tensor | None = None) -> None:
        last = torch.stack([self.slots[row, total - 1] for row, total in enumerate(self.totals)])
        given: list[Any] = [self.query, *self.pool, *self.scales, self.output, key, value, last]
        given += [None, *self._tables(), SCALE, self.options.get("cap", 0.0), False]
        given += [self.options.get("window", 0), None, self.options.get("sinks")]
        attention.decode_attention(*given)

    def wanted(self, trees: list[torch.Tensor] | None = None) -> torch.Tensor:
        """`[new, heads, value_size]` by a softmax over all scores of a token."""
        found, cap, window = [], self.options.get("cap"), self.options.get("window")
        rows = self.query.split(self.new)
        for number, (before, new) in enumerate(self.lengths):
            slots = self.slots[number, : before + new]
            key, value = (
                (part[slots].float() * scale).repeat_interleave(self.heads // self.kv_heads, 1)
                for part, scale in zip(self.pool, self.scales, strict=True)
            )
            scores = torch.einsum("nhd,thd->hnt", rows[number], key) * SCALE
            if cap:
                scores = cap * torch.tanh(scores / cap)
            distance = torch.arange(before, before + new)[:, None] - torch.arange(before + new)
            seen = distance >= 0 if trees is None else trees[number]
            if window:
                seen = seen & (distance < window)
            scores = scores.masked_fill(~seen, -torch.inf)
            sinks = self.options.get("sinks")
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, new, 1)], -1)
            weights = scores.softmax(-1)[..., : before + new]
            found.append(torch.einsum("hnt,thd->nhd", weights, value))
        return torch.cat(found)


LENGTHS = [(0, 5), (7, 3), (40, 1), (300, 600)]
KINDS = {
    "plain": {},
    "window": {"window": 6},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "cap": {"cap": 1.5},
    "all": {"window": 9, "sinks": torch.ones(4), "cap": 2.0},
}


@pytest.fixture(params=["as it is", "reordered"])
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reordered":
        monkeypatch.setenv(reordering.VARIABLE, "1")


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_attend_to_the_prefix_and_to_themselves(kind: str) -> None:
    sequences = Sequences(LENGTHS, options=KINDS[kind])
    torch.testing.assert_close(sequences.extend(), sequences.wanted())


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_token_is_written_and_attends(kind: str) -> None:
    sequences = Sequences([(0, 1), (30, 1), (700, 1)], options=KINDS[kind])
    key, value = torch.randn(3, 2 * SIZE), torch.randn(3, 2 * SIZE)
    sequences.decode(key, value)
    for row, total in enumerate(sequences.totals):
        last = sequences.slots[row, total - 1]
        assert torch.equal(sequences.pool[0][last].flatten(), key[row])
        assert torch.equal(sequences.pool[1][last].flatten(), value[row])
    torch.testing.assert_close(sequences.output, sequences.wanted())


@pytest.mark.usefixtures("_order")
def test_latent_k_holds_v() -> None:
    sequences = Sequences([(8, 3), (3, 1)], kv_heads=1, value_size=12)
    sequences.pool[1] = sequences.pool[0][..., :12]
    torch.testing.assert_close(sequences.extend(), sequences.wanted())
    decoded = Sequences([(8, 1)], kv_heads=1, value_size=12)
    decoded.pool[1] = decoded.pool[0][..., :12]
    latent = torch.randn(1, 1, SIZE)
    decoded.decode(latent, latent[..., :12])
    assert torch.equal(decoded.pool[0][decoded.slots[0, 8]], latent[0])
    torch.testing.assert_close(decoded.output, decoded.wanted())


def test_an_fp8_cache_is_read_with_its_scales() -> None:
    fp8 = Sequences([(9, 4), (0, 2)], dtype=torch.float8_e4m3fn, scales=(0.5, 2.0))
    torch.testing.assert_close(fp8.extend(), fp8.wanted())


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("of_new_only", [True, False])
def test_drafted_tokens_see_their_ancestors(of_new_only: bool) -> None:
    sequences = Sequences([(20, 4), (3, 4)])
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    seen = [torch.cat([torch.ones(4, before).bool(), tree], 1) for before in (20, 3)]
    given = torch.cat([tree.flatten()] * 2 if of_new_only else [each.flatten() for each in seen])
    torch.testing.assert_close(sequences.extend(given), sequences.wanted(seen))


def test_what_does_not_generate_sees_all_its_tokens() -> None:
    sequences = Sequences([(0, 6), (0, 3)])
    everything = [torch.ones(new, new).bool() for new in sequences.new]
    torch.testing.assert_close(sequences.extend(causal=False), sequences.wanted(everything))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_padded_queries_to_the_last_bit(dtype: torch.dtype) -> None:
    sequences = Sequences([(0, 700), (1000, 8), (64, 1500)], dtype=dtype)
    sequences.query, sequences.output = sequences.query.to(dtype), sequences.output.to(dtype)
    found = sequences.extend().split(sequences.new)
    for number, (before, new) in enumerate(sequences.lengths):
        slots = sequences.slots[number, : before + new]
        key, value = (part[slots].movedim(0, 1)[None] for part in sequences.pool)
        query = sequences.query.split(sequences.new)[number].movedim(0, 1)[None]
        padded = torch.cat([query.new_zeros(1, 4, before, SIZE), query], 2)
        want = scaled_dot_product_attention(
            padded, key, value, is_causal=True, scale=SCALE, enable_gqa=True
        )
        assert torch.equal(found[number].movedim(0, 1)[None], want[:, :, before:])


def test_windows_are_read_and_written_in_slots_of_their_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sequences = Sequences([(20, 1)], options={"window": 6})
    mapping = torch.randperm(SLOTS)
    pool = SimpleNamespace(translate_loc_from_full_to_swa=lambda slots: mapping[slots])
    monkeypatch.setitem(attention._window_pools, sequences.pool[0].data_ptr(), pool)
    key, value = torch.randn(1, 2 * SIZE), torch.randn(1, 2 * SIZE)
    sequences.decode(key, value)
    decoded, extended = sequences.output.clone(), sequences.extend()
    sequences.slots = mapping[sequences.slots]
    assert torch.equal(sequences.pool[0][sequences.slots[0, 20]].flatten(), key[0])
    torch.testing.assert_close(decoded, sequences.wanted())
    torch.testing.assert_close(extended, sequences.wanted())


def test_a_model_with_an_encoder_is_refused() -> None:
    with pytest.raises(NotImplementedError):
        attention._refuse_encoders(False, torch.tensor([3]))


def test_reordered_sums_are_the_same_in_a_batch_of_as_many_rows_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(reordering.VARIABLE, "1")
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(300, 256), torch.randn(64, 256), torch.randn(64)
    exact = torch.nn.functional.linear(rows.double(), weight.double(), bias.double())
    by_rows = {n: reordering.linear(rows[:n], weight, bias)[:8] for n in (8, 32, 200, 300)}
    for found in by_rows.values():
        torch.testing.assert_close(found.double(), exact[:8], rtol=1e-4, atol=1e-4)
    assert torch.equal(reordering.linear(rows[:9], weight, bias)[:8], by_rows[8])
    for n in (32, 200, 300):
        assert not torch.equal(by_rows[n], by_rows[8])
    halves = reordering.linear(rows[:8].bfloat16(), weight.bfloat16(), bias.bfloat16())
    assert halves.dtype == torch.bfloat16
    few, many = Sequences([(200, 8)]), Sequences([(200, 32)])
    many.pool, many.slots = few.pool, torch.nn.functional.pad(few.slots, (0, 24))
    many.query[:8] = few.query
    assert not torch.equal(few.extend(), many.extend()[:8])
    torch.testing.assert_close(few.output, many.output[:8])
