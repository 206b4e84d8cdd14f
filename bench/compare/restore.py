"""How long a history takes to come back, method by method, timed in the server.

TTFT also holds the question's prefill, and on a CPU attention hides the rest; so the server's own
trace is read: from the start of the prefetch to the last layer on the device, one at a time.

There are up to three settings. ``disk``: L3 as it is, from a cold page cache. On the CPU engine
also two in which a device or a disk is imitated by waiting: ``balanced``, where hidden states take
as long to copy to the device as to project (where the paper's A100 with four SSDs stands), and
``slow``, where they take three times as long to read from L3.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.compare import plan as planning
from bench.compare.plan import Rates
from bench.harness.machine import Machine
from bench.harness.methods import HYBRID, METHODS, PAGE_SIZE, server_options
from bench.harness.restorer import Restore, Restorer, l3_bytes, restorer
from hcache_backend.partition.model_config import read_model
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.profile import Profile

SETTINGS = ("disk", "balanced", "slow")
_WHERE: dict[str, tuple[str, ...]] = {
    "hcache-hidden": SETTINGS,
    "hcache-hidden-eager": ("disk", "slow"),
    "hcache-kv": SETTINGS,
    "file": SETTINGS,
    "hcache": SETTINGS,
    "hcache-eager": ("disk", "slow"),
    HYBRID: ("balanced",),
    "recompute": ("disk",),
}
"""Which settings a method is tried in. Eager restores hide L3, not the bus; recomputation knows
neither."""
METHODS_RESTORED = tuple(_WHERE)
"""The one that decides at which rates the others are slowed down comes first."""
DECIDES = METHODS_RESTORED[0]
PLANNED = ("hcache", "hcache-eager", HYBRID)
"""What they store goes by the machine's profile: a server for each setting."""
_PROFILE_SECONDS = 2.0


@dataclass(frozen=True)
class RestorePlan:
    """What is restored.

    Attributes:
        model: A folder, or a name that SGLang knows.
        tokens: Length of a history; whole pages.
        rounds: How often each method restores it in each setting, to be timed; it does so once
            more before the first.
        settings: Of :data:`SETTINGS`.
        vocabulary: Random tokens are below it.
        server_args: More arguments of SGLang.
        folder: For L3, logs and traces; a folder below it for each server.
        profile_seconds: About so long is each operation of the machine's profile measured.
    """

    machine: Machine
    model: str
    tokens: int
    rounds: int
    settings: Sequence[str]
    vocabulary: int
    server_args: Sequence[str]
    folder: Path
    seed: int = 1
    profile_seconds: float = _PROFILE_SECONDS

    def history(self) -> list[int]:
        """The tokens that are restored."""
        source = random.Random(self.seed)
        return [source.randrange(self.vocabulary) for _ in range(self.tokens)]

    def shape(self) -> ModelShape:
        """The model's shape, as its servers compute with it; the model must be a folder."""
        shape = read_model(Path(self.model))
        return planning.float32(shape) if self.machine.device == "cpu" else shape

    def hcache(self) -> dict[str, Any]:
        """Options of all servers of ours: one restore at a time, which may use the whole device."""
        return {"restore_share": 1.0}


@dataclass
class Restored:
    """Restores of one method.

    Attributes:
        times: By setting; those in which it was not tried are missing.
        bytes_per_token: In L3, by setting.
        said: The mode and partition that the server logged, by setting; empty where it is not ours.
    """

    times: dict[str, list[Restore]] = field(default_factory=dict)
    bytes_per_token: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)


class Served(NamedTuple):
    """A server: a method, and the settings that it goes through."""

    method: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-{self.settings[0]}"


class Restores(NamedTuple):
    """What was found.

    Attributes:
        rows: By method, in the order of :data:`METHODS_RESTORED`.
        rates: At which something was slowed down; None where nothing was.
        left_out: Methods and settings that were asked for and not tried, and why.
    """

    rows: dict[str, Restored]
    rates: Rates | None
    left_out: tuple[str, ...]


def find_profile(plan: RestorePlan, methods: Sequence[str]) -> Profile | None:
    """Measure what planned methods go by; None: there are none, or servers measure their own.

    Raises:
        MachineError: It could not be measured.
    """
    if not planning.has_shape(plan.model) or not set(methods) & set(PLANNED):
        return None
    return planning.measure_profile(
        plan.machine, plan.model, plan.folder / "profile", plan.profile_seconds
    )


def restore_all(
    plan: RestorePlan,
    methods: Sequence[str],
    profile: Profile | None,
    advance: Callable[[str], None],
) -> Restores:
    """Restore with each method in each setting.

    Args:
        profile: What :func:`find_profile` found.
        advance: Called :func:`steps` times, with what comes next.

    Raises:
        ServerError: A server did not start, a request failed, or a history did not come back.
    """
    runs = _Runs(plan, profile, advance)
    for served in servers(plan, methods):
        runs.run(served)
    return Restores(runs.rows, runs.rates, tuple(_left_out(plan, methods)))


def servers(plan: RestorePlan, methods: Sequence[str]) -> Iterator[Served]:
    """The servers of a comparison, in order."""
    settings = _settings(plan, methods)
    for method in sorted(methods, key=METHODS_RESTORED.index):
        found = tuple(setting for setting in settings if setting in _WHERE[method])
        if method == DECIDES and "disk" not in found:
            found = ("disk", *found)  # by which the others are slowed down
        if not found or (method == HYBRID and not planning.has_shape(plan.model)):
            continue
        if method in PLANNED:
            yield from (Served(method, (setting,)) for setting in found)
        else:
            yield Served(method, found)


