"""What command lines mean to us, after SGLang's own resolution of its arguments.

    python -m tests.contract.meanings MODEL < COMMAND_LINES > ANSWERS

COMMAND_LINES and ANSWERS are lists in JSON. It runs in the environment of the CPU engine, with the
SGLang that is imported there, and starts no server. Arguments for a GPU are resolved without one.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.managers import cache_controller
from sglang.srt.server_args import prepare_server_args

from hcache_backend.config import ConfigError
from hcache_backend.sglang import arguments
from hcache_backend.sglang.controller import OwnPagesController
from hcache_backend.start import attach, capabilities
from hcache_backend.start.capabilities import CAPABILITIES, refusal
from tests.engine.in_process.start.servers import server

USUAL = ("--device", "cuda", "--enable-hierarchical-cache", "--page-size", "64")


def answers(model: str, line: Sequence[str]) -> dict[str, Any]:
    """What we make of ``line``; ``unknown``: this version does not take it."""
    try:
        with contextlib.redirect_stderr(sys.stdout):
            given = prepare_server_args(["--model-path", model, *USUAL, *line])
            given.resolve_once()
    except (SystemExit, ValueError, AssertionError, NotImplementedError) as error:
        return {"unknown": str(error)}
    args = arguments.resolved(given)
    asked = server()
    asked.runner.server_args = given
    capabilities._graphs = lambda: args.cuda_graph_config
    refused = {name: refusal(name, asked) for name in CAPABILITIES}
    with published(given):
        config = storage_config(args)
    return {
        "without": [name for name, reason in refused.items() if reason is not None],
        "ranks": arguments.ranks_of_a_request(args),
        "groups": arguments.attention_groups(args),
        "stored by": [config.tp_size, config.pp_size],
        "page": arguments.page_size(given),
        "drafted": arguments.drafted_tokens(args),
        "roles": [role for role in ("decode", "prefill") if arguments.may_be(role, given)],
        "whole graphs": capabilities.records_whole_prefills(),
        "attach": refused_at_attach(args),
    }


@contextlib.contextmanager
def published(given: Any) -> Iterator[None]:
    """The arguments are those of this process; it is the first rank of all groups."""
    runtime_context.publish(given, role="scheduler")
    parallel = runtime_context.get_parallel()
    ranks = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_dp_rank", "attn_dcp_rank")
    groups = parallel.attn_dp_size > 1
    cache_controller.is_dp_attention_enabled = lambda: groups  # set with process groups only
    with parallel.override(**dict.fromkeys(ranks, 0)):
        yield


def storage_config(args: Any) -> Any:
    """What SGLang tells our backend of its ranks."""
    controller: Any = object.__new__(OwnPagesController)
    vars(controller).update(
        mem_pool_host=SimpleNamespace(layout="page_first"),
        mem_pool_device=None,
        storage_host_pool=SimpleNamespace(storage_format_tag=None),
        attn_cp_group=None,
        enable_storage_metrics=False,
        page_size=args.page_size,
    )
    return controller._generate_storage_config("model")


def refused_at_attach(args: Any) -> bool:
    try:
        attach.check_arguments(args)
    except ConfigError:
        return True
    return False


if __name__ == "__main__":
    found = [answers(sys.argv[1], line) for line in json.load(sys.stdin)]
    print("\n" + json.dumps(found))
