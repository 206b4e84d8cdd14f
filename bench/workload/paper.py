"""Workloads with the statistics of the HCache paper (EuroSys '25), sections 2.3, 6.1 and 6.4.

The paper gives means, one median and one maximum; which distribution has them is not said, so
lengths are log-normal here, as lengths of texts mostly are, with spreads of our own choice.
"""

from collections.abc import Sequence

import numpy as np

from bench.workload.base import Lengths, Session, Turn, Workload, WorkloadError, lognormal, zipf

HISTORY_CAP = 16_384
ROUND_INTERVAL_S = 30.0


class ShareGPT4:
    """Section 2.3 and figure 3: means of a round, median and cap of a conversation's history."""

    prompt_mean, prompt_spread = 66.8, 1.2
    output_mean, output_spread = 358.8, 0.7
    # With rounds of 425.6 tokens on average, half of the histories are over 2.5K tokens.
    rounds_median, rounds_spread = 6.0, 1.0


class LEval:
    """Table 1: mean tokens of contexts, instructions and replies in the row AVG. (20 sub-tasks)."""

    context, context_spread = 16340.2, 0.6
    prompt, output = 44.7, 50.2


_INSTRUCTION_SPREAD = 0.4
ZIPF_CONTEXTS = 24
"""With room for 48K tokens on the device (Llama-2-7B on an A100 40G, section 2.4), an LRU cache
hits about 15% of uniform requests for so many contexts of at most 16K, as in section 6.4."""
MAX_SKEW = 2.0


def sharegpt4(clients: int, seed: int) -> Workload:
    """Conversations as in figure 9: rounds of one are 30 s apart, conversations arrive at the rate.

    A round that would make its conversation longer than 16K tokens is left out with those after it.
    """
    source = np.random.default_rng([seed, 1])
    drawn = source.lognormal(np.log(ShareGPT4.rounds_median), ShareGPT4.rounds_spread, clients)
    sessions = []
    for rounds in np.maximum(1, np.rint(drawn)).astype(int).tolist():
        prompts = lognormal(source, ShareGPT4.prompt_mean, ShareGPT4.prompt_spread, rounds)
        outputs = lognormal(source, ShareGPT4.output_mean, ShareGPT4.output_spread, rounds)
        fit = int(np.searchsorted(np.cumsum(prompts + outputs), HISTORY_CAP, side="right"))
        turns = list(map(Turn, prompts.tolist(), outputs.tolist()))
        if not fit:  # one round beyond 16K, which is next to impossible
            turns = [Turn(min(turns[0].prompt, HISTORY_CAP // 2), HISTORY_CAP // 2)]
        sessions.append(Session(tuple(turns[: max(1, fit)])))
    return Workload("sharegpt4", tuple(sessions), interval_s=ROUND_INTERVAL_S, seed=seed)


def leval(clients: int, seed: int) -> Workload:
    """Long contexts as in figure 10: each is restored once, for one instruction, one at a time.

    Contexts go beyond 16K tokens, which those of the paper's models did not.
    """
    source = np.random.default_rng([seed, 2])
    contexts = lognormal(source, LEval.context, LEval.context_spread, clients)
    return _instructions("leval", contexts, range(clients), source, seed)


def zipf_contexts(
    clients: int, seed: int, skew: float = 1.0, contexts: int = ZIPF_CONTEXTS
) -> Workload:
    """Requests for contexts of L-Eval with Zipf's popularity, as in section 6.4 and figure 15.

    The device's cache is not flushed between requests: popular contexts stay there. ``skew``: the
    exponent, from 0 (uniform) to 2.

    Raises:
        WorkloadError: The skew is out of its range.
    """
    if not 0 <= skew <= MAX_SKEW:
        raise WorkloadError(f"--zipf-skew {skew:g}: must be from 0 (uniform) to {MAX_SKEW:g}")
    source = np.random.default_rng([seed, 3])
    lengths = lognormal(source, LEval.context, LEval.context_spread, contexts)
    chosen = zipf(source, contexts, skew, clients).tolist()
    return _instructions("zipf", lengths, chosen, source, seed)


def _instructions(
    name: str,
    contexts: Lengths,
    asked: Sequence[int],
    source: np.random.Generator,
    seed: int,
) -> Workload:
    """One instruction at a time, each about the context of its place in ``asked``."""
    prompts = lognormal(source, LEval.prompt, _INSTRUCTION_SPREAD, len(asked))
    outputs = lognormal(source, LEval.output, _INSTRUCTION_SPREAD, len(asked))
    turns = map(Turn, prompts.tolist(), outputs.tolist())
    sessions = tuple(Session((turn,), place) for turn, place in zip(turns, asked, strict=True))
    return Workload(name, sessions, tuple(contexts.tolist()), max_parallel=1, seed=seed)
