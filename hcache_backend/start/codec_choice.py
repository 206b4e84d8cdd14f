"""The codecs that pages are really stored in: the wanted one, if it serves this model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hcache_backend.format.page import PageLayout
from hcache_backend.format.units import WHOLE, Share
from hcache_backend.host.segments import KVSegments
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.check import CODEC_TOLERANCE, first_problem, projection_problem
from hcache_backend.projection.exactness import relative_difference
from hcache_backend.projection.projector import Projector
from hcache_backend.sglang.runtime import Runtime
from hcache_backend.start.agreement import Refused, all_or_none
from hcache_backend.start.page_plugin import page_plugin
from hcache_backend.start.self_check import Probe
from hcache_kernels.codecs import Codec, UnsupportedRows, make_codec

logger = logging.getLogger("hcache")

_UNENCODABLE_SHARE = 0.1
"""Warn if a codec cannot hold a larger share of the probe's tokens: hardly a conversation goes to
L3 then. It stays in use, because pages must not depend on findings at a server's start."""


def asked_codec(runtime: Runtime, dtype: torch.dtype) -> str:
    """The codec that option ``codec`` means for values of ``dtype``, on which ``auto`` depends."""
    assert runtime.config is not None
    asked = runtime.config.codec
    if asked == "auto":
        return "exp4" if dtype == torch.bfloat16 else "none"
    return asked


def wanted_codec(runtime: Runtime, runner: Any) -> Codec:
    """The codec of hidden states; the probe finds out later if it serves this model."""
    width, dtype = runner.model_config.hidden_size, runner.dtype
    try:
        return make_codec(asked_codec(runtime, dtype), width, dtype)
    except UnsupportedRows:
        return make_codec("none", width, dtype)


def kv_codec(runtime: Runtime, kvcache: Any, share: Share, groups: int, stages: int) -> str:
    """The codec of K and V, by the option and their shape alone; logs a fallback to ``none``.
    ``groups``: groups of heads in a page of all ranks."""
    try:
        return _encoding_segments(runtime, kvcache, share, groups, stages).codec
    except UnsupportedRows as error:
        assert runtime.config is not None
        level = logging.INFO if runtime.config.codec == "auto" else logging.WARNING
        logger.log(level, "hcache: K and V are stored as they are (codec 'none'): %s", error)
        return "none"


def encoded_share(runtime: Runtime, kvcache: Any, stages: int) -> float:
    """Encoded bytes of K and V relative to plain ones; 1.0 without a codec."""
    try:
        kv = _encoding_segments(runtime, kvcache, WHOLE, 1, stages)
    except UnsupportedRows:
        return 1.0
    layout = kv.layout([kv.stored_layer(layer) for layer in kv.layers], WHOLE)
    return sum(layout.segment_bytes) / (len(kv.layers) * kv.plain_bytes)


def _encoding_segments(
    runtime: Runtime, kvcache: Any, share: Share, groups: int, stages: int
) -> KVSegments:
    """K and V of all layers by option ``codec``; raises UnsupportedRows."""
    codec = asked_codec(runtime, kvcache.k_buffer[0].dtype)
    if codec != "none" and stages > 1:  # a stage cannot tell the others what it could not keep
        raise UnsupportedRows(f"codec {codec!r} takes no K and V of pipeline stages")
    layers, plugin = range(kvcache.layer_num), page_plugin(runtime.config)
    if plugin is not None:
        return plugin.segments(kvcache, layers, kvcache.page_size, groups // share.of)
    return KVSegments(kvcache, layers, kvcache.page_size, share, groups, codec)


def whole_pages(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """``slots`` (int64 ``[n]``) truncated to whole pages, repeated to fill at least one."""
    tokens = max(1, len(slots) // page_size) * page_size
    return slots[torch.arange(tokens, device=slots.device) % len(slots)]


def check_lossy(
    kv: KVSegments, layout: PageLayout, slots: torch.Tensor, allowed_change: float
) -> None:
    """Encode and decode the model's K and V in ``slots`` (int64 ``[p * page_size]``). Raises
    Refused if a layer does not fit, or changes too much; by ``allowed_change`` with a code of a
    plug-in."""
    planes = [[plane[slots].cpu() for plane in kv.planes(layer)] for layer in kv.layers]
    encoded, fits = kv.through_codec(layout, planes)
    for layer, exact, back, fit in zip(kv.layers, planes, encoded, fits, strict=True):
        if not bool(fit.all()):
            raise Refused(f"it cannot hold K and V of layer {layer}")
        allowed = CODEC_TOLERANCE.get(kv.code_of(layout, layer), allowed_change)
        for name, got, plane in zip("KV", back, exact, strict=True):
            wanted = plane.float()
            # All tokens count alike: an outlier would hide the losses of the others.
            size = wanted.square().mean(2, keepdim=True).sqrt().clamp_min(1e-12)
            difference = relative_difference(got.float() / size, wanted / size)
            if not difference <= allowed:
                raise Refused(
                    f"it changes {name} of layer {layer} by {difference:.2e} (allowed "
                    f"{allowed:.1g})"
                )


def choose_codec(group: Any, runtime: Runtime, probe: Probe, projector: Projector) -> Codec:
    """The wanted codec of hidden states if all ranks of ``group``, which all call it, can use it;
    otherwise the exact one. K and V of the probe must still be in the pool."""
    wanted = asked_codec(runtime, probe.hidden[0].dtype)
    try:
        return all_or_none(lambda: _proven(wanted, probe, projector), group)
    except Refused as refused:
        rows = probe.hidden[0]
        return hidden_as_they_are(wanted, rows.shape[1], rows.dtype, refused)


def hidden_as_they_are(name: str, width: int, dtype: torch.dtype, refused: Refused) -> Codec:
    """The exact codec, because codec ``name`` was refused."""
    logger.warning(
        "hcache: codec %r is not used, hidden states are stored as they are (codec 'none'): %s",
        name,
        refused,
    )
    return make_codec("none", width, dtype)


def _proven(name: str, probe: Probe, projector: Projector) -> Codec:
    """The codec, if rows of the probe decode to the model's K and V; raises Refused otherwise. Logs
    the number of tokens that are not encodable, which may not be all."""
    try:
        codec = make_codec(name, probe.hidden[0].shape[1], probe.hidden[0].dtype)
    except UnsupportedRows as error:
        raise Refused(str(error)) from None
    fits = torch.ones(len(probe.positions), dtype=torch.bool, device=probe.positions.device)

    def problem_of(layer: AttentionLayer, hidden: torch.Tensor) -> str | None:
        encoded, ok = codec.encode(hidden)
        fits.logical_and_(ok)
        # Rows that are not ok are not stored, so they cannot come back wrong.
        back = torch.where(ok[:, None], codec.decode(encoded), hidden)
        return projection_problem(layer, back, probe.positions, probe.slots, projector, codec.name)

    problem = first_problem(map(problem_of, probe.layers, probe.hidden))
    if problem is not None:
        raise Refused(problem)
    lost = int((~fits).sum())
    if lost == len(fits):
        raise Refused(f"it cannot hold one of the {lost} tokens of the self-check")
    if lost:
        logger.log(
            logging.WARNING if lost > _UNENCODABLE_SHARE * len(fits) else logging.INFO,
            "hcache: codec %r cannot encode %d of the %d tokens that were tried; pages with such "
            "tokens do not go to L3 (option 'codec')",
            name,
            lost,
            len(fits),
        )
    return codec
