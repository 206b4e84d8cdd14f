"""A model in this process, in SGLang's own runner, with the package's projection and recomputation.

The steps are those of a server's start (``start/build.py``): the self-check's pass finds the
layers, and each projection is compared with the K and V that the model wrote.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.harness.machine import MachineError
from bench.harness.methods import PAGE_SIZE
from bench.harness.options import ServerOptions
from hcache_backend.format.units import units_per_group
from hcache_backend.krul.pairs import OBSERVED_TOKENS
from hcache_kernels.codecs import Cut

KV = tuple[torch.Tensor, torch.Tensor]
"""K ``[n, kv_heads, dim]`` and V ``[n, kv_heads, value_dim]`` of one layer."""


class LayerProbe(NamedTuple):
    """A :class:`~hcache_backend.restore.recompute.AttentionInputs` whose K and V, of all tokens,
    are at hand."""

    q: torch.Tensor
    kv: KV
    scale: float

    @property
    def length(self) -> int:
        return len(self.kv[0])

    @property
    def kv_heads(self) -> int:
        return self.kv[0].shape[1]

    def keys(self, heads: slice) -> torch.Tensor:
        return self.kv[0][:, heads]


@dataclass(frozen=True)
class History:
    """The first tokens of a text after the model has computed them.

    Attributes:
        slots: Of their K and V in the pool, int64 ``[n]``.
        positions: int64 ``[n]``.
        hidden: The input of every layer's projection, ``[n, hidden]`` each.
        queries: Of the last tokens in every layer, ``[t, heads, head_dim]`` each; ``t`` is at
            most :data:`OBSERVED_TOKENS`.
        kv: K and V that the model wrote, ``[n, kv_heads, head_dim]`` each, by layer.
    """

    ids: Sequence[int]
    slots: torch.Tensor
    positions: torch.Tensor
    hidden: Sequence[torch.Tensor]
    queries: Sequence[torch.Tensor]
    kv: Sequence[KV]


class Engine:
    """A loaded model with its KV pool.

    Attributes:
        projector: Projects hidden states of each layer to the pool.
        recomputer: Computes K and V of a history anew; None: it cannot for this model.
        exactness: How exactly K and V come back, and are repeated by the model itself, in
            words: by layers as in :class:`LayerGroup`, and recomputed.

    Raises:
        MachineError: Hidden states cannot restore this model's K and V.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._runner, self.tokenizer = _start(options)
        self._check()

    def _check(self) -> None:
        from sglang.srt.distributed import get_tp_group

        from hcache_backend.checks.self_check import (
            CHECK_TOKENS,
            LayerSpecs,
            check_recompute,
            observe,
        )
        from hcache_backend.projection.paged_pool import PagedPool
        from hcache_backend.projection.projector import Projector
        from hcache_backend.ranks import Refused
        from hcache_backend.restore.recompute import Recomputer
        from hcache_backend.sglang import hooks
        from hcache_backend.sglang.passes import (
            attention_modules,
            make_recomputer,
            run_again,
            run_prompts,
        )
        from hcache_backend.sglang.weights import LoadedWeights

        runner, kvcache = self._runner, self._runner.token_to_kv_pool
        self.pool = PagedPool(kvcache)
        projector = Projector(self.pool, kvcache.layer_num)
        try:
            missing = hooks.install(hooks.HIDDEN)
            if missing is not None:
                raise Refused(missing)
            run = partial(run_prompts, runner, [CHECK_TOKENS])
            observed = observe(run, attention_modules(runner.model, kvcache.layer_num))
            observed.compare(projector)
            tokens = len(kvcache.k_buffer[0])
            self.recomputer: Recomputer | None = make_recomputer(runner, kvcache, tokens)
            try:
                again, requests = partial(run_again, runner), runner.req_to_token_pool.size
                found = check_recompute(again, requests, observed, self.recomputer, kvcache)
                recomputed = found.exactness
                if found.layers < kvcache.layer_num:
                    raise Refused(str(found.problem))
            except Refused as refused:
                self.recomputer, recomputed = None, f"none: {refused}"
            weights, ranks = LoadedWeights(runner), get_tp_group().cpu_group
            limit = int(runner.model_config.context_len)
            specs = LayerSpecs(weights, observed, projector, ranks, limit)
            specs.find()
            specs.check_writing()
            specs.use_agreed()
        except Refused as refused:
            raise MachineError(f"hidden mode refuses this model: {refused}") from None
        self.layers, self.projector = observed.layers, projector
        self.exactness = {
            "projected": [group.model_dump(mode="json") for group in specs.projection],
            "recomputed": recomputed,
        }

    @property
    def hidden_size(self) -> int:
        return int(self._runner.model_config.hidden_size)

    @property
    def kv_shape(self) -> tuple[int, int]:
        """Heads of K, and of V, and values of each."""
        heads, dim = self._runner.token_to_kv_pool.k_buffer[0].shape[1:]
        return int(heads), int(dim)

    @property
    def page_cut(self) -> Cut:
        """The units of K, or of V, in a page of one layer; a rank holds one group of heads."""
        heads, dim = self.kv_shape
        pieces = units_per_group(PAGE_SIZE, heads * dim)
        return Cut(heads * dim, PAGE_SIZE // pieces, pieces=pieces)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        pool = self._runner.token_to_kv_pool
        return int(pool.k_buffer[0][0].nbytes + pool.v_buffer[0][0].nbytes)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._runner.dtype
        return dtype

    def compute(self, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities after every token of a text, no cache used, float32 ``[n, vocab]``."""
        return self._forward(ids, 0)[0]

    def history(self, ids: Sequence[int]) -> History:
        """Have the model compute the first tokens of a text."""
        with self._watch() as (hidden, queries):
            _, slots = self._forward(ids, 0)
        kv = [self.pool.fetch(layer.kernel, slots, self.dtype) for layer in self.layers]
        positions = torch.arange(len(ids), device=slots.device)
        return History(ids, slots, positions, hidden, queries, kv)

    def at_start(self) -> History:
        """The self-check's tokens, whole pages, as the model computes them at a server's start."""
        from hcache_backend.checks.self_check import CHECK_TOKENS, check_tokens

        tokens = -(-CHECK_TOKENS // PAGE_SIZE) * PAGE_SIZE
        return self.history(check_tokens(self._runner.model_config.vocab_size, tokens))

    def forget(self, history: History) -> None:
        """Take its K and V out of the pool, so that a slot that is not restored shows."""
        for layer, (k, v) in zip(self.layers, history.kv, strict=True):
            lost = (torch.full_like(part, float("nan")) for part in (k, v))
            self.pool.store(layer.kernel, history.slots, *lost)

    def go_on(self, history: History, ids: Sequence[int]) -> torch.Tensor:
        """Log-probabilities after every further token of a text behind its history in the pool,
        float32 ``[n, vocab]``."""
        return self._forward([*history.ids, *ids], len(history.ids))[0]

    @contextmanager
    def _watch(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Inputs of projections, and last queries of attention, inside the block, by layer."""
        seen: list[torch.Tensor] = []
        queries: list[torch.Tensor] = []

        def ask(kernel: Any, args: tuple[Any, ...]) -> None:
            rows = args[0].detach()[-OBSERVED_TOKENS:].clone()
            queries.append(rows.view(len(rows), kernel.tp_q_head_num, kernel.qk_head_dim))

        handles = [
            layer.projection.register_forward_pre_hook(
                lambda module, args: seen.append(args[0].detach().clone())
            )
            for layer in self.layers
        ]
        handles += [layer.kernel.register_forward_pre_hook(ask) for layer in self.layers]
        try:
            yield seen, queries
        finally:
            for handle in handles:
                handle.remove()

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A prefill behind ``before`` tokens, which have the pool's first slots; returns
        log-probabilities and the slots of the new tokens."""
        from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor

        from hcache_backend.sglang.passes import forward_batch, prefill_batch, prefill_request

        runner = self._runner
        allocator = runner.token_to_kv_pool_allocator
        allocator.clear()
        runner.req_to_token_pool.clear()
        request = prefill_request(ids, allocator.alloc(before) if before else None)
        forward = forward_batch(runner, prefill_batch(runner, [request]))
        slots = forward.out_cache_loc.clone()
        passed: list[tuple[Any, ...]] = []
        processor = next(m for m in runner.model.modules() if isinstance(m, LogitsProcessor))
        handle = processor.register_forward_pre_hook(lambda module, args: passed.append(args))
        try:
            runner.forward(forward)
        finally:
            handle.remove()
        # A server asks for logits of the last token only.
        _, hidden, lm_head, *_ = passed[0]
        logits = processor._get_logits(hidden, lm_head, LogitsMetadata.from_forward_batch(forward))
        return logits[:, : runner.model_config.vocab_size].float().log_softmax(-1), slots


def _start(options: ServerOptions) -> tuple[Any, Any]:
    """SGLang's ModelRunner, with the weights loaded and its KV pool, and the model's tokenizer; as
    SGLang's own ``benchmark/one_batch.py`` starts them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()  # before anything else is imported, as a server does
    from sglang.benchmark.one_batch import load_model
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    arguments = prepare_server_args(options.arguments(port=0))
    arguments.resolve_once()
    _set_envs_and_config(arguments)
    ports = PortArgs.init_new(arguments)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    bench, tokenizer = load_model(arguments, ports, 0, 0)
    return bench.torch_runner, tokenizer
