"""SGLang's arguments as this process runs it, and inputs of K and V besides the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

from hcache_backend.config import ConfigError
from hcache_backend.fingerprint import digest_tensors, fingerprint, namespace
from hcache_backend.format.units import SHARD_COUNTS
from hcache_backend.metrics import logger

# inputs of a request (SGLang's ``Req``) besides its token ids
NOT_IN_TOKEN_IDS = ("input_embeds", "positional_embed_overrides", "multimodal_inputs", "lora_id")

NO_REQUEST = 0  # the row of no request in SGLang's table: graphs pad batches with it


def resolved(server_args: Any) -> Any:
    """An object whose attributes are the arguments in force, not only those that users typed."""
    from sglang.srt.arg_groups.model_override_base import resolved_view

    return resolved_view(server_args)


def drafted_tokens(args: Any) -> int:
    """Tokens of a request that a decode step computes: those of its draft, or one."""
    return int((args.speculative_algorithm and args.speculative_num_draft_tokens) or 1)


def packed_drafts(runner: Any) -> tuple[Any, ...]:
    """SGLang's KV pools of draft layers that it packs behind the model's in host memory (MTP), one
    layer each, with the slots of the model's pool."""
    return tuple(getattr(runner, "mtp_draft_device_pools", ()))


def drafts_trees(args: Any) -> bool:
    """True if speculative decoding verifies several drafts of a token at once."""
    if args.speculative_algorithm == "NGRAM":
        return bool(args.speculative_ngram_max_bfs_breadth > 1)
    return bool(args.speculative_algorithm) and (args.speculative_eagle_topk or 1) > 1


def attention_groups(args: Any) -> int:
    """Groups of tensor-parallel ranks that have requests of their own (data-parallel attention), by
    the arguments in force. SGLang 0.5.21 counts them in ``dp_size``; later ones resolve the flag of
    0.5.21 to False and count them in ``attn_dp_size``, and replicas in ``dp_size``."""
    if getattr(args, "enable_dp_attention", False):
        return int(args.dp_size)
    return int(getattr(args, "attn_dp_size", 1))


def ranks_of_a_request(args: Any) -> int:
    """Tensor-parallel ranks that compute a request together, by the arguments in force."""
    return int(args.tp_size) // attention_groups(args)


def may_be(role: Literal["decode", "prefill"], server_args: Any) -> bool:
    """True for a server in this role of prefill/decode disaggregation, or that may get it."""
    arguments = resolved(server_args)
    return bool(arguments.enable_pd_role_switch or arguments.disaggregation_mode == role)


def serves_adapters(args: Any) -> bool:
    """True if requests may have LoRA adapters; ``args`` are the arguments in force."""
    return bool(args.enable_lora or args.lora_paths)


def page_size(server_args: Any) -> int:
    """Tokens per page; SGLang's default is 1."""
    return int(resolved(server_args).page_size or 1)


def storage_extra_config(args: Any) -> dict[str, Any]:
    """``--hicache-storage-backend-extra-config`` in ``args`` (those in force), empty without it."""
    text = args.hicache_storage_backend_extra_config
    if not text:
        return {}
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    return dict(HybridCacheController.parse_storage_backend_extra_config(text)[0])


def check_tp_lcm_size(option: object, ranks: int, heads: int, *, own_pages: bool) -> None:
    """Raise ConfigError, with the allowed numbers, unless ``option`` (``tp_lcm_size``) can be
    SGLang's number of groups of heads in a page of all ranks. ``heads`` are those of a rank."""
    all_heads = heads * ranks
    allowed = [number for number in range(ranks, all_heads + 1, ranks) if all_heads % number == 0]
    if own_pages:
        allowed = [number for number in allowed if number == ranks or number in SHARD_COUNTS]
    if type(option) is not int or option not in allowed:
        pages = "own" if own_pages else "plain"
        raise ConfigError(
            f"extra config: 'tp_lcm_size' is {option!r}; for {pages} pages with tensor-parallel "
            f"size {ranks} and {heads} KV heads per rank it can be {', '.join(map(str, allowed))}"
        )


def kv_fields(runner: Any) -> dict[str, object]:
    """Fields of the namespace of K and V besides the weights: adapters, scales of quantised KV."""
    fields = {"adapters": _adapter_digests(runner), "scales": _kv_scales(runner.model)}
    return {name: value for name, value in fields.items() if value}


def _kv_scales(model: torch.nn.Module) -> dict[str, list[float]]:
    """Scales of quantised K and V by attention layer, unless they are parameters (weights)."""
    names = ("k_scale", "v_scale", "k_scale_float", "v_scale_float")
    scales = {}
    for layer, module in model.named_modules():
        values = [getattr(module, name, None) for name in names]
        if numbers := [value for value in values if isinstance(value, float)]:
            scales[layer] = numbers
    return scales


def _adapter_digests(runner: Any) -> dict[str, str]:
    """Digests of LoRA adapters by SGLang's identity of each, and under "keys" the version of their
    keys; empty without LoRA. The identity of an adapter of the command line is made of its name and
    path: pages outlive the server, but its content may change. Others get new ones each time."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return {}
    from sglang.srt.lora.lora_registry import LoRARef

    digests = {"keys": "2"}  # before, other requests could have an adapter's keys
    for identity, ref in sorted(manager.lora_refs.items()):
        kept = identity == LoRARef.deterministic_id(ref.lora_name, ref.lora_path)
        if kept and (adapter := manager.loras.get(identity)) is not None:
            weights = fingerprint([digest_tensors(_adapter_tensors(adapter))])
            fields = {"weights": weights.hex(), "scaling": adapter.scaling}
            digests[identity] = namespace(fields | {"config": adapter.config.hf_config}).hex()
    return digests


def _adapter_tensors(adapter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for number, layer in enumerate(adapter.layers):
        for name, weight in layer.weights.items():
            yield f"{number}.{name}", weight
    for kind in ("embedding_layers", "added_tokens_embeddings"):
        for name, weight in getattr(adapter, kind, {}).items():
            yield f"{kind}.{name}", weight


def is_plain(req: Any) -> bool:
    """True if the token ids of a request are all of its input."""
    # An attribute that SGLang has renamed counts as set.
    return all(getattr(req, name, name) is None for name in NOT_IN_TOKEN_IDS)


def warn_of_small_host_pool(
    host_tokens: int, device_tokens: int, host_token_bytes: int, device_token_bytes: int
) -> None:
    """Warn with the share that can be stored if the host pool is smaller than the device's."""
    from sglang.srt.runtime_context import get_memory

    missing = (device_tokens - host_tokens) * host_token_bytes
    if missing <= 0 or (memory := get_memory()).hicache_write_policy == "write_back":
        return  # write_back keeps tokens in host memory that left the device
    if memory.hicache_size > 0:
        enough = f"--hicache-size {math.ceil(memory.hicache_size + missing / 1e9)}"
    else:
        # A little more: some may be set aside for rows that a codec cannot hold.
        more = 1.004 * missing / (device_tokens * device_token_bytes)
        enough = f"--hicache-ratio {math.ceil(100 * (memory.hicache_ratio + more)) / 100:.2f}"
    logger.warning(
        f"hcache: the host pool has room for {host_tokens} tokens and the device pool for "
        f"{device_tokens}: about {100 * host_tokens // device_tokens}% of what fills the device is "
        f"stored (hcache_not_backed_up_tokens_total counts the rest); with {enough} all of it"
    )
