"""A partition with everything one wants to know about it: what ``hcache plan`` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from hcache_backend.partition.costs import (
    LAYER_METHODS,
    L3Path,
    LayerCosts,
    Partition,
    describe,
    until_there,
)
from hcache_backend.partition.model_shape import ModelShape
from hcache_backend.partition.pipeline import Task, recompute_layers, simulate
from hcache_backend.partition.profile import Profile
from hcache_backend.partition.restore import Restore

Resource = Literal["compute", "bus", "l3"]
RestorePath = Literal["auto", "layerwise"]
"""Option ``restore`` of a server."""
LENGTHS = (256, 1024, 4096, 16384)
"""Tokens of the restores that a plan compares with the one it was solved for."""


class AtLength(NamedTuple):
    """A restore of another length, from what this partition stores.

    Attributes:
        recompute_layers: The first layers that it recomputes.
        refused: Whether a server computes such a hit instead, because that is sooner.
        best: The partition that would be best for this length.
    """

    recompute_layers: int
    seconds: float
    best: Partition
    best_seconds: float
    refused: bool


@dataclass(frozen=True)
class PartitionPlan:
    """The best partition for a model on a machine.

    Attributes:
        tokens: Tokens of the restore that it was solved for.
        tp: Tensor-parallel ranks.
        restore: Plan what a server with this option ``restore`` stores, which is every layer, and
            how it restores that; None: any method may be used.
    """

    profile: Profile
    model: ModelShape
    tokens: int
    tp: int
    l3: L3Path
    restore: RestorePath | None = None

    @cached_property
    def machine(self) -> Restore:
        """Restores of what a server stores."""
        layers, eager = Partition(0, 0, self.model.layers), self.l3 == "overlapped"
        found = Restore(self.profile, self.model, layers, self.tp, eager=eager, paper=True)
        stored = found.fastest(self.tokens, self.l3)
        # Without hidden states a server decides at no load what to recompute.
        return replace(found, partition=stored, recomputable=stored.layers * bool(stored.hidden))

    @cached_property
    def costs(self) -> LayerCosts:
        return self.machine.costs(self.tokens, 0, self.l3)

    @cached_property
    def partition(self) -> Partition:
        return self._restored(self.tokens) if self.restore else self._best(self.tokens)

    @property
    def stored(self) -> Partition:
        """The best one of which every layer is stored: what servers choose by themselves."""
        return self.machine.partition

    @cached_property
    def choices(self) -> dict[str, Partition]:
        """The mix and the three pure methods."""
        layers = self.model.layers
        return {
            "mix": self.partition,
            "hidden": Partition(0, layers, 0),
            "kv": Partition(0, 0, layers),
            "recompute": Partition(layers, 0, 0),
        }

    def bytes_per_token(self, choice: str) -> int:
        """Bytes stored for one of :attr:`choices`; a server stores every layer of its mix."""
        own = choice == "mix" and self.restore is not None
        return (self.stored if own else self.choices[choice]).bytes_per_token(self.model)

    def seconds(self, choice: str) -> float:
        """Predicted time of a restore by one of :attr:`choices`."""
        return self._seconds(self.choices[choice], self.tokens)

    @property
    def recomputes_front(self) -> bool:
        """Whether a server reads a hit from its last page on and recomputes its front meanwhile.

        Servers do where restores are eager: they store every layer unless an option forbids it.
        """
        return self.restore == "auto" and self.l3 == "overlapped" and self.profile.l3 is not None

    @property
    def seconds_read_only(self) -> float:
        """Predicted time of a restore of which no front is recomputed."""
        return simulate(self.costs, self.partition)

    def timeline(self, choice: str) -> list[Task]:
        """The pipeline of one of :attr:`choices`, with no front recomputed."""
        tasks: list[Task] = []
        simulate(self.costs, self.choices[choice], note=lambda *task: tasks.append(Task(*task)))
        late = self._unused(self.choices[choice], self.tokens)
        return [
            task._replace(start=task.start + late * (task.stream != "l3"), end=task.end + late)
            for task in tasks
        ]

    def busy(self, choice: str) -> dict[Resource, float]:
        """Seconds that every resource works during a restore by one of :attr:`choices`, with no
        front recomputed."""
        partition, costs = self.choices[choice], self.machine.costs(self.tokens, 0, "first")
        return {
            "compute": costs.compute(partition),
            "bus": costs.transfer(partition),
            "l3": costs.reading(partition),
        }

    def binds(self, choice: str) -> Resource:
        """The resource that works longest."""
        busy = self.busy(choice)
        return max(busy, key=lambda resource: busy[resource])

    @property
    def refused(self) -> bool:
        """Whether a server computes such hits in L3 instead, because that is sooner."""
        return self._refuses(self.tokens)

    def at_length(self, tokens: int) -> AtLength:
        """How a restore of ``tokens`` tokens goes once this partition is stored."""
        if self.restore is None:
            costs = self.machine.costs(tokens, 0, self.l3)
            used = self.partition.recomputing(recompute_layers(costs, self.partition))
        else:
            used = self._restored(tokens)
        best = self._best(tokens)
        return AtLength(
            used.recompute,
            self._seconds(used, tokens),
            best,
            self._seconds(best, tokens),
            self._refuses(tokens),
        )

    def notes(self) -> list[str]:
        """What a reader should know beside the numbers."""
        model, partition = self.model, self.partition
        found = []
        if not partition.hidden:
            reason = (
                f"they take {model.hidden_bytes:,} bytes per token and layer, KV takes "
                f"{model.kv_bytes:,} ({model.attention})"
                if not model.hidden_is_smaller
                else "other methods are faster on this machine"
            )
            found.append(f"hidden states do not pay: {reason}; instead: {describe(partition)}")
        if model.latent:
            found.append("MLA pools are served in KV mode: plain KV pages, nothing recomputed")
        if model.windowed:
            found.append(
                "sliding-window layers are planned as full attention; where they have a KV pool of "
                "their own the server stays in KV mode"
            )
        measured = self.profile.model
        if measured is not None and measured.as_it_is != model.as_it_is:
            found.append(
                f"the profile was measured with another shape ({measured.family}, hidden size "
                f"{measured.hidden}): its rates are taken over"
            )
        if self.tp > 1 and not self.profile.gathers:
            found.append(
                "without NVLink the ranks' shares are gathered over their buses: planned as if "
                "every rank loaded whole hidden states"
            )
        if self.profile.l3 is not None:
            found += self._other_path()
        if self.restore == "auto" and self.tp > 1 and partition.hidden:
            found.append(
                "on GPUs of several tensor-parallel ranks the server restores hidden states "
                "layer-wise"
            )
        if self.recomputes_front and self.seconds("mix") < self.seconds_read_only:
            found.append(
                "front pages are recomputed while L3 is read from the last page on; to read all "
                f"takes {self.seconds_read_only * 1e3:,.1f} ms"
            )
        if self.refused:
            times = self._seconds(self.stored, self.tokens) / self.seconds("recompute")
            found.append(
                f"L3 hits of {self.tokens:,} tokens are refused: computing them is {times:.1f} "
                "times as fast (option 'min_gain'); hits in host memory are restored"
            )
        return found

    def _other_path(self) -> list[str]:
        """What this partition takes where L3 is elsewhere in the restore."""
        if self.l3 == "overlapped":
            costs = self.machine.costs(self.tokens, 0, "first")
            first = simulate(costs, self.partition) * 1e3
            option = "restore layerwise" if self.restore else "l3 first"
            return [
                "L3 is read while layers are restored; all of it read first (HiCache's prefetch, "
                f"--{option}) this partition takes {first:,.1f} ms"
            ]
        if self.restore != "layerwise":
            return []
        meanwhile = server_plan(self.profile, self.model, self.tokens, self.tp, "auto")
        if meanwhile.l3 == "first":
            return []
        return [
            "L3 is read before layers are restored; read meanwhile (--restore auto) a hit takes "
            f"{meanwhile.seconds('mix') * 1e3:,.1f} ms"
        ]

    def report(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "model": {"attention": self.model.attention, **self.model.model_dump()},
            "hardware": {"device": self.profile.device, "source": self.profile.source},
            "tokens": self.tokens,
            "tp": self.tp,
            "l3": self.l3 if self.profile.l3 else "none",
            "restore": self.restore,
            "layers": asdict(self.partition),
            "bytes_per_token": self.bytes_per_token("mix"),
            "kv_bytes_per_token": self.model.layers * self.model.kv_bytes,
            "bytes_per_token_and_layer": {
                "hidden": self.model.hidden_bytes,
                "kv": self.model.kv_bytes,
            },
            "predicted_ms": {name: self.seconds(name) * 1e3 for name in self.choices},
            "busy_ms": {name: value * 1e3 for name, value in self.busy("mix").items()},
            "binds": self.binds("mix"),
            "recomputes_front": self.recomputes_front,
            "read_only_ms": self.seconds_read_only * 1e3,
            "refused": self.refused,
            "at_length": {str(tokens): self._report_at(tokens) for tokens in LENGTHS},
            "notes": self.notes(),
        }

    def _report_at(self, tokens: int) -> dict[str, Any]:
        at = self.at_length(tokens)
        return {
            "recompute_layers": at.recompute_layers,
            "ms": at.seconds * 1e3,
            "best": asdict(at.best),
            "best_ms": at.best_seconds * 1e3,
            "refused": at.refused,
        }

    def _best(self, tokens: int) -> Partition:
        """The best one for ``tokens`` tokens, if layers may be recomputed that are."""
        machine = self.machine
        server_may = bool(machine.recomputable) and self.tp == 1 and self._l3 != "overlapped"
        anyhow = self.restore is None or server_may
        return machine.fastest(tokens, self.l3, LAYER_METHODS if anyhow else ("hidden", "kv"))

    def _restored(self, tokens: int) -> Partition:
        """How a server restores what it stores."""
        if self._l3 == "overlapped":
            return self.stored
        return self.stored.recomputing(self.machine.first_layers(tokens, 0))

    def _unused(self, partition: Partition, tokens: int) -> float:
        """Seconds in which a server reads layers from L3 that it recomputes."""
        if self.restore is None or partition != self._restored(tokens):
            return 0.0
        costs = self.machine.costs(tokens, 0, self.l3)
        return costs.reading(self.stored) - costs.reading(partition)

    def _seconds(self, partition: Partition, tokens: int) -> float:
        seconds = simulate(self.machine.costs(tokens, 0, self.l3), partition)
        seconds += self._unused(partition, tokens)
        if partition.recompute or not self.recomputes_front:
            return seconds
        return until_there(seconds, self.machine.prefill(tokens, 0))

    def _refuses(self, tokens: int) -> bool:
        """Whether a server computes such a hit: it judges as if all that is stored were read."""
        judged = self.restore is not None and self.profile.l3 is not None
        return judged and self.machine.prefill(tokens, 0) <= self._seconds(self.stored, tokens)

    @property
    def _l3(self) -> L3Path:
        return self.l3 if self.profile.l3 is not None else "none"


def server_plan(
    profile: Profile, model: ModelShape, tokens: int, tp: int, restore: RestorePath
) -> PartitionPlan:
    """What a server does with option ``restore``, the others as they are by default.

    Restores overlap with L3 where pages are our own, and ranks do not exchange hidden states. Bytes
    are those of ``model``: see :func:`~hcache_backend.partition.encoded.encoded`.
    """
    alone = restore == "auto" and tp == 1
    plan = PartitionPlan(profile, model, tokens, tp, "overlapped" if alone else "first", restore)
    if model.latent:
        return replace(plan, l3="first")
    if restore == "auto" and not plan.stored.hidden:
        return replace(plan, l3="overlapped")
    return plan
