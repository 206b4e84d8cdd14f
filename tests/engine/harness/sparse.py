"""What models with sparse attention (DSA) say without any cache, in PyTorch.

transformers runs the model but for its attention, which is written out here: MLA over the tokens
that the indexer chooses, rounded as SGLang's pools round latents and index keys. Sums are float64,
as those of a server with `reordering.EXACT`. Otherwise a difference in the last place now and then
changes which token is the last one chosen, and with it the reply of a random model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from bench.harness.server import CachedTokens, Server, ServerOptions
from tests.cpu_engine.hcache_cpu_engine import reordering
from tests.engine.harness.conversations import Conversation, turns_of
from tests.engine.harness.reference import assert_equal_tokens, load_reference

Pool = Literal["bfloat16", "fp8_e4m3"]
_LARGEST = 448.0

SPARSE: dict[str, Any] = {"attention_backend": "dsa", "extra_env": {reordering.EXACT: "1"}}
"""Options of a server."""
PACKED = ("--kv-cache-dtype", "fp8_e4m3")
"""Arguments for FP8 latents."""
TURNED = {"SGLANG_DISABLE_DSA_INDEXER_FUSION": "1"}
"""Environment in which GLM's index keys, too, are turned by a Hadamard matrix."""


def assert_sparse_output(options: ServerOptions, asked: Sequence[Conversation]) -> None:
    """Every token of a reply is the model's best one after those before it (float32).

    Sums of two ranks are rounded once more: their reference is a server without a cache.
    """
    if options.tp > 1:
        _assert_as_without_a_cache(options, asked)
        return
    for turn in turns_of(asked):
        reply = turn.reply.output_ids
        logits = _logits(options, turn.prompt + reply[:-1], len(reply), "float32")
        assert_equal_tokens(reply, logits.argmax(-1).tolist())


def sparse_logprobs(
    options: ServerOptions, tokens: list[int], start: int, dtype: str
) -> list[float]:
    """Log-probabilities of the tokens from `start` on, by the reference in `dtype`."""
    logits = _logits(options, tokens[:-1], len(tokens) - start, dtype)
    found = logits.float().log_softmax(-1)[range(len(logits)), tokens[start:]]
    return list(found.tolist())


def _assert_as_without_a_cache(options: ServerOptions, asked: Sequence[Conversation]) -> None:
    plain = replace(options, cache="none", log=options.log.with_name("plain.log"))
    with Server(plain) as server:
        for turn in turns_of(asked):
            want = server.generate(turn.prompt, len(turn.reply.output_ids))
            assert want.cached == CachedTokens(0, 0, 0)
            assert_equal_tokens(turn.reply.output_ids, want.output_ids)


def _logits(options: ServerOptions, tokens: list[int], last: int, dtype: str) -> Any:
    """Logits behind each of the `last` tokens, `[last, vocabulary]`."""
    import torch

    pool: Pool = "fp8_e4m3" if PACKED[1] in options.extra_args else "bfloat16"
    turned = TURNED.items() <= options.extra_env.items()
    reference = load_reference(Path(options.model), dtype)
    with torch.inference_mode(), _written_out(reference, pool, turned):
        return reference(input_ids=torch.tensor([tokens]), logits_to_keep=last).logits[0]


@contextmanager
def _written_out(model: Any, pool: Pool, turned: bool) -> Iterator[None]:
    import torch

    linear, replaced = torch.nn.functional.linear, []

    def exact(rows: Any, weight: Any, bias: Any = None) -> Any:
        product = rows.double() @ weight.double().t()
        return (product if bias is None else product + bias.double()).to(rows.dtype)

    torch.nn.functional.linear = exact
    chosen: list[Any] = []  # of the last layer that has an indexer
    for layer in model.model.layers:
        attention = layer.self_attn
        replaced.append((attention, attention.forward))
        attention.forward = _attention(attention, model, pool, chosen, turned)
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        for attention, forward in replaced:
            attention.forward = forward