def steps(plan: RestorePlan, methods: Sequence[str]) -> int:
    """How often :func:`restore_all` calls ``advance``."""
    total = 0
    for method, settings in servers(plan, methods):
        total += 2 + len(settings) * plan.rounds  # starting, the restore before
        total += method != "recompute"  # storing
    return total


def median_of(restores: Sequence[Restore], part: str) -> float:
    """Median milliseconds of ``ms``, ``l3_ms`` or ``load_ms``."""
    return median(getattr(restore, part) for restore in restores)


def report(found: Restores, plan: RestorePlan) -> dict[str, Any]:
    """What ``compare.json`` says of restores; times are medians, in milliseconds."""
    rates = found.rates
    methods = {
        name: {
            "title": METHODS[name].title,
            **{
                setting: _medians(row, setting) if setting in row.times else None
                for setting in SETTINGS
            },
        }
        for name, row in found.rows.items()
    }
    return {
        "tokens": plan.tokens,
        "rounds": plan.rounds,
        "hcache_options": plan.hcache(),
        "balanced_bus_bytes_per_second": rates.bus if rates else None,
        "slow_l3_bytes_per_second": rates.l3 if rates else None,
        "left_out": list(found.left_out),
        "methods": methods,
    }


def _medians(row: Restored, setting: str) -> dict[str, Any]:
    restores = row.times[setting]
    return {
        **{part: round(median_of(restores, part), 2) for part in ("ms", "l3_ms", "load_ms")},
        "all_ms": [round(restore.ms, 2) for restore in restores],
        "bytes_per_token": row.bytes_per_token.get(setting, 0.0),
        "said": row.said.get(setting, ""),
    }


class _Runs:
    """Starts servers, one after the other, and restores in each of their settings."""

    def __init__(
        self, plan: RestorePlan, profile: Profile | None, advance: Callable[[str], None]
    ) -> None:
        self.rows: dict[str, Restored] = {}
        self.rates: Rates | None = None
        self._plan, self._profile, self._advance = plan, profile, advance
        self._history = plan.history()

    def run(self, served: Served) -> None:
        """Start a server and restore in each of its settings."""
        plan, name = self._plan, served.method
        method = METHODS[name]
        row = self.rows.setdefault(name, Restored())
        folder = plan.folder / served.name
        shared = plan.folder / f"{method.pages_of}-disk" / "l3"
        l3 = shared if method.pages_of and shared.exists() else folder / "l3"
        options = server_options(
            method,
            plan.machine,
            plan.model,
            folder,
            pool_tokens=plan.tokens + 4 * PAGE_SIZE,
            l3=l3,
            hcache=self._options(served),
            extra_args=plan.server_args,
        )
        self._advance(f"{method.title}: starting")
        with restorer(options, l3) as server:
            if method.storage is None:
                for _ in range(1 + plan.rounds):
                    self._advance(f"{method.title}: computing")
                    row.times.setdefault("disk", []).append(server.recompute(self._history))
                del row.times["disk"][0]  # what is done once only
                return
            self._advance(f"{method.title}: storing")
            server.store(self._history)
            self._advance(f"{method.title}: restoring")
            server.restore(self._history)  # what is done once only
            for setting in served.settings:
                self._restore(server, served, row, setting)
                if name == DECIDES and setting == "disk":
                    copied = row.bytes_per_token["disk"] * plan.tokens
                    balanced = copied / (1e-3 * median_of(row.times["disk"], "load_ms"))
                    self.rates = Rates(bus=balanced, l3=balanced * planning.SLOW_SHARE)
        if not any(other.pages_of == name for other in METHODS.values()):
            shutil.rmtree(l3)

    def _restore(self, server: Restorer, served: Served, row: Restored, setting: str) -> None:
        if self._plan.machine.device == "cpu":
            slowed = self.rates or Rates(0, 0)
            server.slow_down(
                bus=slowed.bus if setting == "balanced" else 0,
                l3=slowed.l3 if setting == "slow" else 0,
            )
        row.times[setting] = []
        for _ in range(self._plan.rounds):
            self._advance(f"{METHODS[served.method].title}: restoring")
            row.times[setting].append(server.restore(self._history))
        row.bytes_per_token[setting] = l3_bytes(server.l3) / self._plan.tokens
        row.said[setting] = server.said()

    def _options(self, served: Served) -> dict[str, Any]:
        """Options of ours beside the method's own; none where the server is not ours."""
        plan = self._plan
        if METHODS[served.method].storage != "dynamic":
            return {}
        if served.method not in PLANNED or self._profile is None:
            return plan.hcache()
        profile = planning.in_setting(self._profile, served.settings[0], self.rates)
        if served.method == HYBRID:
            partition = planning.naive_hybrid(profile, plan.shape(), plan.tokens)
            return {**plan.hcache(), "partition": planning.options(partition)}
        path = plan.folder / f"{served.name}-profile.json"
        profile.save(path)
        return {**plan.hcache(), "profile": str(path)}


def _settings(plan: RestorePlan, methods: Sequence[str]) -> tuple[str, ...]:
    """Those that can be tried: only the CPU engine can slow a device down."""
    if plan.machine.device != "cpu" or DECIDES not in methods:
        return tuple(setting for setting in plan.settings if setting == "disk")
    return tuple(setting for setting in SETTINGS if setting in plan.settings)


def _left_out(plan: RestorePlan, methods: Sequence[str]) -> Iterator[str]:
    possible = _settings(plan, methods)
    for setting in plan.settings:
        if setting not in possible:
            cpu = plan.machine.device == "cpu"
            why = f"it needs method {DECIDES}" if cpu else "only the CPU engine can be slowed down"
            yield f"setting {setting}: {why}"
    if HYBRID in methods and not planning.has_shape(plan.model):
        yield f"method {HYBRID}: --model-path must be a folder with a config.json that plans know"
