"""This machine's profile, and it with a slower bus or L3, as plans of servers go by it."""

import subprocess
import sys
from pathlib import Path

from bench.harness.machine import Machine, MachineError
from bench.harness.options import base_environment
from hcache_backend.config import ConfigError
from hcache_backend.plan.model_config import read_model
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.plan import PartitionPlan
from hcache_backend.plan.profile import Profile, Rate, load_profile, preset_profile
from hcache_backend.plan.restore import Partition, Restore

_SECONDS = "2"  # about so long is each operation measured


def has_shape(model: str) -> bool:
    """The model's shape can be read: it is a folder, of a family that plans know."""
    try:
        sides = read_model(Path(model)).sides
    except ConfigError:
        return False
    return sides is None or sides.kind == "window"


def measure_profile(machine: Machine, model: str, folder: Path) -> Profile:
    """The profile of this machine, by ``hcache profile`` in a process of its own, with ``folder``
    on the disk of L3.

    Raises:
        MachineError: It could not be measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "profile.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hcache_backend.cli.main", "profile", "--model", model),
            *("--dir", str(folder / "l3"), "--out", str(out), "--seconds", _SECONDS),
        ],
        env=base_environment(machine.device),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MachineError(f"hcache profile ended with {done.returncode}: {done.stderr.strip()}")
    return load_profile(out)


def predicted_ms(shape: ModelShape, tokens: int, *, gpus: int, ssds: int) -> dict[str, float]:
    """Milliseconds of restores on H100s by ``hcache plan``, by the way of serving."""
    plan = PartitionPlan(preset_profile("h100", ssds), shape, tokens, gpus, "auto")
    return dict(plan.report()["predicted_ms"])


def with_bus(profile: Profile, rate: float) -> Profile:
    """The profile of the same machine with a bus of ``rate`` bytes per second at most."""
    copy, load = profile.hidden_copy, profile.kv_load
    slower = 1 / min(rate, copy.per_second)
    writing = max(0.0, 1 / load.per_second - 1 / copy.per_second)
    return profile.model_copy(
        update={
            "hidden_copy": Rate(seconds=copy.seconds, per_second=1 / slower),
            "kv_load": Rate(seconds=load.seconds, per_second=1 / (slower + writing)),
        }
    )


def with_l3(profile: Profile, rate: float) -> Profile:
    """The profile of the same machine with an L3 of ``rate`` bytes per second at most."""
    found = profile.l3.per_second if profile.l3 is not None else rate
    return profile.model_copy(update={"l3": Rate(per_second=min(rate, found))})


def naive_hybrid(profile: Profile, machine: Machine, model: str, tokens: int) -> Partition:
    """KV and recomputation without hidden states, so that a layer-wise restore ends soonest."""
    shape = read_model(Path(model)).shape
    if machine.device == "cpu":  # on which servers compute in float32
        shape = shape.model_copy(update={"element_bytes": 4})
    restore = Restore(profile, shape, Partition(0, 0, shape.layers))
    return restore.fastest(tokens, "first", methods=("recompute", "kv"))
