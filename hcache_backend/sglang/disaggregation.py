"""Prefill/decode disaggregation: a prefill server sends no K and V that are still on their way to
the device, and with each request the digest of its weights. A decode server stores only its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hcache_backend import metrics
from hcache_backend.fingerprint import Weights
from hcache_backend.sglang.compat import is_first
from hcache_backend.sglang.hook_registry import Hook, OnError, Original
from hcache_backend.sglang.runtime import current

_MODULES = "sglang.srt.disaggregation."

# numbers of ``MetadataBuffers.cached_tokens`` (int32) that no version uses: 16 bytes for a digest
_ROOM = slice(12, 16)

_catching = partial(metrics.catching, "weights_untold", "weights are taken for other ones")


def before_sending_prefix(original: Original, scheduler: Any, req: Any, *a: Any, **kw: Any) -> Any:
    """Before the forward pass of a batch SGLang sends the part of ``req`` that the radix tree has
    on the device. Before 0.5.23 that waits for no load, and with overlap and chunks the pass before
    may still compute a node. What is held back goes after the forward pass, which waits for every
    load."""
    early = False
    with metrics.catching("early_send", "a prefix is sent with the rest of its prompt"):
        loading = bool(scheduler.tree_cache.cache_controller.ack_load_queue)
        computing = scheduler.enable_overlap and is_first()
        early = not (loading or computing)
        if not early and req.early_send_prefix_end is None:
            req.early_send_prefix_end = 0  # the staging buffer wants one answer for all chunks
    return original(scheduler, req, *a, **kw) if early else None


def after_metadata(original: Original, buffers: Any, req: Any, *a: Any, **kw: Any) -> Any:
    """Around ``MetadataBuffers.set_buf`` on a prefill server: also send its weights' digest."""
    result = original(buffers, req, *a, **kw)
    with _catching():
        weights = current().weights.present
        buffers.cached_tokens[req.metadata_buffer_index, _ROOM] = _digest_numbers(weights)
    return result


def before_commit(original: Original, queue: Any, decode_req: Any, *a: Any, **kw: Any) -> Any:
    """Around ``DecodeTransferQueue._commit_transfer_to_req``: K and V of a prompt are there. If the
    digest that was sent with them is not that of our weights, L3 must not store them."""
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    if decode_req.req.bootstrap_host != FAKE_BOOTSTRAP_HOST:  # a health check, without a sender
        weights, same = current().weights, False
        with _catching():
            sent = queue.metadata_buffers.cached_tokens[decode_req.metadata_buffer_index, _ROOM]
            digest = _digest_numbers(weights.present)
            same = bool(digest.any()) and torch.equal(sent.cpu(), digest)
        if not same:
            weights.got_other_weights()
    return original(queue, decode_req, *a, **kw)


def _digest_numbers(weights: Weights | None) -> torch.Tensor:
    """The digest of ``weights``, int32 ``[4]``; zeros if pages must not be stored anyway."""
    if weights is None or weights.suspended is not None:
        return torch.zeros(4, dtype=torch.int32)
    return torch.frombuffer(bytearray(weights.any_ranks), dtype=torch.int32)


_PREFILL = _MODULES + "prefill.SchedulerDisaggregationPrefillMixin."
_QUEUE = _MODULES + "decode.DecodeTransferQueue."
SEND_PREFIX = Hook(_PREFILL + "maybe_send_cached_prefix_chunk", before_sending_prefix)
METADATA = Hook(_MODULES + "utils.MetadataBuffers.set_buf", after_metadata)
RECEIVED_PROMPT = Hook(_QUEUE + "_commit_transfer_to_req", before_commit, OnError.END_L3)
