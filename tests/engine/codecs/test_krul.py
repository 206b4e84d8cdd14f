"""Servers whose pages have pairs of layers in one slot (codec ``krul``)."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from hcache_backend.format.envelope import parse_name
from hcache_backend.format.file import parse_header
from hcache_backend.format.page import LAYER_ENTRY
from tests.engine.codecs.test_encoded_kv import PAGE
from tests.engine.harness import ours
from tests.engine.harness.conversations import ask, converse, make_conversations, random_tokens

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAYERS = 6
MERGED = [[[0, 5], [2, 3]], [[1, 4]]]
"""Pairs of two servers: all pages have two."""


def paired(
    model: Path, folder: Path, tp: int = 1, metrics: bool = False, **krul: Any
) -> ServerOptions:
    """A random model's layers are not alike: whatever a merge makes of them is taken."""
    krul = {"ratio": 0.7, "error": 10.0, **krul}
    return ours.our_server(
        model,
        folder,
        hcache={"mode": "kv", "codec": "krul", "krul": krul},
        dtype="bfloat16",
        page_size=PAGE,
        tp=tp,
        metrics=metrics,
    )


def pairs_in(path: Path) -> frozenset[tuple[int, int, bytes]]:
    """Layers that share slots by the header of the page in a file, and what encodes them."""
    data = path.read_bytes()
    header = parse_header(memoryview(bytearray(data)))
    start = header.layout.header_bytes + 96 + 8 * PAGE
    table = data[start : start + LAYERS * LAYER_ENTRY.size]
    by_slot: dict[tuple[int, bytes], list[int]] = {}
    for layer, (_, slot, code) in enumerate(LAYER_ENTRY.iter_unpack(table)):
        by_slot.setdefault((slot, code.rstrip(b"\0")), []).append(layer)
    shared = [(*both, code) for (_, code), both in by_slot.items() if len(both) > 1]
    return frozenset((first, second, code) for first, second, code in shared)


def test_pages_of_several_servers_come_back_together_and_damage_is_a_miss(
    model_cache: Path, tmp_path: Path
) -> None:
    model = build_model("qwen3", model_cache, num_hidden_layers=LAYERS)
    prefix = random_tokens(2 * PAGE, 3)
    conversations = make_conversations(2, turns=3, tokens=300, prefix=prefix)
    with Server(paired(model, tmp_path, pairs=MERGED[0])) as server:
        converse(server, conversations, turns=2)
        # Every page was checked, before it was stored and as it came back.
        ours.assert_nothing_went_wrong(server)
        assert ": 0 and 5 merged, 2 and 3 merged" in server.log_text()
    first = set(ours.stored_pages(tmp_path))
    with Server(paired(model, tmp_path, pairs=MERGED[1])) as server:
        converse(server, conversations)  # the prefix, which both share, is the other server's
        ours.assert_nothing_went_wrong(server)
        assert ": 1 and 4 merged, 3 and 5 int8" in server.log_text()
    ours.assert_restored_from_l3(conversations[:1], PAGE)
    for turn in conversations[1].turns[1:]:  # which finds the prefix on the device by now
        assert turn.cached.storage >= turn.history_tokens - len(prefix) - PAGE, turn.cached
    assert first < set(ours.stored_pages(tmp_path))

    whole = [conversation.history for conversation in conversations]
    with Server(paired(model, tmp_path, error=0.3)) as server:
        found = ask(server, whole, flush=False)
        # By the second time only L1 and L2 have been asked for the prefix.
        assert found[0].turns[0].cached.storage == len(whole[0]) // PAGE * PAGE
        assert found[1].turns[0].cached.storage == len(whole[1]) // PAGE * PAGE - len(prefix)
        server.flush_cache()
        ours.assert_nothing_went_wrong(server)
        for path in first:
            ours.flip_bit(path, path.stat().st_size // 2, 5)
        damaged = ask(server, whole)
        assert [c.turns[0].cached.storage for c in damaged] == [0, 0]
        ours.assert_nothing_went_wrong(server)


@pytest.mark.parametrize("tp", [1, 2])
def test_each_part_of_a_conversation_has_pairs_of_its_own(
    tp: int, model_cache: Path, tmp_path: Path
) -> None:
    """The same on all ranks, each of which sees its own heads only."""
    model = build_model("qwen3", model_cache, num_hidden_layers=LAYERS)
    pairing = partial(paired, model, tmp_path, tp=tp, metrics=True)
    with Server(pairing(gamma=0.0)) as server:
        [conversation] = converse(server, make_conversations(1, turns=4, tokens=300))
        ours.assert_restored_from_l3([conversation], PAGE)
        ours.assert_nothing_went_wrong(server)
        assert "15 of 15 pairs of layers may be merged" in server.log_text()
        assert "attention could not be observed" not in server.log_text()
        page = requests.get(f"{server.url}/metrics", timeout=240).text
    files: dict[bytes, list[Path]] = {}
    for path in ours.stored_pages(tmp_path):
        name = parse_name(path.name)
        assert name is not None
        files.setdefault(name.key, []).append(path)
    assert {len(of_ranks) for of_ranks in files.values()} == {tp}
    every = [{pairs_in(path) for path in of_ranks} for of_ranks in files.values()]
    assert {len(of_ranks) for of_ranks in every} == {1}
    found = set.union(*every)
    assert len(found) >= 2
    assert {len(pairs) for pairs in found} == {2}
    assert {code for pairs in found for *_, code in pairs} == {b"merged"}
    chosen, far = (
        dict(re.findall(f'^{name}{{.*codec="(.*?)".*}} (.*)$', page, re.MULTILINE))
        for name in ("hcache_pairs_total", "hcache_pair_distance_count")
    )
    assert chosen.keys() == far.keys() == {"merged"}
    assert chosen == far and float(chosen["merged"]) >= 2 * len(found)
    with Server(pairing(error=0.1)) as server:
        [again] = ask(server, [conversation.history])  # pages with merged layers are read
        assert again.turns[0].cached.storage == len(conversation.history) // PAGE * PAGE
        ours.assert_nothing_went_wrong(server)
