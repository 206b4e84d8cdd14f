"""Which codec hidden states are really stored in: the wanted one, if it serves this model."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hcache_backend.engine.ranks import on_all_ranks
from hcache_backend.engine.runtime import Runtime
from hcache_backend.engine.startup.self_check import Probe, layer_problem
from hcache_backend.projection.projector import Projector
from hcache_kernels.codecs import Codec, ExactCodec, UnsupportedRows, make_codec

logger = logging.getLogger("hcache")

_UNENCODABLE_SHARE = 0.1
"""Of the probe's tokens, chosen from the whole vocabulary. One in ten would leave no conversation
whole; a few may be tokens that no text holds."""


def wanted_codec(runtime: Runtime, runner: Any) -> Codec:
    """The codec of option ``codec``; whether it serves this model is found out by the probe."""
    assert runtime.config is not None
    width, dtype = runner.model_config.hidden_size, runner.dtype
    try:
        return make_codec(runtime.config.codec, width, dtype)
    except UnsupportedRows:
        return make_codec("none", width, dtype)


def agree_on_codec(
    group: Any, wanted: str, probe: Probe | None, projector: Projector, kvcache: Any
) -> Codec | None:
    """The codec of this server, the same on every rank; all ranks must call it.

    The K and V that the model wrote during the probe must still be in the pool.

    Args:
        group: The tensor-parallel ranks.
        wanted: Option ``codec``.
        probe: None on a rank that refuses hidden mode anyway.

    Returns:
        The wanted codec; the exact one where a rank cannot use that; None where a rank refuses.
    """
    (start,) = on_all_ranks(group, probe is not None)
    if probe is None or not start:
        return None
    codec, problem = _codec_for(wanted, probe, projector, kvcache)
    (fine,) = on_all_ranks(group, problem is None)
    if not fine:
        codec = _exact(probe)
        logger.warning(
            "hcache: codec %r is not used, hidden states are stored as they are (codec 'none'): %s",
            wanted,
            problem or "another tensor-parallel rank cannot use it",
        )
    return codec


def _codec_for(
    wanted: str, probe: Probe, projector: Projector, kvcache: Any
) -> tuple[Codec, str | None]:
    """A codec, and why it must not be used."""
    hidden = probe.hidden[0]
    try:
        codec = make_codec(wanted, hidden.shape[1], hidden.dtype)
        return codec, _problem(codec, probe, projector, kvcache)
    except UnsupportedRows as error:
        return _exact(probe), str(error)
    except Exception as error:
        logger.exception("hcache: codec %r broke", wanted)
        return _exact(probe), f"it broke: {type(error).__name__}: {error}"


def _problem(codec: Codec, probe: Probe, projector: Projector, kvcache: Any) -> str | None:
    """Project what comes back of the probe's rows; compare with what the model wrote."""
    problems = []
    fits = torch.ones(len(probe.positions), dtype=torch.bool, device=probe.positions.device)
    for layer, hidden in zip(probe.layers, probe.hidden, strict=True):
        encoded, ok = codec.encode(hidden)
        fits &= ok
        # Rows that are not ok are not stored, so they cannot come back wrong.
        back = torch.where(ok[:, None], codec.decode(encoded), hidden)
        problem = layer_problem(
            layer, back, probe.positions, probe.slots, projector, kvcache, codec.name
        )
        if problem is not None:  # go on: some attention modules talk to the other ranks
            problems.append(problem)
    lost = int((~fits).sum())
    if lost > _UNENCODABLE_SHARE * len(fits):
        problems.append(f"it cannot hold {lost} of the {len(fits)} tokens of the self-check")
    return problems[0] if problems else None


def _exact(probe: Probe) -> Codec:
    return ExactCodec(probe.hidden[0].shape[1], probe.hidden[0].dtype)
