"""What a planned machine would take."""

from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.profile import preset_profile


def predicted_ms(shape: ModelShape, tokens: int, *, gpus: int, ssds: int) -> dict[str, float]:
    """Milliseconds of restores on H100s by ``hcache plan``, by the way of serving."""
    plan = PartitionPlan(preset_profile("h100", ssds), shape, tokens, gpus, "auto")
    return dict(plan.report()["predicted_ms"])
