"""What the last server that opened a store folder said about itself, for ``hcache doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hcache_backend.store import SERVER_REPORT, write_sidecar


class LayerGroup(BaseModel):
    """Layers that are projected alike.

    Attributes:
        layers: Their numbers within the pipeline stage.
        method: ``spec``: by the kernels. ``generic``: by the model's own attention modules.
        detail: What the spec is made of, or why there is none.
        exactness: How exactly K and V come back, and are repeated by the model itself, in words.
    """

    model_config = ConfigDict(frozen=True)

    layers: tuple[int, ...]
    method: Literal["spec", "generic"]
    detail: str
    exactness: str


class ServerReport(BaseModel):
    """One server, as it was when it opened the folder.

    Attributes:
        time: When that was, in seconds since 1970.
        model: Its path or name.
        pages: Its own pages, or SGLang's plain ones.
        reason: Why they do not hold hidden states, or are plain; None: they hold some.
        codec: How its own pages are encoded; None: its pages are plain.
        partition: What it stores of its layers, in words; None in KV mode.
        projection: How its layers are projected; empty in KV mode.
        recomputation: How exactly its first layers are recomputed, or why they are not, in words;
            None: nothing is to be recomputed.
        tokens_per_second: What it expects of reading L3 (``l3_read``), of loads and of prefill.
        behind: What L3 is behind its page store, or None.
    """

    model_config = ConfigDict(frozen=True)

    time: float
    model: str
    mode: Literal["hidden", "kv"]
    pages: Literal["own", "plain"]
    reason: str | None
    codec: str | None
    partition: str | None = None
    projection: tuple[LayerGroup, ...]
    recomputation: str | None = None
    tokens_per_second: dict[str, float] = {}
    behind: str | None = None


def write_report(folder: Path, report: ServerReport) -> None:
    """Replace the report of a store folder; a reader sees the old one or the new one.

    Raises:
        OSError: It cannot be written.
    """
    write_sidecar(folder, SERVER_REPORT, report.model_dump_json(indent=2) + "\n")


def read_report(folder: Path) -> ServerReport | None:
    """The report of a store folder; None when no server has left one that can be read.

    Never raises: nothing but an explanation hangs on it.
    """
    path = folder / SERVER_REPORT
    try:
        return ServerReport.model_validate_json(path.read_bytes()) if path.is_file() else None
    except (OSError, ValidationError):
        return None
