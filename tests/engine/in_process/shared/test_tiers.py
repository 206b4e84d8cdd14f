"""The page store, the shared tier and both as one have the same calls."""

from collections.abc import Callable

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from hcache_backend.tiers.tier import Pages, Tier
from tests.engine.in_process.shared.machines import Machine, counted, until
from tests.engine.in_process.test_storage import KEYS

TIERS: dict[str, Callable[[Machine], Tier]] = {
    "local": lambda machine: machine.storage._tier.local,
    "shared": lambda machine: machine.storage._tier._shared,
    "both": lambda machine: machine.storage._tier,
}


def pages_of(machine: Machine, *numbers: int) -> tuple[Pages, list[list[memoryview]]]:
    """Names of pages, and their memory in the pool of the machine."""
    [pages] = machine.storage._pages(PoolName.KV, [KEYS[number] for number in numbers])
    pool = machine.storage._pools[PoolName.KV]
    memory = pool.memory(
        torch.cat([machine.pool.fill(range(n, n + 1)) for n in numbers]), len(numbers), read=True
    )
    return pages, memory.parts[0]


@pytest.mark.parametrize("name", TIERS)
def test_a_tier_has_what_it_took_and_takes_nothing_in_quarantine(
    name: str, machine: Callable[..., Machine]
) -> None:
    first = machine("first")
    tier, before = TIERS[name](first), counted("written")
    pages, memory = pages_of(first, 0, 1, 3)
    given = first.pool.data.clone()
    assert tier.put(pages, memory) == [True] * 3
    if name != "local":
        until(lambda: counted("written") == before + 3, "pages to be written")
    first.pool.data.zero_()
    assert tier.get(pages, memory) == [True] * 3
    assert torch.equal(first.pool.data, given)
    asked, into = pages_of(first, 0, 2, 3)
    assert tier.exists(asked) == [True, False, name != "shared"], "it gives up at a missing page"
    assert tier.get(asked, into) == [True, False, True]
    tier.quarantine([pages.namespace])
    assert tier.put(asked, into) == [False] * 3
    assert tier.exists(asked) == [name != "local", False, False]
