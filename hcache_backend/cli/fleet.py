"""What ``hcache plan --users`` shows."""

from __future__ import annotations

from hcache_backend.cli.common import human_bytes, screen, table
from hcache_backend.partition.fleet import FleetPlan
from hcache_backend.partition.plan import Resource

_NAMES: dict[Resource, str] = {"l3": "L3", "bus": "bus", "compute": "GPU"}


def show_fleet(fleet: FleetPlan, title: str) -> None:
    """Print what conversations take; ``title`` names model and machine."""
    asked, busy, l2 = fleet.conversations, fleet.busy, fleet.l2_bytes
    _say(
        f"{title}\n{fleet.replicas:,} replica(s); {asked.number:,} conversations of "
        f"{fleet.plan.tokens:,} tokens, each with {asked.turns_per_hour:g} turns of "
        f"{asked.new_tokens:,} new tokens per hour\nComputed from mean rates, not measured.\n"
    )
    shown = table("", "", "each replica#", "all#", "")
    under_way = "for turns that are under way" if l2 is not None else "turns pile up"
    sizes = {
        "L3": (fleet.l3_bytes / fleet.replicas, "every page once"),
        "L2, at least": (l2, under_way),
        "L3 is read": (fleet.read_rate, "per second"),
        "L3 is written": (fleet.write_rate, "per second"),
        "read from behind L3": (fleet.network_rate, "per second, if turns go to any replica"),
    }
    for name, (each, what) in sizes.items():
        every = None if each is None else each * fleet.replicas
        shown.add_row(name, _bytes(each), _bytes(every), what)
    screen.print(shown)
    screen.print()
    shown = table("", "", "share of time#", "if all were computed#")
    for resource, name in _NAMES.items():
        computed = f"{fleet.recompute_busy:.2f}" if resource == "compute" else ""
        shown.add_row(name, f"{busy[resource]:.2f}", computed)
    screen.print(shown)
    _say(
        f"\nWith {fleet.most_conversations:,} conversations the {_NAMES[fleet.binds]} works all "
        "the time. New tokens count as prefill; to decode them takes longer."
    )


def _say(text: str) -> None:
    screen.print(text, highlight=False, soft_wrap=True)


def _bytes(value: float | None) -> str:
    return "" if value is None else human_bytes(int(value))
