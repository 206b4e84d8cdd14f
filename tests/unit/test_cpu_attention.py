"""Attention of the CPU engine: as a plain softmax has it, in SGLang's calls of its operators."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.cpu_engine.hcache_cpu_engine import attention, reordering

HEADS, SIZE, SLOTS, SCALE = 4, 16, 4096, 0.3


@dataclass
class Sequences:
    """Sequences whose tokens lie anywhere in a pool.

    Attributes:
        lengths: Of each, tokens before the new ones, and new ones.
        latent: V is a part of K, as with MLA.
    """

    lengths: list[tuple[int, int]]
    window: int = 0
    sinks: torch.Tensor | None = None
    cap: float = 0.0
    latent: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.totals = [sum(each) for each in self.lengths]
        self.new = [new for _, new in self.lengths]
        self.query = torch.randn(sum(self.new), HEADS, SIZE)
        kv_heads = 1 if self.latent else 2
        key, value = (torch.randn(SLOTS, kv_heads, SIZE) for _ in range(2))
        self.pool = [key, key[..., :12] if self.latent else value]
        slots = torch.randperm(SLOTS)[: sum(self.totals)].split(self.totals)
        self.slots = torch.nn.utils.rnn.pad_sequence(slots, batch_first=True)
        self.output = self.query.new_zeros(len(self.query), HEADS, self.pool[1].shape[-1])

    def _tables(self) -> tuple:
        return self.slots, torch.arange(len(self.new)), torch.tensor(self.totals)

    def extend(self) -> torch.Tensor:
        starts = torch.tensor([sum(self.new[:number]) for number in range(len(self.new))])
        given: list[Any] = [self.query, None, None, self.output, *self.pool, 1.0, 1.0]
        given += [*self._tables(), torch.tensor(self.new), starts, max(self.new), SCALE]
        given += [self.cap, False, self.window, None, self.sinks, None, True]
        attention.extend_attention(*given)
        return self.output

    def decode(self) -> None:
        """The new token of each sequence is written to its slot, and attends."""
        key = torch.randn(len(self.new), self.pool[0][0].numel())
        value = key[:, : self.pool[1][0].numel()] if self.latent else torch.randn_like(key)
        last = torch.stack([self.slots[row, total - 1] for row, total in enumerate(self.totals)])
        given: list[Any] = [self.query, *self.pool, 1.0, 1.0, self.output, key, value, last]
        given += [None, *self._tables(), SCALE, self.cap, False, self.window, None, self.sinks]
        attention.decode_attention(*given)
        self.written = key, value

    def wanted(self) -> torch.Tensor:
        """`[new, heads, value size]` by a softmax over all scores of a token."""
        found = []
        rows = self.query.split(self.new)
        for number, (before, new) in enumerate(self.lengths):
            slots = self.slots[number, : before + new]
            key, value = (
                part[slots].repeat_interleave(HEADS // part.shape[1], 1) for part in self.pool
            )
            scores = torch.einsum("nhd,thd->hnt", rows[number], key) * SCALE
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            distance = torch.arange(before, before + new)[:, None] - torch.arange(before + new)
            seen = distance >= 0
            if self.window:
                seen = seen & (distance < self.window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, new, 1)], -1)
            weights = scores.softmax(-1)[..., : before + new]
            found.append(torch.einsum("hnt,thd->nhd", weights, value))
        return torch.cat(found)


KINDS = {
    "plain": {},
    "window": {"window": 6},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "cap": {"cap": 1.5},
    "all": {"window": 9, "sinks": torch.ones(HEADS), "cap": 2.0},
    "latents": {"latent": True},
}


@pytest.fixture(params=["as it is", "reordered"])
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "reordered":
        monkeypatch.setenv(reordering.VARIABLE, "1")


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_attend_to_the_prefix_and_to_themselves(kind: str) -> None:
    sequences = Sequences([(0, 5), (7, 3), (40, 1), (300, 600)], **KINDS[kind])
    torch.testing.assert_close(sequences.extend(), sequences.wanted())


@pytest.mark.usefixtures("_order")
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoded_token_is_written_and_attends(kind: str) -> None:
    sequences = Sequences([(0, 1), (30, 1), (700, 1)], **KINDS[kind])
    sequences.decode()
    for row, total in enumerate(sequences.totals):
        last = sequences.slots[row, total - 1]
        for part, written in zip(sequences.pool, sequences.written, strict=True):
            assert torch.equal(part[last].flatten(), written[row])
    torch.testing.assert_close(sequences.output, sequences.wanted())


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
