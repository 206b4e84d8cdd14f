"""How long a history takes to come back, method by method, timed in the server.

TTFT also holds the question's prefill, and on a CPU attention hides the rest; so the server's own
trace is read: from the start of the prefetch to the last layer on the device, one at a time.

There are up to three settings. ``disk``: L3 as it is, from a cold page cache. On the CPU engine
also two in which a device or a disk is imitated by waiting: ``balanced``, where hidden states take
as long to copy to the device as to project (where the paper's A100 with four SSDs stands), and
``slow``, where they take three times as long to read from L3.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

from bench.compare import plan as planning
from bench.compare.part import Part
from bench.compare.plan import Rates
from bench.harness import mooncake, program
from bench.harness.methods import HYBRID, METHODS, MOONCAKE, NIXL, PAGE_SIZE
from bench.harness.restorer import Restore, Restorer, l3_bytes, restorer
from hcache_backend.partition.profile import Profile

Row = dict[str, dict[str, Any]]
SETTINGS = ("disk", "balanced", "slow")
_WHERE: dict[str, tuple[str, ...]] = {
    "hcache-hidden": SETTINGS,
    "hcache-hidden-eager": ("disk", "slow"),
    "hcache-kv": SETTINGS,
    "file": SETTINGS,
    NIXL: ("disk",),
    MOONCAKE: ("disk",),
    "hcache": SETTINGS,
    "hcache-eager": ("disk", "slow"),
    HYBRID: ("balanced",),
    "recompute": ("disk",),
}
"""Which settings a method is tried in. Eager restores hide L3, not the bus; recomputation knows
neither; what NIXL and Mooncake read cannot be slowed down, and Mooncake has no disk."""
METHODS_RESTORED = tuple(_WHERE)
"""The one that decides at which rates the others are slowed down comes first."""
DECIDES = METHODS_RESTORED[0]
PLANNED = ("hcache", "hcache-eager", HYBRID)
"""What they store goes by the machine's profile: a server for each setting."""
_OURS = {"restore_share": 1.0}
"""Options of all servers of ours: one restore at a time, which may use the whole device."""


@dataclass(frozen=True, kw_only=True)
class RestorePlan(Part):
    """What is restored.

    Attributes:
        methods: Only those of :data:`METHODS_RESTORED` are tried.
        tokens: Length of a history; whole pages.
        rounds: How often each method restores it in each setting, to be timed; it does so once
            more before the first.
        settings: Of :data:`SETTINGS`.
    """

    methods: Sequence[str]
    tokens: int
    rounds: int
    settings: Sequence[str]


class Served(NamedTuple):
    """A server: a method, and the settings that it goes through."""

    method: str
    settings: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.method}-{self.settings[0]}"


def run(plan: RestorePlan) -> dict[str, Any]:
    """Restore with each method in each setting; what ``compare.json`` says of it.

    Raises:
        MachineError: What planned methods go by could not be measured.
        ServerError: A server did not start, a request failed, or a history did not come back.
    """
    profile = None
    if planning.has_shape(plan.model) and set(plan.methods) & set(PLANNED):
        profile = planning.measure_profile(plan.machine, plan.model, plan.folder / "profile")
    with program.steps(steps(plan)) as (_, advance):
        runs = _Runs(plan, profile, advance)
        for served in servers(plan):
            runs.run(served)
    return report(plan, runs.rows, runs.rates)


