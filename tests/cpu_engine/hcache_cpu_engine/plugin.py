"""SGLang plugin: torch code in place of the GPU kernels on the serving path."""

import functools
import inspect
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import attention, dsa, fp8, recurrent, reordering, speculation, transfers


def activate() -> None:
    """Called by SGLang in each of its processes, before the server arguments are known there."""
    recurrent.install()  # Qwen's models look operators up at import
    _replace_allocator_kernels()
    _replace_elementwise_kernels()
    _unpin_host_pools()
    _ignore_pin_memory()
    _ignore_waits_for_cuda()
    _go_without_nccl()
    _share_memory_with_nobody()
    _hook_without_a_search_of_all_modules()
    if os.environ.get("HCACHE_CPU_ENGINE_FORK") == "1":
        _fork_instead_of_spawn()
        if "--enable-metrics" in sys.argv:
            _share_metrics_between_processes()
    transfers.install()
    attention.install()
    speculation.install()
    reordering.install()
    fp8.install()
    dsa.install()


class TorchKernel:
    """A torch function behind triton's `kernel[grid](...)` call syntax."""

    def __init__(self, run: Callable[..., None]):
        self.run = run

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.run


def _replace_allocator_kernels() -> None:
    from sglang.srt.mem_cache.allocator import paged

    def alloc_extend(
        prefix_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        last_loc: torch.Tensor,
        free_pages: torch.Tensor,
        out_indices: torch.Tensor,
        _batch_bound: int,
        page_size: int,
    ) -> None:
        paged.alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, "cpu"
        )

    paged.alloc_extend_kernel = TorchKernel(alloc_extend)
    paged.alloc_decode_kernel = TorchKernel(alloc_decode)


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    _batch_bound: int,
    page_size: int,
) -> None:
    """One slot per request: the next in its last page, or the first of the next free page.

    Writes what fits when pages run out; the caller compares demand with supply afterwards.
    """
    out_indices.copy_(last_loc + 1)
    opens_page = torch.nonzero((seq_lens - 1) % page_size == 0).flatten()[: len(free_pages)]
    out_indices[opens_page] = free_pages[: len(opens_page)] * page_size


def _replace_elementwise_kernels() -> None:
    from sglang.kernels.ops.elementwise import elementwise

    elementwise._fused_gate_sigmoid_mul_add_kernel = TorchKernel(gate_sigmoid_mul_add)

    from sglang.srt.models import minimax_m2

    minimax_m2.rms_sumsq_serial = sums_of_squares
    minimax_m2.rms_apply_serial = norms_by_sums


def gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    DO_ADD: bool = True,
    **_launch: Any,
) -> None:
    """`output (+)= sigmoid(hidden . gate) * shared`: Qwen2-MoE's shared expert, in float32."""
    gate = torch.sigmoid(hidden_states.float() @ gate_weight.float())
    result = gate[:, None] * shared_output.float()
    output.copy_(result + output.float() if DO_ADD else result)


def sums_of_squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """MiniMax-M2's norms over all heads, one half: sums of each row, float32 `[2 n]`."""
    return torch.cat([rows.float().pow(2).sum(1) for rows in (query, key)])


def norms_by_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    sums: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, ...]:
    """The other half: `sums` are those of all `ranks`, each of which has as many heads."""
    return tuple(
        (rows.float() * torch.rsqrt(of[:, None] / rows.shape[1] / ranks + eps) * weight.float()).to(
            rows.dtype
        )
        for rows, weight, of in zip(
            (query, key), (query_weight, key_weight), sums.chunk(2), strict=True
        )
    )


def _unpin_host_pools() -> None:
    """Pinning registers memory with CUDA. Patched in the base class: covers every host pool."""
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

    original = HostKVCache.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def unpinned_init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        original(*bound.args, **bound.kwargs)

    HostKVCache.__init__ = unpinned_init


def _ignore_pin_memory() -> None:
    """A CPU torch refuses `pin_memory=True`; SGLang's LoRA code asks for it unconditionally."""
    for factory in ("tensor", "zeros", "empty"):
        setattr(torch, factory, _unpinned(getattr(torch, factory)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self


def _ignore_waits_for_cuda() -> None:
    """Draft models that share the head of the model wait for the device unconditionally, and from
    SGLang 0.5.23 on prefill servers record an event of CUDA's behind each chunk that they send."""
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **kwargs: None
    torch.cuda.current_stream = lambda *args, **kwargs: None
    torch.cuda.Event = DoneEvent


def _go_without_nccl() -> None:
    """The torch that SGLang pins brings NCCL, and SGLang opens it for a second rank, GPU or not."""
    from sglang.srt.distributed.device_communicators import pynccl

    def missing(path: str | None = None) -> None:
        raise OSError("no NCCL without a GPU")

    pynccl.NCCLLibrary = missing


def _share_memory_with_nobody() -> None:
    """SGLang does not start if memory of the device falls too much while it loads the weights. Of
    a machine's it may: other processes take it. So only this process' own counts."""
    import psutil
    from sglang.srt.utils import common

    free = getattr(common, "get_free_cpu_memory", None)  # from SGLang 0.5.23 on
    if free is None:
        return
    first: dict[int, int] = {}

    def free_of_this_process() -> int:
        own = psutil.Process().memory_info().rss
        return first.setdefault(os.getpid(), int(free()) + own) - own

    common.get_free_cpu_memory = free_of_this_process


class DoneEvent:
    """A CPU has done its work when it returns, so an event behind it has always happened."""

    def __init__(self, **_options: Any) -> None: ...
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def _unpinned(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return factory(*args, **kwargs)

    return make


def _fork_instead_of_spawn() -> None:
    """Start the scheduler and the detokenizer as forks, which have everything imported already.

    SGLang asks for `spawn` because CUDA does not survive a fork. Most of a CPU server's start-up
    would be these processes importing the same modules again. Plugins then run once, in the parent,
    and their hooks are inherited.
    """
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_start_method


def _share_metrics_between_processes() -> None:
    """Keep metrics in files of the folder that SGLang names, as a fresh process does.

    prometheus-client decides it at its import, and in a fork that was before there was a folder.
    """
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue()


def _hook_without_a_search_of_all_modules() -> None:
    """Apply hooks without a look at every name of every module, 0.1 s per hook.

    SGLang looks for what modules have imported by name. Nobody imports a method so, and nobody but
    SGLang its functions. Half of a small server's start-up would be this search.
    """
    from sglang.srt.plugins import hook_registry

    def propagate(original: object, wrapped: object, owner: object) -> int:
        if isinstance(owner, type):
            return 0
        found = [
            (module, name)
            for module_name, module in list(sys.modules.items())
            if module_name.startswith("sglang.") and module is not owner
            for name, value in vars(module).items()
            if value is original
        ]
        for module, name in found:
            setattr(module, name, wrapped)
        return len(found)

    hook_registry._propagate_patch = propagate
