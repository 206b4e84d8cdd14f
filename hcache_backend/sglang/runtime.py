"""State of one scheduler process: options, pages, weights, and the prefetches of its requests."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hcache_backend import metrics
from hcache_backend.capture.hooks import HiddenCapture
from hcache_backend.capture.staging import Staging
from hcache_backend.config import HCacheConfig, PageKind
from hcache_backend.format.envelope import WRITER_BYTES
from hcache_backend.metrics import logger
from hcache_backend.plan.profile import Profile
from hcache_backend.plan.record import PartitionRecord
from hcache_backend.plan.restore import Restore
from hcache_backend.prefetch.estimates import L3Progress
from hcache_backend.prefetch.gate import HitGate
from hcache_backend.prefetch.prefetches import Prefetches
from hcache_backend.restore.exchange import CollectiveOrder
from hcache_backend.server_report import LayerGroup, ServerReport
from hcache_backend.sglang.weights import LoadedWeights
from hcache_backend.store import PageStore

JUDGING = "judging L3 hits"  # a capability (start/capabilities.py)


@dataclass
class StartOptions:
    """What a server was asked for, and what its start decided besides its pages."""

    config: HCacheConfig | None  # None: it was started without us
    unused: dict[str, str] = field(default_factory=dict)  # what it goes without, and why
    kept_profile: tuple[str, Profile] | None = None  # measured, and its file's name in a store
    kept_partition: tuple[str, PartitionRecord] | None = None  # likewise; the attach records it


@dataclass
class ServerPages:
    """What the host pool holds: a start decides it, a report shows it."""

    kind: PageKind | None = None  # None until the pool is built
    reason: str | None = None  # why pages have no hidden states, or why they are plain
    codec: str | None = None  # of our own pages; None without them
    layer_methods: Restore | None = None  # storage of each layer; None until decided
    projection: list[LayerGroup] = field(default_factory=list)  # empty in KV mode
    recomputation: str | None = None  # in words: how exact; None: nothing is recomputed

    @property
    def own(self) -> bool:
        """True if the host pool holds our own pages, not SGLang's plain ones."""
        return self.kind in ("hidden", "kv")

    @property
    def mode(self) -> Literal["hidden", "kv"]:
        """What logs, metrics and reports call it: plain pages hold K and V."""
        return "hidden" if self.kind == "hidden" else "kv"

    def use_own_pages(self, reason: str | None = None) -> None:
        """The host pool holds own pages. ``reason``: why no hidden states; None if it does."""
        self.kind, self.reason = "kv" if reason else "hidden", reason
        metrics.MODE.set(self.mode, "own", "own")
        if reason is not None:
            logger.info("hcache: KV mode, own pages: %s", reason)

    def use_plain_pages(self, reason: str, *, expected: bool = False) -> None:
        """The host pool holds SGLang's plain KV pages, for this ``reason``. ``expected``: with this
        model and these arguments; otherwise an alert says that the server lost its own pages."""
        self.kind, self.reason = "plain", reason
        metrics.MODE.set("kv", "plain", "plain" if expected else "own")
        logger.warning("hcache: KV mode, plain pages: %s", reason)


@dataclass
class Forwards:
    """Stands around forward passes of the model."""

    capture: HiddenCapture = field(default_factory=lambda: HiddenCapture(()))
    order: CollectiveOrder | None = None  # None: restores have no collectives
    no_capture: str = "the log says why"  # CUDA graphs were recorded without copies
    recorded: Staging | None = None  # recorded graphs read the places of a step from it


@dataclass
class Runtime:
    """State of one scheduler process, changed on the scheduler thread only, except ``weights``."""

    runner: Any  # SGLang's ModelRunner
    options: StartOptions
    weights: LoadedWeights
    pages: ServerPages = field(default_factory=ServerPages)
    forwards: Forwards = field(default_factory=Forwards)
    # of a server that was started with it as L3, until the storage class takes it
    store: PageStore | None = None
    writer: bytes = field(default_factory=lambda: os.urandom(WRITER_BYTES))  # of this run's pages
    l3: L3Progress = field(default_factory=L3Progress)  # with the estimates of the machine
    prefetches: Prefetches = field(default_factory=Prefetches)
    hit_gate: HitGate | None = None  # chooses the L3 hits to read; None: all

    def stop_judging(self) -> None:
        """The storage backend is detached."""
        metrics.CAPABILITY.set(JUDGING, value=0)
        if self.hit_gate is not None:
            self.hit_gate = None
            metrics.RATES.only()
            self.l3.estimates.begin_anew(None)

    def judge(self, machine: Restore | None, backend: str, min_gain: float) -> None:
        """Judge hits of a storage backend from now on, by the cost model of the machine."""
        metrics.CAPABILITY.set(JUDGING)
        self.l3.estimates.begin_anew(machine)
        self.hit_gate = HitGate(self.l3, self.prefetches, backend, min_gain)
        with metrics.catching("look_up", "the first look-up waits for SGLang's hash extension"):
            from sglang.srt.mem_cache.utils import get_hash_str

            get_hash_str([0])  # builds it: up to 23 s, in which L3 would seem stalled

    def report(self) -> ServerReport:
        pages, methods = self.pages, self.pages.layer_methods
        return ServerReport(
            time=time.time(),
            model=str(self.runner.model_config.model_path),
            mode=pages.mode,
            pages="own" if pages.own else "plain",
            reason=pages.reason,
            codec=pages.codec,
            partition=methods.describe() if methods and pages.mode == "hidden" else None,
            projection=tuple(pages.projection),
            recomputation=pages.recomputation,
            unused=self.options.unused,
            tokens_per_second=self.l3.estimates.rates(),
        )


_runtime: Runtime | None = None


def remember(runner: Any, config: HCacheConfig | None) -> Runtime:
    """Make the runtime of this process; called once, when its model has been loaded."""
    global _runtime  # noqa: PLW0603  one scheduler process has one model
    _runtime = Runtime(runner, StartOptions(config), LoadedWeights(runner))
    return _runtime


def current() -> Runtime:
    """The runtime of this process. Raises RuntimeError if the plugin did not run here."""
    if _runtime is None:
        raise RuntimeError(
            "the hcache plugin is not active in this process: is hcache-backend installed where "
            "SGLang runs, and does SGLANG_PLUGINS (if set) name 'hcache'?"
        )
    return _runtime
