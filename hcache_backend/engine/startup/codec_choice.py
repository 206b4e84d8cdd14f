"""Which codecs pages are really stored in: the wanted one, if it serves this model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hcache_backend.engine.kv_pages.segments import KVSegments
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.agreement import Refused, all_or_none
from hcache_backend.engine.startup.self_check import Probe
from hcache_backend.projection.attention import AttentionLayer
from hcache_backend.projection.check import first_problem, projection_problem
from hcache_backend.projection.projector import Projector
from hcache_backend.units import Share
from hcache_kernels.codecs import Codec, ExactCodec, UnsupportedRows, make_codec

logger = logging.getLogger("hcache")

_UNENCODABLE_SHARE = 0.1
"""Largest share of the probe's tokens, chosen from the whole vocabulary, that a codec may not hold.
One in ten would leave no conversation whole; a few may be tokens that no text holds."""


def wanted_codec(runtime: Runtime, runner: Any) -> Codec:
    """The codec of option ``codec``; whether it serves this model is found out by the probe."""
    assert runtime.config is not None
    width, dtype = runner.model_config.hidden_size, runner.dtype
    try:
        return make_codec(runtime.config.codec, width, dtype)
    except UnsupportedRows:
        return make_codec("none", width, dtype)


def kv_codec(runtime: Runtime, kvcache: Any, share: Share, groups: int, stages: int) -> str:
    """The codec of K and V, by option ``codec`` and their form alone; logs why it is another one.

    Args:
        groups: Groups of heads in a page of all ranks.
        stages: Pipeline stages.
    """
    assert runtime.config is not None
    if runtime.config.codec != "exp4":
        return "none"
    try:
        if stages > 1:  # a stage cannot tell the others what it could not keep
            raise UnsupportedRows("codec 'exp4' takes no K and V of pipeline stages")
        KVSegments(kvcache, range(kvcache.layer_num), kvcache.page_size, share, groups, "exp4")
    except UnsupportedRows as error:
        logger.warning("hcache: K and V are stored as they are (codec 'none'): %s", error)
        return "none"
    return "exp4"


def choose_codec(group: Any, wanted: str, probe: Probe, projector: Projector) -> Codec:
    """The codec ``wanted`` if all tensor-parallel ranks (``group``) can use it, else the exact one.

    All ranks must call it. The K and V that the model wrote during the probe must still be in the
    pool.
    """
    try:
        return all_or_none(lambda: _proven(wanted, probe, projector), group)
    except Refused as refused:
        logger.warning(
            "hcache: codec %r is not used, hidden states are stored as they are (codec 'none'): %s",
            wanted,
            refused,
        )
        return ExactCodec(probe.hidden[0].shape[1], probe.hidden[0].dtype)


def _proven(name: str, probe: Probe, projector: Projector) -> Codec:
    """Project what comes back of the probe's rows; compare with what the model wrote."""
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
    if lost > _UNENCODABLE_SHARE * len(fits):
        raise Refused(f"it cannot hold {lost} of the {len(fits)} tokens of the self-check")
    return codec