def _lent() -> int:
    """Bytes that Mooncake's node lends: a quarter of the free memory, used as pages come."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


def servers(plan: RestorePlan) -> Iterator[Served]:
    """The servers of a comparison, in order."""
    settings = _settings(plan)
    for method in (name for name in METHODS_RESTORED if name in plan.methods):
        found = tuple(setting for setting in settings if setting in _WHERE[method])
        if method == DECIDES and "disk" not in found:
            found = ("disk", *found)  # by which the others are slowed down
        if not found or any(name == method for name, _ in _impossible(plan)):
            continue
        if method in PLANNED:
            yield from (Served(method, (setting,)) for setting in found)
        else:
            yield Served(method, found)


def steps(plan: RestorePlan) -> int:
    """How many steps of the progress bar :func:`run` takes."""
    total = 0
    for method, settings in servers(plan):
        total += 2 + len(settings) * plan.rounds  # starting, the restore before
        total += method != "recompute"  # storing
    return total


def report(plan: RestorePlan, rows: Mapping[str, Row], rates: Rates | None) -> dict[str, Any]:
    """What ``compare.json`` says of restores.

    Args:
        rows: What was found, by method and setting (see :func:`medians`).
        rates: At which something was slowed down; None where nothing was.
    """
    return {
        "tokens": plan.tokens,
        "rounds": plan.rounds,
        "hcache_options": _OURS,
        "balanced_bus_bytes_per_second": rates.bus if rates else None,
        "slow_l3_bytes_per_second": rates.l3 if rates else None,
        "left_out": list(left_out(plan)),
        "methods": {
            name: {"title": METHODS[name].title, **dict.fromkeys(SETTINGS), **row}
            for name, row in rows.items()
        },
    }


def medians(
    restores: Sequence[Restore], bytes_per_token: float = 0.0, said: str = ""
) -> dict[str, Any]:
    """What the report says of the restores in one setting; medians in milliseconds.

    Args:
        bytes_per_token: In L3.
        said: The mode and partition that the server logged; empty where it is not ours.
    """
    return {
        **{
            part: round(median(getattr(restore, part) for restore in restores), 2)
            for part in ("ms", "l3_ms", "load_ms", "ttft_ms")
        },
        "all_ms": [round(restore.ms, 2) for restore in restores],
        "bytes_per_token": bytes_per_token,
        "said": said,
    }


class _Runs:
    """Starts servers, one after the other, and restores in each of their settings."""

    def __init__(
        self, plan: RestorePlan, profile: Profile | None, advance: Callable[[str], None]
    ) -> None:
        self.rows: dict[str, Row] = {}
        self.rates: Rates | None = None
        self._plan, self._profile, self._advance = plan, profile, advance
        (self._history,) = plan.histories(1, plan.tokens)

    def run(self, served: Served) -> None:
        """Start a server and restore in each of its settings."""
        plan, name = self._plan, served.method
        method = METHODS[name]
        row = self.rows.setdefault(name, {})
        folder = plan.folder / served.name
        shared = plan.folder / f"{method.pages_of}-disk" / "l3"
        l3 = shared if method.pages_of and shared.exists() else folder / "l3"
        pool, ours = plan.tokens + 4 * PAGE_SIZE, self._options(served)
        options = plan.server(name, served.name, pool, l3=l3, hcache=ours)
        self._advance(f"{method.title}: starting")
        with ExitStack() as stack:
            if method.storage == MOONCAKE:
                folder.mkdir(parents=True)
                cluster = stack.enter_context(mooncake.cluster(folder, _lent()))
                options = replace(options, extra_config=mooncake.store_config(cluster))
            server = stack.enter_context(restorer(options, l3))
            if method.storage is None:
                restores = []
                for _ in range(1 + plan.rounds):
                    self._advance(f"{method.title}: computing")
                    restores.append(server.recompute(self._history))
                row["disk"] = medians(restores[1:])  # without what is done once only
                return
            self._advance(f"{method.title}: storing")
            server.store(self._history)
            self._advance(f"{method.title}: restoring")
            server.restore(self._history)  # what is done once only
            for setting in served.settings:
                row[setting] = self._restore(server, method.title, setting)
                if name == DECIDES and setting == "disk":
                    copied = row["disk"]["bytes_per_token"] * plan.tokens
                    balanced = copied / (1e-3 * row["disk"]["load_ms"])
                    self.rates = Rates(bus=balanced, l3=balanced * planning.SLOW_SHARE)
        if l3.exists() and not any(other.pages_of == name for other in METHODS.values()):
            shutil.rmtree(l3)

    def _restore(self, server: Restorer, title: str, setting: str) -> dict[str, Any]:
        if self._plan.machine.device == "cpu":
            slowed = self.rates or Rates(0, 0)
            server.slow_down(
                bus=slowed.bus if setting == "balanced" else 0,
                l3=slowed.l3 if setting == "slow" else 0,
            )
        restores = []
        for _ in range(self._plan.rounds):
            self._advance(f"{title}: restoring")
            restores.append(server.restore(self._history))
        return medians(restores, l3_bytes(server.l3) / self._plan.tokens, server.said())

    def _options(self, served: Served) -> dict[str, Any]:
        """Options of ours beside the method's own; none where the server is not ours."""
        plan = self._plan
        if METHODS[served.method].storage != "dynamic":
            return {}
        if served.method not in PLANNED or self._profile is None:
            return _OURS
        profile = planning.in_setting(self._profile, served.settings[0], self.rates)
        if served.method == HYBRID:
            partition = planning.naive_hybrid(profile, plan.machine, plan.model, plan.tokens)
            return {**_OURS, "partition": asdict(partition)}
        path = plan.folder / f"{served.name}-profile.json"
        profile.save(path)
        return {**_OURS, "profile": str(path)}


def _settings(plan: RestorePlan) -> tuple[str, ...]:
    """Those that can be tried: only the CPU engine can slow a device down."""
    if plan.machine.device != "cpu" or DECIDES not in plan.methods:
        return tuple(setting for setting in plan.settings if setting == "disk")
    return tuple(setting for setting in SETTINGS if setting in plan.settings)


def left_out(plan: RestorePlan) -> Iterator[str]:
    """Methods and settings that were asked for and are not tried, and why."""
    possible = _settings(plan)
    for setting in plan.settings:
        if setting not in possible:
            cpu = plan.machine.device == "cpu"
            why = f"it needs method {DECIDES}" if cpu else "only the CPU engine can be slowed down"
            yield f"setting {setting}: {why}"
    yield from (f"method {name}: {why}" for name, why in _impossible(plan))


def _impossible(plan: RestorePlan) -> Iterator[tuple[str, str]]:
    """Methods that were asked for and cannot be tried, and why."""
    if HYBRID in plan.methods and not planning.has_shape(plan.model):
        yield HYBRID, "--model-path must be a folder with a config.json that plans know"
    if NIXL in plan.methods and find_spec("nixl") is None:
        yield NIXL, "it is not installed; see requirements/peers.txt"
    if MOONCAKE in plan.methods and (why := mooncake.missing()):
        yield MOONCAKE, why
