"""A prefill server says whose K and V it sends, and a decode server stores only those of its own
weights.

The digest of the weights travels with the metadata of each request, where SGLang leaves room.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hcache_backend import metrics
from hcache_backend.sglang.runtime import Weights, current

_ROOM = slice(12, 16)
"""Numbers of ``MetadataBuffers.cached_tokens`` (16 of int32 for each request) that no supported
version uses: they take the 16 bytes of a digest."""

_harmless = partial(metrics.harmless, "weights_untold", "weights are taken for other ones")


def after_metadata(original: Callable[..., Any], buffers: Any, req: Any, *a: Any, **kw: Any) -> Any:
    """Around ``MetadataBuffers.set_buf``, on a prefill server, before the last part is sent."""
    result = original(buffers, req, *a, **kw)
    with _harmless():
        buffers.cached_tokens[req.metadata_buffer_index, _ROOM] = _numbers(current().weights)
    return result


def before_commit(
    original: Callable[..., Any], queue: Any, decode_req: Any, *a: Any, **kw: Any
) -> Any:
    """Around ``DecodeTransferQueue._commit_transfer_to_req``: K and V of a prompt are there."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    if decode_req.req.bootstrap_host != FAKE_BOOTSTRAP_HOST:  # a health check, to which nobody sent
        runtime, same = current(), False
        with _harmless():
            sent = queue.metadata_buffers.cached_tokens[decode_req.metadata_buffer_index, _ROOM]
            own = _numbers(runtime.weights)
            same = bool(own.any()) and torch.equal(sent.cpu(), own)
        if not same:
            runtime.got_other_weights()
    return original(queue, decode_req, *a, **kw)


def _numbers(weights: Weights | None) -> torch.Tensor:
    """The digest of ``weights``, int32 ``[4]``; zeros where pages must not be stored anyway."""
    if weights is None or weights.suspended is not None:
        return torch.zeros(4, dtype=torch.int32)
    return torch.frombuffer(bytearray(weights.whole), dtype=torch.int32)