def _attention(
    module: Any, model: Any, pool: Pool, chosen: list[Any], turned: bool
) -> Callable[..., Any]:
    import torch

    width, config = module.qk_rope_head_dim, model.config
    frequencies = model.model.rotary_emb
    # DeepSeek's indexer; GLM's turns neighbours, and is not turned by a Hadamard matrix.
    by_halves = not getattr(config, "indexer_rope_interleave", False)

    def rotate(rows: Any, halves: bool) -> Any:
        """Rows `[n, heads, width]`; values that turn together are `width / 2` apart, or one."""
        angles = torch.arange(len(rows), dtype=torch.float32)[:, None] * frequencies.inv_freq
        cos, sin = (
            (turned * frequencies.attention_scaling)[:, None]
            for turned in (angles.cos(), angles.sin())
        )
        if halves:
            low, high = rows.chunk(2, -1)
            turned = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
        else:
            even, odd = rows[..., ::2], rows[..., 1::2]
            turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
        return turned.to(rows.dtype)

    def choose(indexer: Any, hidden: Any, queries: Any) -> Any:
        """A mask `[n, n]`: which tokens each attends to."""

        def prepared(rows: Any) -> Any:
            rows = torch.cat((rotate(rows[..., :width], by_halves), rows[..., width:]), -1)
            if by_halves or turned:
                rows = (rows.double() @ _hadamard(indexer.head_dim)).to(rows.dtype)
            return _in_fp8(rows)

        query = prepared(indexer.wq_b(queries).unflatten(-1, (indexer.n_heads, -1)))
        norm = indexer.k_norm
        key = torch.nn.functional.layer_norm(
            indexer.wk(hidden).float(),
            norm.normalized_shape,
            norm.weight.float(),
            norm.bias.float(),
            norm.eps,
        )
        key = prepared(key.to(hidden.dtype)[:, None])[:, 0]
        # SGLang keeps these weights in bfloat16.
        gates = torch.nn.functional.linear(
            hidden.float(), indexer.weights_proj.weight.bfloat16().float()
        )
        scores = torch.einsum("shd,td->sth", query, key).relu()
        found = torch.einsum("sth,sh->st", scores, gates.double())
        seen = torch.ones(found.shape, dtype=torch.bool).tril()
        order = found.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True)[1]
        return seen & torch.zeros_like(seen).scatter(1, order[:, : indexer.index_topk], True)

    def forward(hidden_states: Any, **_: Any) -> tuple[Any, ...]:
        hidden = hidden_states[0]
        queries = module.q_a_layernorm(module.q_a_proj(hidden))
        if module.indexer is not None:
            chosen[:] = [choose(module.indexer, hidden, queries)]
        query = module.q_b_proj(queries).unflatten(-1, (module.num_heads, -1))
        query, turned = query.split([module.qk_nope_head_dim, width], -1)
        latent, rope = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, width], -1)
        latent = _in_pool(module.kv_a_layernorm(latent), pool)
        rope = rotate(rope[:, None], False)[:, 0].bfloat16().double()
        of_keys, of_values = (
            module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
            .double()
            .split([module.qk_nope_head_dim, module.v_head_dim], 1)
        )
        dtype = hidden.dtype
        query = torch.einsum("shd,hdr->shr", query.double(), of_keys).to(dtype).double()
        scores = torch.einsum("shr,tr->hst", query, latent)
        scores += torch.einsum("shr,tr->hst", rotate(turned, False).double(), rope)
        scores = (scores * module.scaling).masked_fill(~chosen[0], -torch.inf)
        means = torch.einsum("hst,tr->shr", scores.softmax(-1), latent).to(dtype).double()
        values = torch.einsum("shr,hdr->shd", means, of_values).to(dtype).flatten(1)
        return module.o_proj(values)[None], None, None

    return forward if hasattr(module, "skip_topk") else lambda **given: forward(**given)[:2]


def _in_fp8(rows: Any) -> Any:
    """Rows `[..., 128]` in FP8 with a power of two as their scale, as float64."""
    import torch

    rows = rows.float()
    exact = rows.abs().amax(-1, keepdim=True).clamp_min(1e-4) / _LARGEST
    scale = torch.exp2(torch.ceil(torch.log2(exact)))
    return (rows / scale).to(torch.float8_e4m3fn).double() * scale


def _in_pool(latents: Any, pool: Pool) -> Any:
    """Latents `[n, rank]` as attention finds them in the pool, as float64."""
    import torch

    if pool == "bfloat16":
        return latents.bfloat16().double()
    groups = latents.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / _LARGEST
    values = (groups * (1 / scale)).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
    return (values.float() * scale).flatten(-2).double()


def _hadamard(size: int) -> Any:
    """Orthogonal and symmetric: an element's sign is the parity of what its places share."""
    import torch

    places = torch.arange(size)
    shared = places[:, None] & places
    parity = sum((shared >> bit) & 1 for bit in range(size.bit_length()))
    return (1.0 - 2.0 * (parity % 2)).double() * size**-0.5
