"""Numbers of a run, under the names of SGLang's ``bench_multiturn.py`` where they mean the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.multiturn.driver import Request, RunResult

TIERS = ("device", "host", "storage")


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of ``values`` are below, as SGLang's benchmark counts; 0 of none."""
    if not values:
        return 0.0
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Average, median, p90, p99 and maximum of ``values``, under SGLang's names."""
    return {
        f"average_{name}": _mean(values),
        f"median_{name}": percentile(values, 0.5),
        f"p90_{name}": percentile(values, 0.9),
        f"p99_{name}": percentile(values, 0.99),
        f"max_{name}": max(values, default=0.0),
    }


def summarise(result: RunResult, rate: float) -> dict[str, Any]:
    """The ``summary`` of a line of the log file. Times are in seconds.

    ``itl`` is over all tokens; ``tbt`` is the paper's time between tokens, a request's average.
    Hit rates are shares of all prompt tokens.
    """
    good = [request for request in result.requests if request.error is None]
    prompts = [request.prompt_tokens for request in good]
    outputs = [request.output_tokens for request in good]
    gaps = [gap for request in good for gap in request.gaps_s]
    duration = max(result.duration_s, 1e-9)
    return {
        "total_requests": len(good),
        "failed_requests": len(result.requests) - len(good),
        "request_rate": rate,
        "duration": result.duration_s,
        "average_prompt_len": _mean(prompts),
        "p90_prompt_len": percentile(prompts, 0.9),
        "p99_prompt_len": percentile(prompts, 0.99),
        "average_output_len": _mean(outputs),
        "p90_output_len": percentile(outputs, 0.9),
        "p99_output_len": percentile(outputs, 0.99),
        **spread("ttft", [request.ttft_s for request in good]),
        **spread("itl", gaps),
        **spread("tbt", [_mean(request.gaps_s) for request in good if request.gaps_s]),
        **spread("latency", [request.latency_s for request in good]),
        "input_token_throughput": sum(prompts) / duration,
        "output_token_throughput": sum(outputs) / duration,
        "throughput": len(good) / duration,
        **hit_rates(good),
    }


def by_round(requests: Sequence[Request]) -> dict[str, Any]:
    """The same for every round: TTFT and hit rates, under ``round_0``, ``round_1``, ..."""
    rounds: dict[int, list[Request]] = {}
    for request in requests:
        if request.error is None:
            rounds.setdefault(request.round, []).append(request)
    return {
        f"round_{number}": {
            "average_ttft": _mean([request.ttft_s for request in rounds[number]]),
            "request_count": len(rounds[number]),
            **hit_rates(rounds[number]),
        }
        for number in sorted(rounds)
    }


def hit_rates(requests: Sequence[Request]) -> dict[str, float | None]:
    """Shares of prompt tokens that were not computed, in all and by tier.

    The tiers are None where the server does not say which one it was.
    """
    prompts = max(1, sum(request.prompt_tokens for request in requests))
    split = not any(request.cached.unsplit for request in requests)
    shares: dict[str, float | None] = {
        f"{tier}_hit_rate": (
            sum(getattr(request.cached, tier) for request in requests) / prompts if split else None
        )
        for tier in TIERS
    }
    return {
        "cache_hit_rate": sum(request.cached.total for request in requests) / prompts,
        **shares,
    }


def errors(requests: Sequence[Request]) -> Mapping[str, int]:
    """What failed requests said, with how often, the most frequent first."""
    found: dict[str, int] = {}
    for request in requests:
        if request.error is not None:
            found[request.error] = found.get(request.error, 0) + 1
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
