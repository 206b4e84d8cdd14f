"""Bytes and rates of many conversations, and the load of L3, bus and GPU, from mean rates.

A turn restores its history from L3, then computes its new tokens. Near a load of 1 turns wait for
each other; above 1 the servers cannot keep up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hcache_backend.plan.plan import PartitionPlan, Resource


class Conversations(NamedTuple):
    """Restorable conversations, turns of each, tokens of a question and its reply."""

    number: int
    turns_per_hour: float
    new_tokens: int


@dataclass
class FleetPlan:
    """``replicas`` servers of ``plan``, whose ``tokens`` are a history; turns divide evenly.

    Each replica has ``plan.tp`` devices and an L3. Hits that are not refused are read whole,
    because busy servers have no time to recompute a front. Rates are bytes per second.

    Attributes:
        l3_bytes: All conversations on all replicas, each page once.
        turn, busy: Seconds per turn, and load, of each resource of a replica.
        most_conversations: On all replicas, at full load of ``binds``, the busiest resource.
        recompute_busy: Load of a replica's GPU if histories were computed.
        l2_bytes: A replica's host memory for turns under way, by Little's law and the delays of a
            queue (M/M/1) at the busiest resource; None: turns pile up.
        network_rate: From other replicas' L3, if turns go to any replica.
    """

    plan: PartitionPlan
    conversations: Conversations
    replicas: int

    def __post_init__(self) -> None:
        plan, (number, turns_per_hour, new) = self.plan, self.conversations
        token, tokens = plan.bytes_per_token("mix"), plan.tokens + new
        self.turns_per_second = turns = number * turns_per_hour / 3600 / self.replicas
        self.l3_bytes = number * tokens * token
        prefill = plan.machine.prefill(new, plan.tokens)
        self.turn = plan.busy("recompute" if plan.refused else "mix")
        self.turn["compute"] += prefill
        self.busy = {name: seconds * turns for name, seconds in self.turn.items()}
        self.binds: Resource = max(self.turn, key=self.turn.__getitem__)
        self.most_conversations = int(number / self.busy[self.binds])
        self.recompute_busy = (plan.seconds("recompute") + prefill) * turns
        self.l2_bytes: float | None = None
        if (busiest := self.busy[self.binds]) < 1:
            under_way = turns * sum(self.turn.values()) / (1 - busiest)
            self.l2_bytes = max(1.0, under_way) * tokens * token
        self.read_rate = 0.0 if plan.refused else turns * plan.tokens * token
        self.write_rate = turns * new * token
        self.network_rate = self.read_rate * (self.replicas - 1) / self.replicas

    def report(self) -> dict[str, Any]:
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
