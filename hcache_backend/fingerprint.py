"""A fingerprint of the weights that are loaded, and the namespace of the pages they make.

Two servers share pages only when everything that decides K and V is the same. A model's name says
nothing about that: weights change under a name, and at run time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import torch
import xxhash

from hcache_backend.page import NAMESPACE_BYTES

_CHUNK = 1 << 24
_MIX_A = -7046029254386353131  # odd 64-bit constants of the golden ratio and of splitmix64
_MIX_B = -4658895280553007687


def fingerprint_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Digest of names, shapes, dtypes and every byte of ``tensors`` (16 bytes).

    The bytes are summed on the device they live on, in wrapping 64-bit integers and each weighted
    by its place, so that a 14 GB model costs a read of its memory and no transfer.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}|{tuple(tensor.shape)}|{tensor.dtype}".encode())
        digest.update(_sum_bytes(tensor).to_bytes(8, "little", signed=True))
    return digest.digest()


def model_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and buffers of ``model``; buffers hold the tables of rotary embeddings."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def namespace(fields: Mapping[str, object]) -> bytes:
    """The 16 bytes that pages of one kind share; any field that differs makes another namespace."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_digest(text.encode())[:NAMESPACE_BYTES]


@torch.no_grad()
def _sum_bytes(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK]
        tail = -chunk.numel() % 8
        if tail or chunk.storage_offset() % 8:
            chunk = torch.nn.functional.pad(chunk, (0, tail)).clone()
        words = chunk.view(torch.int64)
        place = torch.arange(len(words), device=words.device) + start
        mixed = (words ^ (words >> 29)) * _MIX_A + words * (place * _MIX_B | 1)
        total += int((mixed ^ (mixed >> 32)).sum()) * (2 * (start // _CHUNK) + 1)
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)
