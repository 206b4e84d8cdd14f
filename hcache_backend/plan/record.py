"""The partition of a model's store: decided once, and followed by later servers. Otherwise a
restart, or a server on other hardware, would orphan all stored pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.config import ConfigError
from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.profile import Profile, load_profile
from hcache_backend.plan.restore import L3Path, Partition, Restore, recompute_layers, simulate
from hcache_backend.store import write_sidecar

_WORTH_IT = 1.1  # another partition is reported if restores take this many times as long


class PartitionRecord(BaseModel):
    """Numbers of layers by method, and the restores that they were chosen for. ``model`` and
    ``reason`` are for readers; ``shape`` is None if the model's config is unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    reason: str
    recompute: int = Field(ge=0)
    hidden: int = Field(ge=0)
    kv: int = Field(ge=0)
    shape: ModelShape | None
    tokens: int = Field(gt=0)
    tp: int = Field(gt=0)
    l3: L3Path

    @property
    def partition(self) -> Partition:
        return Partition(self.recompute, self.hidden, self.kv)

    def better(self, profile: Profile) -> tuple[Partition, float] | None:
        """A partition whose restores are at least 10% faster on this machine, and the factor."""
        if self.shape is None:
            return None
        ours = self.partition
        restore = Restore(profile, self.shape, ours, self.tp, paper=True)
        best, costs = restore.fastest(self.tokens, self.l3), restore.costs(self.tokens, 0, self.l3)
        if ours.hidden and self.tp == 1:  # a restore may recompute first layers that are stored
            ours = ours.recomputing(recompute_layers(costs, ours))
        faster = simulate(costs, ours) / simulate(costs, best)
        return (best, faster) if faster >= _WORTH_IT else None


def record_name(key: bytes) -> str:
    """File name in a store folder; ``key`` identifies the model and its settings."""
    return f"partition-{key.hex()[:16]}.json"


def find_record(folders: Iterable[Path], name: str) -> PartitionRecord | None:
    """The first readable record of that name."""
    for folder in folders:
        with contextlib.suppress(OSError, ValidationError):
            return PartitionRecord.model_validate_json((folder / name).read_bytes())
    return None


def records(folder: Path) -> Iterator[tuple[str, PartitionRecord]]:
    """All readable records of a store folder, by name."""
    for path in sorted(folder.glob("partition-*.json")):
        if (record := find_record([folder], path.name)) is not None:
            yield path.name, record


def save_record(folder: Path, name: str, record: PartitionRecord, *, replace: bool) -> None:
    """Write a record; without ``replace`` an existing one stays. Raises OSError."""
    write_sidecar(folder, name, record.model_dump_json(indent=2) + "\n", replace=replace)


def kept_profiles(folder: Path) -> Iterator[Profile]:
    """Readable profiles that servers left in a store folder."""
    for path in sorted(folder.glob("profile-*.json")):
        with contextlib.suppress(ConfigError):
            yield load_profile(path)
