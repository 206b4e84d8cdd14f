"""LoRA adapters whose pages outlive the server.

SGLang seeds the keys of a request with the identity of its adapter. An adapter that is named on
the command line has the same identity in every run, made from its name and path: what is in it
may change. One that is loaded at run time gets a new identity each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hcache_backend.fingerprint import digest_tensors, fingerprint, namespace


def adapter_digests(runner: Any) -> dict[str, str]:
    """Digest of weights and scaling of each adapter with a lasting identity, by identity."""
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return {}
    from sglang.srt.lora.lora_registry import LoRARef

    return {
        identity: _digest(manager.loras[identity])
        for identity, ref in sorted(manager.lora_refs.items())
        if identity in manager.loras
        and identity == LoRARef.deterministic_id(ref.lora_name, ref.lora_path)
    }


def _digest(adapter: Any) -> str:
    weights = fingerprint([digest_tensors(_tensors(adapter))])
    fields = {"weights": weights.hex(), "scaling": adapter.scaling}
    return namespace({**fields, "config": adapter.config.hf_config}).hex()


def _tensors(adapter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for number, layer in enumerate(adapter.layers):
        for name, weight in layer.weights.items():
            yield f"{number}.{name}", weight
    for kind in ("embedding_layers", "added_tokens_embeddings"):
        for name, weight in getattr(adapter, kind, {}).items():
            yield f"{kind}.{name}", weight
