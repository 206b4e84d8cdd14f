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
from hcache_kernels.digest import PROGRAMS, digest_rows

_VALUES, GPU_VALUES = 1 << 21, 1 << 23  # digested at once: a GPU is slowed by launches


@dataclass(frozen=True)
class Weights:
    """Present weights of one pipeline stage or of all."""

    fingerprint: bytes  # digest over all tensor-parallel ranks
    suspended: str | None = None  # reason why L3 takes and gives nothing at present
    any_ranks: bytes = b""  # digest that does not depend on the number of ranks


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
    """Digests of ``tensors``, by name; columns count as rows in tensors of ``by_column``, whose
    last dimension ranks divide. Sums run on each device: 14 GB cost one read, and one wait."""
    by_name = sorted(tensors, key=lambda item: item[0])
    devices = {tensor.device for _, tensor in by_name}
    shape = (len(by_name), PROGRAMS, 2)  # [tensor, partial sum of a kernel's program, exact/rows]
    sums = {device: torch.zeros(shape, dtype=torch.int64, device=device) for device in devices}
    widths = [
        _add_digests(tensor.detach(), name in by_column, sums[tensor.device][i])
        for i, (name, tensor) in enumerate(by_name)
    ]
    totals = {device: each.sum(1).tolist() for device, each in sums.items()}
    digests = []
    for i, (name, tensor) in enumerate(by_name):
        exact, rows = (total % (1 << 64) for total in totals[tensor.device][i])
        form = str(tensor.dtype), tuple(tensor.shape), widths[i]
        digests.append(TensorDigest(name, *form, exact, rows))
    return digests


def fingerprint(ranks: Sequence[Sequence[TensorDigest]]) -> bytes:
    """Digest (16 bytes) of name, shape, dtype and bytes of every tensor of all ranks, in order."""
    digest = xxhash.xxh3_128()
    for number, tensors in enumerate(ranks):
        for t in tensors:
            digest.update(f"{number}|{t.name}|{t.shape}|{t.dtype}|{t.exact}".encode())
    return digest.digest()


def any_ranks_fingerprint(ranks: Sequence[Sequence[TensorDigest]]) -> bytes:
    """Digest (16 bytes) that is the same for any number of ranks. Weaker than :func:`fingerprint`:
    it misses rows that exchange places. If ranks divide a tensor in an unexpected way, the digest
    depends on their number."""
    parts: dict[tuple[str, str, int, int], dict[int, int]] = {}
    for tensors in ranks:
        for t in tensors:
            # Ranks that hold the same part (norms, say) have one exact digest, and count once.
            parts.setdefault((t.name, t.dtype, len(t.shape), t.row), {})[t.exact] = t.rows
    digest = xxhash.xxh3_128()
    for key, sums in sorted(parts.items()):
        digest.update(f"{key}|{sum(sums.values()) % (1 << 64)}".encode())
    return digest.digest()


def combine_stages(stages: Sequence[bytes]) -> bytes:
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
def _add_digests(tensor: torch.Tensor, by_column: bool, sums: torch.Tensor) -> int:
    """Add the digests of a tensor's rows to ``sums``; returns the number of elements of a row."""
    start, width = 0, 1  # of a chunk: number of its first row, elements of a row
    for chunk in _chunks(tensor, by_column):
        digest_rows(chunk, start, sums)
        start, width = start + len(chunk), chunk.shape[1]
    return width


def _chunks(tensor: torch.Tensor, by_column: bool) -> Iterator[torch.Tensor]:
    """Rows of ``tensor``, or columns (``by_column``), in small pieces ``[rows, elements]``."""
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
