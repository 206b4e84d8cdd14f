"""Which workload the options of a program mean."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from bench.harness.program import at_least
from bench.workload.base import Workload, WorkloadError
from bench.workload.paper import LEVAL, ZIPF_CONTEXTS, leval, sharegpt4, zipf_contexts
from bench.workload.sharegpt import Tokenizer, sharegpt_file
from bench.workload.synthetic import RAG_DOCUMENTS, agent, multiturn, rag

VOCABULARY = 1000
"""Random token ids are below it: any model has more."""
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
_NAMES = ("multiturn", "sharegpt4", "leval", "zipf", "agent", "rag", "sharegpt")


def add_workload_options(parser: argparse.ArgumentParser, title: str, default: str) -> None:
    """Options that choose a workload; those that are not given are None.

    Args:
        title: Heading of the options in the help.
        default: The workload if none is named.
    """
    add = parser.add_argument_group(title).add_argument
    parser.set_defaults(default_workload=default)
    count = at_least(1)
    add(
        "--workload",
        choices=_NAMES,
        help="multiturn: as SGLang's benchmark; sharegpt4, leval, zipf: the HCache paper's; "
        f"sharegpt: a file's; default: {default}",
    )
    add("--num-clients", type=count, help="sessions")
    add("--num-rounds", type=count, help="rounds of a client (multiturn); default: 5")
    add("--min-rounds", type=count, help="at least so many (multiturn)")
    add("--max-rounds", type=count, help="at most so many (any workload)")
    add("--request-length", type=count, help="tokens of a question (multiturn); default: 512")
    add(
        "--sub-question-input-length",
        type=at_least(0),
        help="tokens of later questions (multiturn); default: as the first",
    )
    add("--output-length", type=count, help="tokens of a reply (multiturn); default: 64")
    add(
        "--range-ratio",
        type=float,
        help="lengths are between this share of them and all of them (multiturn)",
    )
    add("--leval-task", help=f"{', '.join(LEVAL)} (leval)")
    add(
        "--zipf-skew",
        type=float,
        help="0: all documents alike, 2: few favourites (zipf, rag); default: 1",
    )
    add("--num-documents", type=count, help="documents (zipf, rag)")
    add("--sharegpt", type=Path, help="JSON file of conversations (sharegpt)")
    add(
        "--interval",
        type=at_least(0.0),
        help="seconds between rounds of a client; default: the workload's",
    )
    add(
        "--scale",
        type=float,
        help="multiplies all lengths and intervals, to try a workload on a small machine",
    )
    add("--max-context", type=count, help="tokens of a history, its last reply included")
    add("--vocabulary", type=at_least(2), default=VOCABULARY, help="random token ids are below it")
    add("--seed", type=at_least(0), default=1, help="seed of lengths, tokens and times")


def choose(options: argparse.Namespace) -> Workload:
    """The workload that :func:`add_workload_options` asks for, scaled and limited.

    Args:
        options: Also ``model_path``: its tokenizer reads the texts of a ShareGPT file.

    Raises:
        WorkloadError: An option is wrong, or not for this workload.
    """
    chosen = options.workload or ("sharegpt" if options.sharegpt else options.default_workload)
    for name, workloads in _ONLY.items():
        value = getattr(options, name)
        if value is not None and chosen not in workloads:
            raise WorkloadError(
                f"--{name.replace('_', '-')} {value}: is for --workload {' and '.join(workloads)}; "
                f"{chosen} has its own (see --scale, --max-rounds and --max-context)"
            )
    scale = 1.0 if options.scale is None else options.scale
    if not 0 < scale < math.inf:
        raise WorkloadError(f"--scale {scale:g}: must be a number above 0")
    made = _make(chosen, options)
    if scale != 1:
        made = made.scaled(scale)
    if options.interval is not None:
        made = replace(made, interval_s=options.interval)
    return made.limited(options.max_context, None if chosen == "multiturn" else options.max_rounds)


def _make(name: str, options: argparse.Namespace) -> Workload:
    clients, seed = options.num_clients, options.seed
    skew = 1.0 if options.zipf_skew is None else options.zipf_skew
    match name:
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
    if options.sharegpt is None:
        raise WorkloadError("--workload sharegpt: needs --sharegpt FILE")
    return sharegpt_file(options.sharegpt, load_tokenizer(options.model_path), clients, seed)


def _multiturn(options: argparse.Namespace) -> Workload:
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
