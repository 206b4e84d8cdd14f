"""What a model says without any cache, and when another run's tokens count as equal to it."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.cpu_engine.hcache_cpu_engine import stub_torchvision


def load_reference(model: Path, dtype: str = "float32") -> Any:
    """The model as transformers runs it. Kept until its weights change or four others came."""
    newest = max(weights.stat().st_mtime_ns for weights in model.glob("*.safetensors"))
    return _load(model, dtype, newest)


@lru_cache(maxsize=4)
def _load(model: Path, dtype: str, _newest: int) -> Any:
    stub_torchvision()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, local_files_only=True).eval()


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
