"""Which workload the options of a program mean."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from bench.workload.base import Workload, WorkloadError
from bench.workload.paper import ZIPF_CONTEXTS, leval, sharegpt4, zipf_contexts
from bench.workload.sharegpt import Tokenizer, sharegpt_file
from bench.workload.synthetic import RAG_DOCUMENTS, agent, multiturn, rag

Name = Literal["multiturn", "sharegpt4", "leval", "zipf", "agent", "rag", "sharegpt"]


@dataclass(frozen=True)
class WorkloadOptions:
    """The options, under their names on the command line; None: not given.

    Attributes:
        model: Its tokenizer reads the texts of a ShareGPT file.
    """

    workload: Name
    num_clients: int
    seed: int
    num_rounds: int | None = None
    min_rounds: int | None = None
    max_rounds: int | None = None
    request_length: int | None = None
    sub_question_input_length: int | None = None
    output_length: int | None = None
    range_ratio: float | None = None
    leval_task: str | None = None
    zipf_skew: float | None = None
    num_documents: int | None = None
    sharegpt: Path | None = None
    interval: float | None = None
    scale: float = 1.0
    max_context: int | None = None
    model: str | None = None


_ONLY = {
    "num_rounds": ("multiturn",),
    "min_rounds": ("multiturn",),
    "request_length": ("multiturn",),
    "sub_question_input_length": ("multiturn",),
    "output_length": ("multiturn",),
    "range_ratio": ("multiturn",),
    "leval_task": ("leval",),
    "zipf_skew": ("zipf", "rag"),
    "num_documents": ("zipf", "rag"),
    "sharegpt": ("sharegpt",),
}
"""Workloads that an option is for, where it is not for all."""


def choose(options: WorkloadOptions) -> Workload:
    """The workload, scaled and limited.

    Raises:
        WorkloadError: An option is wrong, or not for this workload.
    """
    for name, workloads in _ONLY.items():
        value = getattr(options, name)
        if value is not None and options.workload not in workloads:
            raise WorkloadError(
                f"--{name.replace('_', '-')} {value}: is for --workload {' and '.join(workloads)}; "
                f"{options.workload} has its own (see --scale, --max-rounds and --max-context)"
            )
    if not 0 < options.scale < math.inf:
        raise WorkloadError(f"--scale {options.scale:g}: must be a number above 0")
    made = _make(options)
    if options.scale != 1:
        made = made.scaled(options.scale)
    if options.interval is not None:
        made = replace(made, interval_s=options.interval)
    rounds = None if options.workload == "multiturn" else options.max_rounds
    return made.limited(options.max_context, rounds)


def _make(options: WorkloadOptions) -> Workload:
    clients, seed = options.num_clients, options.seed
    skew = 1.0 if options.zipf_skew is None else options.zipf_skew
    match options.workload:
        case "multiturn":
            return _multiturn(options)
        case "sharegpt4":
            return sharegpt4(clients, seed)
        case "leval":
            return leval(clients, seed, options.leval_task or "mixed")
        case "zipf":
            return zipf_contexts(clients, seed, skew, options.num_documents or ZIPF_CONTEXTS)
        case "agent":
            return agent(clients, seed)
        case "rag":
            return rag(clients, seed, skew, options.num_documents or RAG_DOCUMENTS)
        case "sharegpt":
            if options.sharegpt is None:
                raise WorkloadError("--workload sharegpt: needs --sharegpt FILE")
            return sharegpt_file(options.sharegpt, load_tokenizer(options.model), clients, seed)


def _multiturn(options: WorkloadOptions) -> Workload:
    both = options.num_rounds or 5
    least = options.min_rounds or options.max_rounds or both
    most = options.max_rounds or options.min_rounds or both
    return multiturn(
        options.num_clients,
        options.seed,
        request_length=options.request_length or 512,
        output_length=options.output_length or 64,
        rounds=(least, most),
        sub_question_input_length=options.sub_question_input_length or 0,
        range_ratio=1.0 if options.range_ratio is None else options.range_ratio,
    )


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a model, by transformers.

    Raises:
        WorkloadError: There is none.
    """
    if model is None:
        raise WorkloadError("--sharegpt: needs --model-path, whose tokenizer reads the texts")
    try:
        from transformers import AutoTokenizer

        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(model)
    except ImportError:
        raise WorkloadError("--sharegpt: needs transformers: pip install transformers") from None
    except (OSError, ValueError, KeyError) as error:
        said = str(error).splitlines()[0]
        raise WorkloadError(f"--model-path {model}: has no tokenizer: {said}") from None
    return tokenizer
