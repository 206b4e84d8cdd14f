"""CUDA graphs: SGLang records them before it asks for a host pool, so our copies come first.

- A replay runs recorded kernels and no Python hook: staging and hooks exist before recording.
- The copies read the places of a step's rows from device memory, and leave the step's number beside
  each row. This shows a replay that recorded no copy of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.sglang.arguments import drafted_tokens, resolved
from hcache_backend.sglang.hook_registry import Hook
from hcache_backend.sglang.runtime import Runtime, current
from hcache_backend.start.agreement import Refused
from hcache_backend.start.page_plan import (
    staging_places,
    step_tokens,
    take_staging,
)
from hcache_backend.start.partition_choice import layer_methods
from hcache_backend.start.refusals import graphs_are_off, own_pages_refusal, refusal
from hcache_backend.start.self_check import attention_modules

logger = logging.getLogger("hcache")

GRAPHS = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"


def graph_hooks() -> list[Hook]:
    """Hooks for capture in recorded CUDA graphs; some versions lack the place."""
    return [Hook(GRAPHS, _before_graphs)]


def _before_graphs(original: Callable[..., Any], runner: Any, *a: Any, **kw: Any) -> Any:
    record_copies(current(), runner)
    return original(runner, *a, **kw)


def record_copies(runtime: Runtime, runner: Any) -> None:
    """Prepare capture before SGLang records CUDA graphs. Raises only SystemExit (wrong option)."""
    if runner.device == "cpu" or getattr(runner, "is_draft_worker", False) or graphs_are_off():
        return
    try:
        kvcache = runner.token_to_kv_pool
        if own_pages_refusal(runtime, kvcache) or refusal(runtime, kvcache):
            return  # the reason is logged when the host pool is built
        hidden = layer_methods(runtime, kvcache).layers("hidden")
        every = attention_modules(runner.model, kvcache.layer_num)
        seen = [every[layer] for layer in hidden]
        recorded = _largest_recorded_tokens(drafted_tokens(resolved(runner.server_args)))
        places = staging_places(len(seen), *step_tokens(runner), recorded)
        rows = runner.model_config.hidden_size, runner.dtype
        staging = take_staging(len(seen), *rows, places, kvcache.device, recorded_tokens=recorded)
        hooks = HiddenCapture([(layer.module, layer.linears) for layer in seen])
        hooks.staging = staging
        runner.hcache_capture = hooks
    except Refused as refused:
        runner.hcache_no_capture = str(refused)
    except Exception:
        logger.exception("hcache: CUDA graphs are recorded without copies of hidden states")


def check_recording(runner: Any, hidden: torch.Tensor) -> HiddenCapture | None:
    """Capture hooks of the recorded CUDA graphs; None if none are recorded. Raises Refused if they
    do not capture rows like those of ``hidden``, ``[n, hidden]``."""
    hooks: HiddenCapture | None = getattr(runner, "hcache_capture", None)
    if runner.device == "cpu" or graphs_are_off():
        return hooks
    if hooks is None or hooks.staging is None:
        why = getattr(runner, "hcache_no_capture", "the log says why")
        raise Refused(f"CUDA graphs were recorded without our copies: {why}")
    width, dtype = hooks.staging.width, hooks.staging.dtype
    if (width, dtype) != (hidden.shape[1], hidden.dtype):
        raise Refused(
            f"CUDA graphs copy {width} values of {dtype}, and this model's rows are "
            f"{hidden.shape[1]} of {hidden.dtype}"
        )
    return hooks


def _largest_recorded_tokens(per_request: int) -> int:
    """``per_request``: tokens of a request in a decode step."""
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    sizes = [0]
    for phase, tokens in ((config.decode, per_request), (config.prefill, 1)):
        if phase.backend != "disabled":
            sizes += [tokens * size for size in (phase.max_bs or 0, *(phase.bs or ()))]
    return max(sizes)
