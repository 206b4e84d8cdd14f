"""Recomputation: K and V as one pass over the whole sequence gives them, however it is cut."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from bench.accuracy.engine import LayerProbe
from hcache_backend.krul.pairs import attention_sums
from hcache_backend.restore.recompute import (
    Forward,
    RecomputePass,
    Recomputer,
    RecomputeRefused,
    TokenSpan,
)
from hcache_backend.streams import current_stream

WIDTH, HEADS, DIM, LAYERS, SLOTS, FIRST = 16, 4, 4, 3, 200, 5


def kernel(layer: int, kv_heads: int, **others: Any) -> SimpleNamespace:
    """The engine's attention object of a layer; the model's first layer is number 5."""
    plain = {
        "layer_id": FIRST + layer,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": kv_heads,
        "tp_v_head_num": kv_heads,
        "qk_head_dim": DIM,
        "v_head_dim": DIM,
        "scaling": 0.4,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "attn_type": SimpleNamespace(value="decoder"),
    }
    return SimpleNamespace(**plain | others)


class Pool:
    """K and V of every slot, poisoned."""

    latent = False

    def __init__(self, kv_heads: int) -> None:
        self.k = torch.full((LAYERS, SLOTS, kv_heads, DIM), float("nan"), dtype=torch.float64)
        self.v = self.k.clone()

    def of(self, kernel: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k[kernel.layer_id - FIRST], self.v[kernel.layer_id - FIRST]

    def store(self, kernel: Any, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[kernel.layer_id - FIRST, slots] = k
        self.v[kernel.layer_id - FIRST, slots] = v

    def fetch(self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype) -> Any:
        return self.k[kernel.layer_id - FIRST, slots], self.v[kernel.layer_id - FIRST, slots]

    def fetch_keys(self, kernel: Any, slots: torch.Tensor, dtype: torch.dtype, heads: slice) -> Any:
        return self.k[kernel.layer_id - FIRST, slots][:, heads]


class Model:
    """A transformer whose K depends on positions, and on all tokens before in later layers."""

    def __init__(self, pool: Pool) -> None:
        torch.manual_seed(0)
        kv_heads = pool.k.shape[2]
        self.pool = pool
        self.attended: list[tuple[int, bool]] = []  # layer, and whether K and V were stored there
        self.kv_heads = kv_heads
        self.embedding = torch.randn(50, WIDTH, dtype=torch.float64)
        shape = (LAYERS, (HEADS + 2 * kv_heads) * DIM, WIDTH)
        self.qkv = torch.randn(shape, dtype=torch.float64) / 4
        self.out = torch.randn(LAYERS, WIDTH, HEADS * DIM, dtype=torch.float64) / 4
        self.kernels = [kernel(layer, kv_heads) for layer in range(LAYERS)]
        self.layers_run = 0
        self.tokens_seen: list[int] = []

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, asked: RecomputePass
    ) -> torch.Tensor:
        self.tokens_seen.append(len(token_ids))
        x = self.embedding[token_ids]
        for layer, kernel in enumerate(self.kernels):
            self.layers_run += 1
            q, k, v = self.project(layer, x, positions)
            engine = partial(self.attention, asked, kernel, (q, k, v))
            attended = asked.attend(kernel, q, k, v, True, engine)
            x = torch.tanh(x + attended @ self.out[layer].T)
        return x

    def attention(self, asked: RecomputePass, kernel: Any, rows: Any, store: bool) -> torch.Tensor:
        """The engine's: causal, over what the pool holds."""
        q, *kv = (row.view(len(row), -1, DIM) for row in rows)
        if store:
            self.pool.store(kernel, asked.slots, *kv)
        self.attended.append((kernel.layer_id - FIRST, store))
        held = (part[asked.keys] for part in self.pool.of(kernel))
        k, v = (part.repeat_interleave(HEADS // self.kv_heads, dim=1) for part in held)
        weights = torch.einsum("qhd,khd->hqk", q, k) * kernel.scaling
        at = torch.arange(len(k) - len(q), len(k))
        weights.masked_fill_(torch.arange(len(k)) > at[:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", weights.softmax(-1), v).flatten(1)

    def project(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> Any:
        rows = x @ self.qkv[layer].T + 0.1 * positions[:, None]
        return rows.split([HEADS * DIM, *[self.kv_heads * DIM] * 2], dim=1)

    def whole(self, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of every layer of one sequence, by plain causal attention."""
        x, found = self.embedding[token_ids], []
        for layer in range(LAYERS):
            q, k, v = self.project(layer, x, torch.arange(len(x)))
            k, v = (part.view(len(x), self.kv_heads, DIM) for part in (k, v))
            found.append((k, v))
            q = q.view(len(x), HEADS, DIM)
            k, v = (part.repeat_interleave(HEADS // self.kv_heads, dim=1) for part in (k, v))
            heads = [part.transpose(0, 1) for part in (q, k, v)]
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=0.4)
            x = torch.tanh(x + attended.transpose(0, 1).reshape(len(x), -1) @ self.out[layer].T)
        return found


def recomputer_of(forward: Forward, pool: Any, chunk_tokens: int) -> Recomputer:
    stream = partial(current_stream, "cpu")
    return Recomputer(forward, pool, FIRST, chunk_tokens, stream, LAYERS)


def sequence(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and slots in no order that no other seed below 3 has."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (tokens,), generator=generator)
    return ids, torch.randperm(60, generator=generator)[:tokens] + 60 * seed


class Recomputed:
    """A sequence whose first layers were recomputed in one span."""

    def __init__(
        self, tokens: int, layers: int, kv_heads: int = 2, *, chunk: int = 64, latent: bool = False
    ) -> None:
        self.pool = Pool(kv_heads)
        self.pool.latent = latent
        self.model = Model(self.pool)
        self.recomputer = recomputer_of(self.model.forward, self.pool, chunk)
        self.ids, self.slots = sequence(tokens, 1)
        span = TokenSpan(self.ids.numpy(), self.slots[:0])
        self.recomputer.recompute(layers, self.slots, [span])
        assert_restored(self.pool, self.model, self.ids, self.slots, layers)


def assert_restored(
    pool: Pool, model: Model, ids: torch.Tensor, slots: torch.Tensor, layers: int
) -> None:
    for layer, (k, v) in enumerate(model.whole(ids)[:layers]):
        torch.testing.assert_close(pool.k[layer, slots], k, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(pool.v[layer, slots], v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_spans_with_and_without_prefix_in_one_pass(layers: int, chunk: int, kv_heads: int) -> None:
    pool = Pool(kv_heads)
    model = Model(pool)
    recomputer = recomputer_of(model.forward, pool, chunk)
    (a, a_slots), (b, b_slots) = sequence(20, 0), sequence(33, 1)
    none = a_slots[:0]
    recomputer.recompute(layers, b_slots[:9], [TokenSpan(b[:9].numpy(), none)])
    # Another sequence, the rest of the first one in two spans: the second has the first before it.
    spans = [
        TokenSpan(a.numpy(), none),
        TokenSpan(b[9:20].numpy(), b_slots[:9]),
        TokenSpan(b[20:].numpy(), b_slots[:20]),
    ]
    recomputer.recompute(layers, torch.cat((a_slots, b_slots[9:])), spans)
    assert_restored(pool, model, a, a_slots, layers)
    assert_restored(pool, model, b, b_slots, layers)
    assert pool.k[layers:].isnan().all()  # later layers are not touched
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[torch.cat((a_slots, b_slots))] = False
    assert pool.k[:, others].isnan().all()
    assert max(model.tokens_seen) <= chunk


@pytest.mark.parametrize("layers", [2, 3])
def test_the_engine_attends_up_to_the_last_wanted_layer_and_stores_its_k_and_v(layers: int) -> None:
    """There its own store is enough: nobody needs what attention would give."""
    model = Recomputed(9, layers).model
    assert model.layers_run == layers
    assert model.attended == [(layer, True) for layer in range(layers - 1)]


def test_latents_of_the_last_layer_are_stored_by_the_engine() -> None:
    """It alone knows how it puts them together; some models have stored them before."""
    model = Recomputed(9, 2, latent=True).model
    assert (model.layers_run, model.attended) == (2, [(0, True), (1, True)])


def shares(token_ids: torch.Tensor, positions: torch.Tensor, asked: RecomputePass) -> None:
    asked.attend(kernel(0, HEADS), torch.zeros(5, WIDTH), None, None, True, lambda store: None)


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (shares, "layer 5 has no K and V of its own"),
        (lambda *_: None, "ended before attention of the last wanted layer"),
    ],
)
def test_a_model_without_k_and_v_of_the_last_wanted_layer_is_refused(
    forward: Forward, said: str
) -> None:
    ids, slots = sequence(5, 0)
    with pytest.raises(RecomputeRefused, match=said):
        recomputer_of(forward, Pool(HEADS), 64).recompute(
            1, slots, [TokenSpan(ids.numpy(), slots[:0])]
        )


@pytest.mark.parametrize("weights", [1 << 24, 1])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_last_tokens_are_asked_again_and_the_pool_stays_as_it_is(
    kv_heads: int, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their queries, and the keys of all tokens of the sequence, are those of its own pass; however
    few weights of attention may exist at once."""
    monkeypatch.setattr("hcache_backend.krul.pairs._WEIGHTS", weights)
    done = Recomputed(23, LAYERS, kv_heads, chunk=7)
    pool, model, ids = done.pool, done.model, done.ids
    queries: list[torch.Tensor] = []
    project = model.project

    def noted(layer: int, x: torch.Tensor, positions: torch.Tensor) -> Any:
        q, k, v = project(layer, x, positions)
        queries.append(q.view(len(x), HEADS, DIM))
        return q, k, v

    model.project = noted  # type: ignore[method-assign]
    wanted = [
        LayerProbe(q[-5:], (k.float(), v.float()), 0.4)
        for (k, v), q in zip(model.whole(ids), queries, strict=True)
    ]
    before = pool.k.clone(), pool.v.clone()
    found = attention_sums(done.recomputer.attention_inputs(LAYERS, ids[-5:].numpy(), done.slots))
    expected = attention_sums(wanted)
    assert found.table[0, 0] == 5 * HEADS
    torch.testing.assert_close(found.table, expected.table, rtol=1e-4, atol=1e-6)
    for held, exact in zip((pool.k, pool.v), before, strict=True):
        torch.testing.assert_close(held, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "unusual",
    [
        {"logit_cap": 30.0},
        {"sliding_window_size": 4},
        {"is_cross_attention": True},
        {"attn_type": SimpleNamespace(value="encoder_only")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_attention_of_another_kind_is_not_looked_at(unusual: dict[str, Any]) -> None:
    done = Recomputed(9, LAYERS, HEADS)
    done.model.kernels[1] = kernel(1, HEADS, **unusual)
    with pytest.raises(RecomputeRefused, match="attention of its own kind"):
        done.recomputer.attention_inputs(LAYERS, done.ids[-5:].numpy(), done.slots)
