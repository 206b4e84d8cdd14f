"""The partition of a model's store: decided once, and followed by later servers. Otherwise a
restart, or a server on other hardware, would orphan all stored pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.plan.model_shape import ModelShape
from hcache_backend.plan.restore import L3Path, Partition
from hcache_backend.store import write_sidecar


class PartitionRecord(BaseModel):
    """Numbers of layers by method. The other fields are for readers: model, reason, and the
    restores that the partition was chosen for."""

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


def record_name(key: bytes) -> str:
    """File name in a store folder; ``key`` identifies the model and its settings."""
    return f"partition-{key.hex()[:16]}.json"


def find_record(folders: Iterable[Path], name: str) -> PartitionRecord | None:
    """The first readable record of that name; None: no folder has one."""
    for folder in folders:
        with contextlib.suppress(OSError, ValidationError):
            return PartitionRecord.model_validate_json((folder / name).read_bytes())
    return None


def records(folder: Path) -> Iterator[PartitionRecord]:
    for path in sorted(folder.glob("partition-*.json")):
        if (record := find_record([folder], path.name)) is not None:
            yield record


def save_record(folder: Path, name: str, record: PartitionRecord) -> None:
    """Write a record; an existing one stays. Raises OSError."""
    write_sidecar(folder, name, record.model_dump_json(indent=2) + "\n", replace=False)
