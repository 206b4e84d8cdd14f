"""The report that a server leaves in its store folders, for ``hcache doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hcache_backend.store import SERVER_REPORT, write_sidecar


class LayerGroup(BaseModel):
    """Layers (numbers within the stage) projected alike, and how exactly K and V come back.
    ``spec`` is by the kernels, ``generic`` by the model's own attention modules."""

    model_config = ConfigDict(frozen=True)

    layers: tuple[int, ...]
    method: Literal["spec", "generic"]
    detail: str
    exactness: str


class ServerReport(BaseModel):
    """A server when it opened the folder."""

    model_config = ConfigDict(frozen=True)

    time: float = Field(ge=0, lt=1 << 37)  # seconds since 1970; a calendar has years of 4 digits
    model: str
    mode: Literal["hidden", "kv"]
    pages: Literal["own", "plain"]
    reason: str | None  # why pages are plain or have no hidden states; None if they have some
    codec: str | None  # of own pages; None for plain ones
    partition: str | None = None  # storage of the layers in words; None in KV mode
    projection: tuple[LayerGroup, ...]  # empty in KV mode
    recomputation: str | None = None  # exactness of recomputed layers; None if there are none
    unused: dict[str, str] = {}  # capabilities that the server goes without, and why
    tokens_per_second: dict[str, float] = {}  # expected, of L3 (``l3_read``), loads and prefill
    shared: str | None = None  # backend of the shared tier, if there is one


def write_report(folder: Path, report: ServerReport) -> None:
    """Replace a folder's report atomically; raises OSError."""
    write_sidecar(folder, SERVER_REPORT, report.model_dump_json(indent=2) + "\n")


def read_report(folder: Path) -> ServerReport | None:
    """A folder's report, or None if there is no readable one. Never raises: it only explains."""
    path = folder / SERVER_REPORT
    try:
        return ServerReport.model_validate_json(path.read_bytes()) if path.is_file() else None
    except (OSError, ValidationError):
        return None
