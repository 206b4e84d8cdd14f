"""Segments of pages to a GPU by its copy engine, which takes nothing of the multiprocessors.

One call of CUDA takes all segments of a layer: calls for each would fill the stream's queue, and
the thread that launches restores would wait for the bus. It needs CUDA 12.8 and its Python
bindings (``cuda-python``, which SGLang needs, too).
"""

from typing import Any

import torch


class NoCopyEngine(RuntimeError):
    """The copy engine cannot be asked for many copies at once; the message says why."""


def copy_segments(
    pages: torch.Tensor, page_ids: torch.Tensor, offset: int, out: torch.Tensor, stream: int
) -> None:
    """Launch what :func:`hcache_kernels.pages.gather_pages` does, which checks the arguments.
    ``page_ids`` are on the CPU, ``out`` is on a GPU. ``stream`` is CUDA's handle; the legacy
    default stream (0) takes no such call. Raises NoCopyEngine if nothing was launched."""
    length, first = out.shape[1], pages.data_ptr() + offset
    sources = (page_ids.long() * pages.shape[1] + first).tolist()
    targets = list(range(out.data_ptr(), out.data_ptr() + out.nbytes, length))
    if not sources:
        return
    if not stream:
        raise NoCopyEngine("CUDA's default stream takes no batch of copies")
    runtime = _bindings()
    attributes = runtime.cudaMemcpyAttributes()
    attributes.srcAccessOrder = runtime.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
    sizes = [length] * len(sources)
    # One set of attributes, which holds from the first copy on.
    try:
        error, *_ = runtime.cudaMemcpyBatchAsync(
            targets, sources, sizes, len(sources), [attributes], [0], 1, stream
        )
    except (TypeError, ValueError) as problem:  # bindings of another version ask otherwise
        raise NoCopyEngine(f"cudaMemcpyBatchAsync of these bindings: {problem}") from None
    if int(error):
        raise NoCopyEngine(f"cudaMemcpyBatchAsync: {error}")


def _bindings() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise NoCopyEngine(f"CUDA's Python bindings are missing (cuda-python): {error}") from None
    if not hasattr(runtime, "cudaMemcpyBatchAsync"):
        raise NoCopyEngine("CUDA's Python bindings are older than 12.8")
    return runtime
