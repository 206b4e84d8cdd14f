"""What a model says without any cache, and when another run's tokens count as equal to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.cpu_engine.hcache_cpu_engine import stub_torchvision


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation and, per token, the log-probabilities of the two best candidates."""

    tokens: list[int]
    top2: list[tuple[float, float]]


def greedy(
    model: Path, prompts: Sequence[Sequence[int]], count: int, dtype: str = "float32"
) -> list[Greedy]:
    """Greedy continuations of `prompts` by transformers: no paging, no reuse of anything.

    Exact only in float32. In bfloat16 kernels round differently, so take the reference from the
    same engine instead (a `Server` with `cache="none"`).
    """
    import torch

    net = load_reference(model, dtype)
    with torch.inference_mode():
        return [_greedy_one(net, list(prompt), count) for prompt in prompts]


def load_reference(model: Path, dtype: str = "float32") -> Any:
    """The model as transformers runs it. Kept until its weights change or four others came."""
    newest = max(weights.stat().st_mtime_ns for weights in model.glob("*.safetensors"))
    return _load(model, newest, dtype)


@lru_cache(maxsize=4)
def _load(model: Path, _newest: int, dtype: str) -> Any:
    import torch

    stub_torchvision()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), local_files_only=True
    ).eval()


def _greedy_one(net: Any, prompt: list[int], count: int) -> Greedy:
    import torch

    tokens: list[int] = []
    top2: list[tuple[float, float]] = []
    step, past = torch.tensor([prompt]), None
    for _ in range(count):
        out = net(input_ids=step, past_key_values=past, use_cache=True, logits_to_keep=1)
        best = torch.log_softmax(out.logits[0, -1].float(), -1).topk(2)
        tokens.append(int(best.indices[0]))
        top2.append((float(best.values[0]), float(best.values[1])))
        step, past = torch.tensor([[tokens[-1]]]), out.past_key_values
    return Greedy(tokens, top2)


def first_difference(got: Sequence[int], want: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when the sequences are equal."""
    for i, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            return i
    return None if len(got) == len(want) else min(len(got), len(want))


def assert_equal_tokens(got: Sequence[int], want: Sequence[int]) -> None:
    """The rule for float32: exactly the tokens of the run without a cache."""
    at = first_difference(got, want)
    assert at is None, (
        f"token {at} of {len(want)} differs: got {list(got[at : at + 5])}, "
        f"without a cache {list(want[at : at + 5])}"
    )


def assert_equal_or_tie(
    got: Sequence[int],
    want: Sequence[int],
    top2_logprobs: Sequence[tuple[float, float]],
    bound: float,
) -> None:
    """The rule for bfloat16: equal, or first different where the no-cache run nearly had a tie.

    `top2_logprobs` are the no-cache run's two best log-probabilities at each token. What follows
    the first difference is another text and says nothing.
    """
    at = first_difference(got, want)
    if at is None:
        return
    assert at < len(got) and at < len(want), f"lengths differ: {len(got)} and {len(want)} tokens"
    best, second = top2_logprobs[at]
    assert best - second < bound, (
        f"token {at} is {got[at]}, without a cache {want[at]}, and that was no tie: "
        f"the two best log-probabilities are {best - second:.4f} apart (bound {bound})"
    )
