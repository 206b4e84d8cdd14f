"""Digests of weights on a GPU: those of a CPU, by one launch for a part and one wait for all."""

from typing import Any

import pytest
import torch

from hcache_backend import fingerprint
from hcache_backend.fingerprint import digest_tensors
from hcache_kernels import digest
from hcache_kernels.launch import Launch
from tests.cuda_standin.device import CUDA


@pytest.mark.parametrize("by_column", [(), ("matrix",)])
def test_weights_on_a_gpu_are_digested_in_large_parts_and_read_once(
    by_column: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_VALUES", 16)
    monkeypatch.setattr(fingerprint, "GPU_VALUES", 64)
    weights = {"matrix": torch.randn(32, 8), "vector": torch.randn(64), "none": torch.zeros(0)}
    here = digest_tensors(weights.items(), by_column)
    parts, launch_of = list[int](), digest.digest_launch

    def counted(words: torch.Tensor, *rest: Any) -> Launch:
        parts.append(words.nbytes // 4)
        return launch_of(words, *rest)

    monkeypatch.setattr(digest, "digest_launch", counted)
    waits, current = list[Any](), torch.cuda.current_stream()
    drain = current.drain
    monkeypatch.setattr(current, "drain", lambda *until: waits.append(until) or drain(*until))
    moved = {name: weight.to(CUDA) for name, weight in weights.items()}
    waits.clear()
    assert digest_tensors(moved.items(), by_column) == here
    assert len(waits) == 1
    assert parts == [64] * 5
