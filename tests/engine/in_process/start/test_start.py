"""What ranks do at the start when one of them fails."""

import gc
import weakref
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hcache_backend.ranks import Refused
from hcache_backend.sglang import passes


def test_no_rank_takes_the_decode_step_when_another_failed_in_the_prefill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its collectives would wait for that rank for ever."""
    seen = []

    class Stages(AbstractContextManager[Any]):
        def run(self, runner: object, batch: object) -> torch.Tensor:
            seen.append(batch)
            return torch.arange(3)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(passes, "_Stages", Stages)
    for name in ("prefill_batch", "forward_batch", "prepare_decode", "_empty_pools"):
        monkeypatch.setattr(passes, name, lambda *_: "batch")
    monkeypatch.setattr(passes, "smallest", lambda group, fine: [False])
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=64))
    with pytest.raises(Refused, match="another tensor-parallel rank"):
        passes.prefill_and_decode(runner, 4, "ranks", graphs=False)
    assert seen == ["batch"]


def test_a_forward_pass_that_failed_leaves_none_of_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang may have stopped the collector of reference cycles by then."""
    left: list[weakref.ref[torch.Tensor]] = []

    class Stages(AbstractContextManager[Any]):
        def run(self, runner: object, batch: object) -> torch.Tensor:
            activations = torch.zeros(3)
            left.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("a test's")

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(passes, "_Stages", Stages)
    for name in ("prefill_batch", "forward_batch", "_empty_pools"):
        monkeypatch.setattr(passes, name, lambda *_: "batch")
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=64))
    gc.disable()
    try:
        with suppress(torch.OutOfMemoryError):
            passes.prefill_and_decode(runner, 4, None, graphs=False)
        assert [tensor() for tensor in left] == [None]
    finally:
        gc.enable()
