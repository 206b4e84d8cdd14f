"""SGLang's `cache_hit_kit`: each turn finds all earlier ones, where device and host pool are small.

Nothing is flushed: turns are evicted from the device and from host memory by those of others.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness.server import Server

from .servers import assert_sound, options
from .standins import kit, texts_to_draw

pytestmark = pytest.mark.engine

CLIENTS, REQUEST_TOKENS = 8, 256
LONG = [
    pytest.param(l3, ratio, 4, marks=pytest.mark.long, id=f"{l3} {ratio}")
    for l3 in ("file", "auto", "hidden", "kv")
    for ratio in (1.5, 2.0)
]


@pytest.mark.parametrize(
    ("l3", "ratio", "rounds"),
    [pytest.param("auto", 1.5, 3, marks=pytest.mark.versions, id="short"), *LONG],
)
def test_each_turn_finds_all_earlier_ones(
    l3: str,
    ratio: float,
    rounds: int,
    speaker: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    texts = texts_to_draw(tmp_path / "texts.json", CLIENTS * rounds, REQUEST_TOKENS)
    small = options(l3, speaker, tmp_path, max_total_tokens=2048, hicache_ratio=ratio)
    with Server(small) as server:
        found = kit("kits.cache_hit_kit").run_multiturn_cache_hit_test(
            server.url,
            str(speaker),
            num_clients=CLIENTS,
            num_rounds=rounds,
            request_length=REQUEST_TOKENS,
            output_length=16,
            dataset_path=str(texts),
            # Host memory that the device has, and one prefetch: `file` has room for no second one.
            max_parallel=1,
        )
        if l3 != "file":
            assert_sound(server, l3)
    record_property(
        "cache_hit_rates", {name: of["cache_hit_rate"] for name, of in found["rounds"].items()}
    )
