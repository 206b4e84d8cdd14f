"""What conversations take of servers: bytes, rates, and how busy L3, bus and GPU are.

Everything is computed from mean rates. A turn of a conversation restores its history from L3, then
computes what is new. A share of time near 1 means that turns wait for each other; above 1, that the
servers cannot keep up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from hcache_backend.partition.plan import PartitionPlan, Resource


class Conversations(NamedTuple):
    """What people do.

    Attributes:
        number: Conversations that are to be restorable.
        turns_per_hour: Turns of one conversation.
        new_tokens: Tokens of a question and its reply.
    """

    number: int
    turns_per_hour: float
    new_tokens: int


@dataclass(frozen=True)
class FleetPlan:
    """Replicas of a server with the partition of ``plan``, whose tokens are those of a history.

    Each replica has ``plan.tp`` devices and an L3 of the profile's; a conversation's turns are
    divided over the replicas evenly. Hits that are not refused are read whole: idle servers
    recompute a front meanwhile, busy ones have no time for that.
    """

    plan: PartitionPlan
    conversations: Conversations
    replicas: int

    @property
    def turns_per_second(self) -> float:
        """Turns that each replica serves per second."""
        turns = self.conversations.number * self.conversations.turns_per_hour / 3600
        return turns / self.replicas

    @cached_property
    def bytes_per_token(self) -> int:
        stored = self.plan.stored if self.plan.restore else self.plan.partition
        return stored.bytes_per_token(self.plan.model)

    @property
    def l3_bytes(self) -> int:
        """All conversations, on all replicas together, each page once."""
        tokens = self.plan.tokens + self.conversations.new_tokens
        return self.conversations.number * tokens * self.bytes_per_token

    @cached_property
    def turn(self) -> dict[Resource, float]:
        """Seconds of each resource for one turn."""
        busy = self.plan.busy("recompute" if self.plan.refused else "mix")
        return {**busy, "compute": busy["compute"] + self._prefill(self.plan.tokens)}

    @property
    def busy(self) -> dict[Resource, float]:
        """Share of time that each resource of a replica works."""
        return {name: seconds * self.turns_per_second for name, seconds in self.turn.items()}

    @property
    def binds(self) -> Resource:
        """The resource that is busiest."""
        return max(self.turn, key=lambda resource: self.turn[resource])

    @property
    def most_conversations(self) -> int:
        """With so many, all replicas together, the busiest resource works all the time."""
        return int(self.conversations.number / self.busy[self.binds])

    @property
    def recompute_busy(self) -> float:
        """Share of time that the GPU of a replica would work, were histories computed."""
        seconds = self.plan.seconds("recompute") + self._prefill(self.plan.tokens)
        return seconds * self.turns_per_second

    @property
    def l2_bytes(self) -> float | None:
        """Host memory of a replica for turns that are under way; None: they pile up.

        By Little's law, with the delays of a queue at the busiest resource (M/M/1).
        """
        busiest = self.busy[self.binds]
        if busiest >= 1:
            return None
        under_way = self.turns_per_second * sum(self.turn.values()) / (1 - busiest)
        tokens = self.plan.tokens + self.conversations.new_tokens
        return max(1.0, under_way) * tokens * self.bytes_per_token

    @property
    def read_rate(self) -> float:
        """Bytes per second that a replica reads from L3."""
        read = 0 if self.plan.refused else self.plan.tokens * self.bytes_per_token
        return self.turns_per_second * read

    @property
    def write_rate(self) -> float:
        """Bytes per second that a replica writes to L3."""
        return self.turns_per_second * self.conversations.new_tokens * self.bytes_per_token

    @property
    def network_rate(self) -> float:
        """Bytes per second that a replica reads from what is behind its L3, where turns go to any
        replica."""
        return self.read_rate * (self.replicas - 1) / self.replicas

    def report(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            **self.conversations._asdict(),
            "replicas": self.replicas,
            "turns_per_second": self.turns_per_second,
            "l2_bytes": self.l2_bytes,
            "l3_bytes": self.l3_bytes,
            "read_bytes_per_second": self.read_rate,
            "write_bytes_per_second": self.write_rate,
            "network_bytes_per_second": self.network_rate,
            "busy": self.busy,
            "busy_recomputing": self.recompute_busy,
            "binds": self.binds,
            "most_conversations": self.most_conversations,
        }

    def _prefill(self, prefix: int) -> float:
        """Seconds to compute the new tokens of a turn behind ``prefix`` tokens."""
        return self.plan.machine.prefill(self.conversations.new_tokens, prefix)
