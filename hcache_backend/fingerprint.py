"""Fingerprint of the loaded weights, and the namespace of the pages that they make. A model's name
does not suffice: its weights change under the name, and at run time."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash

from hcache_backend.format.envelope import NAMESPACE_BYTES

_VALUES, GPU_VALUES = 1 << 21, 1 << 23  # digested at once: a GPU is slowed by launches
_MIX_A = -7046029254386353131  # odd 64-bit constants of the golden ratio and of splitmix64
_MIX_B = -4658895280553007687
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class Weights:
    """Present weights of one pipeline stage or of all."""

    fingerprint: bytes  # digest over all tensor-parallel ranks
    suspended: str | None = None  # reason why L3 takes and gives nothing at present
    whole: bytes = b""  # digest that does not depend on the number of ranks


class TensorDigest(NamedTuple):
    """Content of one tensor on one rank."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    row: int  # its elements: the last dimension, or the last but one if ranks divide the last
    exact: int  # digest of every byte in its place
    # Sum of the rows' digests in any order; ranks with different rows hold parts of the sum. Rows
    # of zeros (padding) add nothing.
    rows: int


def digest_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], by_column: Container[str] = ()
) -> list[TensorDigest]:
    """Digests of ``tensors``, by name; ``by_column`` names those whose last dimension ranks divide.
    Sums run on the tensors' device: a 14 GB model costs one read of its memory and no transfer."""
    by_name = sorted(tensors, key=lambda item: item[0])
    return [_digest(name, tensor, name in by_column) for name, tensor in by_name]


def fingerprint(ranks: Sequence[Sequence[TensorDigest]]) -> bytes:
    """Digest (16 bytes) of name, shape, dtype and bytes of every tensor of all ranks, in order."""
    digest = xxhash.xxh3_128()
    for number, tensors in enumerate(ranks):
        for t in tensors:
            digest.update(f"{number}|{t.name}|{t.shape}|{t.dtype}|{t.exact}".encode())
    return digest.digest()


def whole_fingerprint(ranks: Sequence[Sequence[TensorDigest]]) -> bytes:
    """Digest (16 bytes) that is the same for any number of ranks. Weaker than :func:`fingerprint`:
    it misses rows that exchange places. If ranks divide a tensor in an unexpected way, the digest
    depends on their number."""
    parts: dict[tuple[str, str, int, int], dict[int, int]] = {}
    for tensors in ranks:
        for t in tensors:
            # Ranks that hold the same part (norms, say) count once.
            parts.setdefault((t.name, t.dtype, len(t.shape), t.row), {})[t.exact] = t.rows
    digest = xxhash.xxh3_128()
    for key, sums in sorted(parts.items()):
        digest.update(f"{key}|{sum(sums.values()) % (1 << 64)}".encode())
    return digest.digest()


def of_all_stages(stages: Sequence[bytes]) -> bytes:
    """Digest (16 bytes) of all pipeline stages: each depends on the weights of those before."""
    return stages[0] if len(stages) == 1 else xxhash.xxh3_128_digest(b"".join(stages))


def model_tensors(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and buffers of ``model``; buffers hold the tables of rotary embeddings."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def namespace(fields: Mapping[str, object]) -> bytes:
    """Namespace (16 bytes) of pages of one kind; a change of any field changes it."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return xxhash.xxh3_128_digest(text.encode())[:NAMESPACE_BYTES]


@torch.no_grad()
def _digest(name: str, tensor: torch.Tensor, by_column: bool) -> TensorDigest:
    totals, start, row = torch.zeros(2, dtype=torch.int64, device=tensor.device), 0, 1
    for chunk in _chunks(tensor.detach(), by_column):
        row = chunk.shape[1]
        sums = _row_sums(chunk)
        place = torch.arange(start, start + len(sums), device=sums.device)
        totals += torch.stack(((sums * (place * _MIX_B | 1)).sum(), sums.sum()))
        start += len(sums)
    exact, rows = (total % (1 << 64) for total in totals.tolist())  # the one wait for the device
    return TensorDigest(name, str(tensor.dtype), tuple(tensor.shape), row, exact, rows)


def _chunks(tensor: torch.Tensor, by_column: bool) -> Iterator[torch.Tensor]:
    """Rows of ``tensor`` in pieces ``[rows, elements]`` of limited size."""
    if tensor.numel() == 0:
        return
    if tensor.dim() < 2:
        matrices: Iterable[torch.Tensor] = [tensor.reshape(-1, 1)]
    elif by_column:
        matrices = (matrix.t() for matrix in tensor.reshape(-1, *tensor.shape[-2:]))
    else:
        matrices = [tensor.reshape(-1, tensor.shape[-1])]
    most = GPU_VALUES if tensor.is_cuda else _VALUES
    for matrix in matrices:
        yield from matrix.split(max(1, most // matrix.shape[1]))


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Digest of each row of ``[rows, elements]``, int64 ``[rows]``; 0 for zeros."""
    rows = rows.contiguous()
    dtype = next(d for d in _WORDS if rows.shape[1] * rows.element_size() % d.itemsize == 0)
    if rows.storage_offset() * rows.element_size() % dtype.itemsize:
        rows = rows.clone()
    words = rows.view(torch.uint8).view(dtype).to(torch.int64)
    place = torch.arange(words.shape[1], device=words.device) * _MIX_B | 1
    mixed = (words ^ (words >> 29)) * _MIX_A + words * place
    sums = (mixed ^ (mixed >> 32)).sum(1)
    sums = (sums ^ (sums >> 31)) * _MIX_B
    return sums ^ (sums >> 29)
