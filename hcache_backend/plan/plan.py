"""A server's plan for a model on a machine: the numbers that ``hcache plan`` shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from hcache_backend.plan import restore as restores
from hcache_backend.plan.model_shape import ModelShape, Sides
from hcache_backend.plan.profile import Profile
from hcache_backend.plan.restore import L3Path, Partition, Restore, SidesSeconds, describe

Resource = Literal["compute", "bus", "l3"]
RestorePath = Literal["auto", "layerwise"]  # option restore
LENGTHS = (256, 1024, 4096, 16384)  # tokens of other restores to show


@dataclass(frozen=True)
class PartitionPlan:
    """Storage of each layer on a server, and the time of its restores. ``model`` has encoded bytes;
    ``tokens`` is the restore that is solved for. ``sides``: the layers that keep a window or a
    state instead of pages; each restore loads these, too. None: there are no such layers."""

    profile: Profile
    model: ModelShape
    tokens: int
    tp: int
    restore: RestorePath
    sides: Sides | None = None

    @cached_property
    def l3(self) -> L3Path:
        """When L3 is read: ``none`` (there is no L3), ``first`` (before a restore), ``overlapped``
        (during it). Ranks that exchange hidden states or latents read it first."""
        if self.profile.l3 is None:
            return "none"
        if self.restore != "auto":
            return "first"
        exchanged = self.model.latent or self._restores("first").partition.hidden
        return "first" if self.tp > 1 and exchanged else "overlapped"

    @cached_property
    def machine(self) -> Restore:
        return self._restores(self.l3)

    def _restores(self, l3: L3Path) -> Restore:
        """The cost model of a server. It stores the layers outside :attr:`sides`, by the partition
        that restores :attr:`tokens` tokens the fastest if L3 is read as ``l3`` says."""
        layers = Partition(0, 0, self.model.layers - (self.sides.layers if self.sides else 0))
        restore = Restore(self.profile, self.model, layers, self.tp, paper=True, sides=self.sides)
        stored = restore.fastest(self.tokens, l3)
        # A server that stores no hidden states recomputes no first layers of a load.
        return replace(restore, partition=stored, recomputable=stored.layers * bool(stored.hidden))

    @property
    def stored(self) -> Partition:
        return self.machine.partition

    @cached_property
    def partition(self) -> Partition:
        return self._restored(self.tokens)

    @cached_property
    def choices(self) -> dict[str, Partition]:
        """Partitions to compare, by name: ``mix``, which a server would use, and all layers by one
        method. Models with :attr:`sides` (layers that keep a window or state) store no ``hidden``
        states, only K and V of the other layers. ``recompute`` runs all layers, sides too."""
        layers = self.stored.layers  # without :attr:`sides`
        pure = {"hidden": Partition(0, layers, 0), "kv": Partition(0, 0, layers)}
        if self.sides:
            del pure["hidden"]
        return {"mix": self.partition, **pure, "recompute": Partition(self.model.layers, 0, 0)}

    @cached_property
    def plain(self) -> PartitionPlan:
        """The plan of SGLang alone, for its choice ``kv``: pages without a codec, read from L3
        before they are loaded. Each rank loads whole latents, but L3 reads them once."""
        profile = self.profile.model_copy(update={"gathers": False})
        return replace(self, profile=profile, model=self.model.as_it_is, restore="layerwise")

    @property
    def finding(self) -> str:
        """A sentence: how many times as fast as SGLang's pages, and as computing, our server is. It
        computes hits that it refuses, so their time is that of computing."""
        how, ours, computing = "", self.seconds("mix"), self.seconds("recompute")
        if self.refused:
            how, ours = " computes such L3 hits (option 'min_gain')", computing
        return (
            f"This backend{how}: {self.plain.seconds('kv') / ours:.1f} times as fast as SGLang's "
            f"plain pages, {computing / ours:.1f} times as fast as computing"
        )

    def bytes_per_token(self, choice: str) -> int:
        """Stored bytes of a token; ``mix`` counts recomputed layers, too: a server stores them."""
        kept = self.stored if choice == "mix" else self.choices[choice]
        return kept.bytes_per_token(self.model)

    def seconds(self, choice: str) -> float:
        return self._seconds(self.choices[choice], self.tokens)

    @property
    def recomputes_front(self) -> bool:
        """True if a hit is read from its last page on while its front is recomputed."""
        return self.l3 == "overlapped" and not (self.sides or self.model.index_bytes)

    def busy(self, choice: str) -> dict[Resource, float]:
        """Seconds that each resource works in a restore of which no front is recomputed."""
        partition = self.choices[choice]
        # "first" counts L3 apart; "overlapped" would count it in the transfers over the bus.
        costs = self.machine.costs(self.tokens, prefix=0, l3="first")
        sides = self.machine.sides_seconds("first") if partition.kv else SidesSeconds(0, 0)
        return {
            "compute": costs.compute(partition),
            "bus": costs.transfer(partition) + sides.copying,
            "l3": costs.reading(partition) + sides.reading,
        }

    def binds(self, choice: str) -> Resource:
        busy = self.busy(choice)
        return max(busy, key=lambda resource: busy[resource])

    @property
    def refused(self) -> bool:
        """True if a server computes such L3 hits instead, because that is sooner."""
        return self._refuses(self.tokens)

    def at_length(self, tokens: int) -> dict[str, Any]:
        """A restore of ``tokens`` tokens, for JSON; the server computes a ``refused`` hit."""
        used, refused = self._restored(tokens), self._refuses(tokens)
        milliseconds = 1e3 * self._seconds(used, tokens)
        return {"recompute_layers": used.recompute, "ms": milliseconds, "refused": refused}

    def notes(self) -> list[str]:
        """Sentences that explain the numbers."""
        model, partition, measured = self.model, self.partition, self.profile.model
        notes = []
        if not partition.hidden:
            reason = "other methods are faster on this machine"
            if self.sides:
                reason = "only the full-attention layers have pages of their own"
            elif not model.hidden_is_smaller:
                reason = (
                    f"they take {model.hidden_bytes:,} bytes per token and layer, {model.cached} "
                    f"{model.kv_bytes:,} ({model.attention})"
                )
            instead = describe(partition, model.latent)
            notes.append(f"hidden states do not pay: {reason}; instead: {instead}")
        if model.index_bytes:
            notes.append(f"DSA: pages also have index keys, {model.index_bytes:,} bytes a token")
            notes.append("computing is planned without the indexer, with attention to all tokens")
        elif model.latent:
            notes.append("MLA pools are served in KV mode: of a page each rank keeps a part")
        if self.sides:
            read, copy = (1e3 * seconds for seconds in self.machine.sides_seconds(self.l3))
            notes.append(
                f"a hit also needs a {self.sides.kind} of the {self.sides.layers} other layers: "
                f"{self.sides.size:,} bytes, {read:,.1f} ms to read and {copy:,.1f} ms to copy, "
                "which the times include; no front is recomputed"
            )
        elif model.windowed:
            notes.append(
                "sliding-window layers are planned as full attention; if they have a KV pool of "
                "their own, the server stores K and V of the others, and windows"
            )
        if measured is not None and measured.as_it_is != model.as_it_is:
            notes.append(
                f"the profile was measured with another shape ({measured.family}, hidden size "
                f"{measured.hidden}): its rates are taken over"
            )
        if self.tp > 1 and not self.profile.gathers:
            notes.append(
                "without NVLink the ranks' shares are gathered over their buses: planned as if "
                "every rank loaded whole hidden states"
            )
        if self.profile.l3 is not None:
            costs = self.machine.costs(self.tokens, prefix=0, l3="first")
            busy = costs.reading(self.stored) + self.machine.sides_seconds("first").reading
            notes.append(
                f"a hit that is read whole keeps L3 busy for {busy * 1e3:,.1f} ms, so L3 reads at "
                f"most {1 / busy:,.1f} of them per second"
            )
        return notes

    def report(self) -> dict[str, Any]:
        model = self.model
        return {
            "model": {"attention": model.attention, **model.model_dump()},
            "hardware": {"device": self.profile.device, "source": self.profile.source},
            "tokens": self.tokens,
            "tp": self.tp,
            "l3": self.l3,
            "restore": self.restore,
            "layers": asdict(self.partition),
            "bytes_per_token": self.bytes_per_token("mix"),
            "kv_bytes_per_token": self.bytes_per_token("kv"),
            "plain_bytes_per_token": self.plain.bytes_per_token("kv"),
            "sides": self.sides and self.sides._asdict(),
            "bytes_per_token_and_layer": {"hidden": model.hidden_bytes, "kv": model.kv_bytes},
            "predicted_ms": {name: self.seconds(name) * 1e3 for name in self.choices}
            | {"plain": self.plain.seconds("kv") * 1e3},
            "finding": self.finding,
            "busy_ms": {name: value * 1e3 for name, value in self.busy("mix").items()},
            "binds": self.binds("mix"),
            "recomputes_front": self.recomputes_front,
            "read_only_ms": self._simulated(self.partition, self.tokens) * 1e3,
            "refused": self.refused,
            "at_length": {str(tokens): self.at_length(tokens) for tokens in LENGTHS},
            "notes": self.notes(),
        }

    def _restored(self, tokens: int) -> Partition:
        """How a server's restore of that length gets each layer. First layers that are stored may
        be recomputed; not if a front (first tokens) is recomputed instead."""
        if self.recomputes_front:
            return self.stored
        return self.stored.recomputing(self.machine.first_layers(tokens, prefix=0))

    def _simulated(self, partition: Partition, tokens: int) -> float:
        return replace(self.machine, partition=partition).seconds(tokens, self.l3)

    def _unused(self, partition: Partition, tokens: int) -> float:
        """Seconds of L3 for stored layers that a server's own restore reads and then recomputes. 0
        for other partitions: they read only what they load."""
        if partition != self._restored(tokens):
            return 0.0
        costs = self.machine.costs(tokens, prefix=0, l3=self.l3)
        return costs.reading(self.stored) - costs.reading(partition)

    def _seconds(self, partition: Partition, tokens: int) -> float:
        """Seconds of a restore, of which a front may be recomputed if no layers are."""
        seconds = self._simulated(partition, tokens) + self._unused(partition, tokens)
        if partition.recompute or not self.recomputes_front:
            return seconds
        return restores.completion_seconds(seconds, self.machine.prefill(tokens, prefix=0))

    def _refuses(self, tokens: int) -> bool:
        """True if a server computes such a hit; it judges as if all stored layers were read."""
        computing = self.machine.prefill(tokens, prefix=0)
        return self.profile.l3 is not None and computing <= self._seconds(self.stored, tokens)
