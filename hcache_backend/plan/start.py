"""What a server's start adds to SGLang's, in seconds, computed and not measured: counted passes and
bytes, times the times below."""

from __future__ import annotations

from typing import NamedTuple

from hcache_backend.plan.model_config import Model
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.profile import OPERATIONS, START_SECONDS

# Bytes: of weights, assumed, a third of what an H100 reads; 100 GB in a minute.
DIGESTED_PER_SECOND, PINNED_PER_SECOND = 1e12, 1.7e9
_PASS = 0.5e-3  # seconds of a layer in an eager pass of a few tokens, assumed
# Passes of the model: for recomputation the observed one, 5 of its own, 3 of ours; 6 for capture.
_KV_PASSES, _HIDDEN_PASSES = 9, 6
# Measured on a processor: a layer's page through the codec's reference; cold compilations.
_REFERENCE = 9e-3
_COMPILED = {"plain": 0.7, "exp4": 2.6, "exp3": 6.2, "hidden": 8.0}
# SGLang: host memory is at most twice the KV pool; weights and KV pool take nine tenths of a card.
_HOST_SHARE, _CARD_SHARE = 2, 0.9


class StartStep(NamedTuple):
    """One part of a start. ``often`` is ``every start``, or what is the first one."""

    name: str
    seconds: float
    often: str


def start_steps(plan: PartitionPlan, served: Model, memory: float | None) -> list[StartStep]:
    """Steps of a rank, in their order. ``memory``: bytes of a card; None: it is unknown, and 100 GB
    of host memory are pinned."""
    model, stored, each, once = plan.model, plan.stored, "every start", "first on a store"
    exchanged = model.latent is not None and plan.tp > 1
    # Ranks that exchange latents recompute nothing, and neither do models with an indexer.
    recomputing = _KV_PASSES + _HIDDEN_PASSES * bool(stored.hidden)
    passes = 1 if exchanged or model.index_bytes else recomputing
    encoded = model != model.as_it_is
    compiled = _COMPILED["plain" if not encoded else "exp4" if model.latent else "exp3"]
    compiled += _COMPILED["hidden"] * bool(stored.hidden)
    weights = served.weight_bytes / plan.tp
    pool = _CARD_SHARE * (memory or 0) - weights
    host = _HOST_SHARE * pool if pool > 0 else 100e9
    checks = stored.layers * (passes * _PASS + _REFERENCE * encoded)
    return [
        StartStep("digest of the weights", weights / DIGESTED_PER_SECOND, each),
        StartStep("self-checks", checks, each),
        StartStep("measured profile", (len(OPERATIONS) + 2) * START_SECONDS, once),
        StartStep("compiled kernels", compiled, "first of a machine"),
        StartStep(f"{host / 1e9:,.0f} GB pinned", host / PINNED_PER_SECOND, each),
    ]
