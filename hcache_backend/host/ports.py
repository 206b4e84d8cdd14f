"""What rooms below ``sglang`` and ``start`` ask of objects that are made there. The classes that
are named here describe the methods."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from hcache_backend.arena import Arena, Ids
from hcache_backend.capture.hooks import HiddenCapture, RecomputedRows
from hcache_backend.capture.staging import StagedCapture, Staging
from hcache_backend.fingerprint import Weights
from hcache_backend.format.page import PageLayout
from hcache_backend.host.layout import Layout
from hcache_backend.host.loads import Prepared, QueuedLoad
from hcache_backend.projection.projector import Projector
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.restore.pipeline import RestorePipeline
from hcache_backend.streams import Stream
from hcache_kernels.codecs import Codec


class ModelWeights(Protocol):
    """The loaded weights, and whether their K and V are believed (:class:`.LoadedWeights`)."""

    present: Weights | None
    on_weights_changed: list[Callable[[], None]]
    on_caches_flushed: list[Callable[[], None]]

    @property
    def quarantine(self) -> str | None: ...
    def begin_quarantine(self, reason: str) -> None: ...
    def page_namespace(self, weights: Weights | None = None) -> bytes: ...
    def page_namespaces(self) -> tuple[bytes, ...]: ...


class HostPool(Protocol):
    """Our pages in host memory (:class:`.OwnPagesPool`)."""

    arena: Arena
    page_layout: PageLayout
    page_size: int
    kv_buffer: torch.Tensor  # the bytes of all pages, uint8 [pages, stride]
    device_pool: Any  # SGLang's KV pool
    on_freed: list[Callable[[Ids], None]]
    on_backed_up: list[Callable[[Ids, torch.Tensor], None]]
    on_loaded: list[Callable[[Ids, torch.Tensor], None]]

    def page_ids(self, host_indices: torch.Tensor) -> Ids: ...
    def usable(self, host_pages: Ids) -> bool | None: ...
    def mark_arrived(self) -> None: ...
    def divide(self, host_pages: Ids, layout: PageLayout) -> None: ...
    def save_recomputed(
        self, host_pages: Ids, slots: torch.Tensor, rows: RecomputedRows | None
    ) -> None: ...


class Controller(Protocol):
    """What ranks agree on, and the order of streams (:class:`.OwnPagesController`)."""

    trusts: Callable[[], bool]

    def agreed(self, *fine: int) -> list[int]: ...
    def after_forwards(self, stream: Stream) -> None: ...


class Reservations(Protocol):
    """Device pages that are set aside (:class:`.EagerRestores`)."""

    @property
    def pages(self) -> int: ...
    def make_free(self, pages: int) -> None: ...
    def hand_out(self, host_pages: Ids) -> Prepared | None: ...
    def all_freed(self) -> None: ...


class DevicePages(Protocol):
    """Free pages of the KV pool, and which tokens have pages (:class:`.ReservablePages`)."""

    device: torch.device | str
    cache: Any  # SGLang's radix cache
    load: QueuedLoad | None
    eager: Reservations | None

    def count(self) -> int: ...
    def make_room(self, pages: int) -> None: ...
    def take(self, pages: int) -> torch.Tensor: ...
    def give(self, slots: torch.Tensor) -> None: ...
    def holds(self, node: Hashable) -> bool: ...
    def slots_to(self, node: Hashable) -> torch.Tensor: ...


class HiddenPages(Protocol):
    """The plan of pages with hidden states (:class:`.HiddenPlan`)."""

    @property
    def layout(self) -> Layout: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def staging(self) -> Staging: ...
    @property
    def hooks(self) -> HiddenCapture: ...
    def capture(self, arena: Arena, memory: torch.Tensor) -> StagedCapture: ...
    def pipeline(
        self, memory: torch.Tensor, projector: Projector, order: CollectiveOrder | None
    ) -> RestorePipeline: ...
