"""What ranks do at the start when one of them fails."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from hcache_backend.start import self_check
from hcache_backend.start.agreement import Refused


def test_no_rank_takes_the_decode_step_when_another_failed_in_the_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its collectives would wait for that rank for ever."""
    passes = []

    class Stages:
        def run(self, runner: object, batch: object) -> torch.Tensor:
            passes.append(batch)
            return torch.arange(3)

        def pass_on(self) -> None:
            pass

    monkeypatch.setattr(self_check, "_Stages", Stages)
    for name in ("prefill_batch", "forward_batch", "prepare_decode", "_empty_pools"):
        monkeypatch.setattr(self_check, name, lambda *_: "batch")
    monkeypatch.setattr(self_check, "on_all_ranks", lambda group, fine: (False,))
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=64))
    with pytest.raises(Refused, match="another tensor-parallel rank"):
        self_check.prefill_and_decode(runner, 4, "ranks", graphs=False)
    assert passes == ["batch"]


def test_a_forward_pass_that_failed_leaves_none_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang may have stopped the collector of reference cycles by then."""
    left: list[weakref.ref[torch.Tensor]] = []

    class Stages:
        def run(self, runner: object, batch: object) -> torch.Tensor:
            activations = torch.zeros(3)
            left.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("a test's")

        def pass_on(self) -> None:
            pass

    monkeypatch.setattr(self_check, "_Stages", Stages)
    for name in ("prefill_batch", "forward_batch", "_empty_pools"):
        monkeypatch.setattr(self_check, name, lambda *_: "batch")
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=64))
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            self_check.prefill_and_decode(runner, 4, None, graphs=False)
        assert [tensor() for tensor in left] == [None]
    finally:
        gc.enable()
