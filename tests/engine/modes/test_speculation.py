"""Speculative decoding over own pages: the same tokens, and as many accepted drafts as ever.

A draft model's K and V are a pool of SGLang's own beside ours; L3 has its pages in our store.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.drafts import accepted, drafting
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of
from tests.engine.harness.sparse import PACKED, SPARSE

pytestmark = pytest.mark.engine

LAYERWISE = {"restore": "layerwise"}
LITE = "MTP glm4_moe_lite"
INDEXED = SPARSE | {"page_size": 64}  # SGLang has no other pages of index keys
SERVERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "NGRAM, hidden": ("NGRAM", "hidden", {}, {}),
    "NGRAM, kv": ("NGRAM", "kv", {}, {}),
    "STANDALONE, kv": ("STANDALONE", "kv", {}, {}),
    "STANDALONE, kv, layer-wise": ("STANDALONE", "kv", LAYERWISE, {}),
    "STANDALONE, kv, two ranks": ("STANDALONE", "kv", {}, {"tp": 2}),
    "STANDALONE, hidden": ("STANDALONE", "hidden", {}, {}),
    "STANDALONE, hidden, layer-wise": ("STANDALONE", "hidden", LAYERWISE, {}),
    "EAGLE, hidden": ("EAGLE", "hidden", {}, {}),
    "EAGLE, hidden, two ranks": ("EAGLE", "hidden", {}, {"tp": 2}),
    "EAGLE, kv": ("EAGLE", "kv", {}, {}),
    "EAGLE3, kv": ("EAGLE3", "kv", {}, {}),
    "EAGLE3, hidden": ("EAGLE3", "hidden", {}, {}),
    # The draft's K and V, or latents, are layers of our pages.
    "MTP": ("MTP glm4_moe", "auto", {}, {}),
    "MTP, latents": (LITE, "auto", {}, {}),
    "MTP, latents, two ranks": (LITE, "auto", {}, {"tp": 2}),
    "MTP, latents, layer-wise": (LITE, "auto", LAYERWISE, {}),
    # A draft layer has an indexer, too, and so keys of it.
    "MTP, index keys": ("MTP deepseek_v32", "auto", {}, INDEXED),
    "MTP, index keys, two ranks": ("MTP deepseek_v32", "auto", {}, INDEXED | {"tp": 2}),
    "MTP, index keys, FP8": ("MTP glm_5", "auto", {}, INDEXED | {"extra_args": PACKED}),
    "MTP, index keys, plain pages": ("MTP deepseek_v32", "plain", {}, INDEXED),
}
OFTEN = "EAGLE, hidden", "MTP, latents", "MTP, index keys"


def drafting_server(
    algorithm: str, cache: Path, folder: Path, *, seed: int = 0, **options: Any
) -> ServerOptions:
    drafts = drafting(algorithm, cache, folder, seed=seed)
    arguments = (*drafts.arguments, *options.pop("extra_args", ()))
    return ours.our_server(
        drafts.model, folder, extra_args=arguments, **{"page_size": 16} | options
    )


def without_a_cache(
    options: ServerOptions, conversations: Sequence[Conversation]
) -> list[tuple[list[int], list[int]]]:
    """Tokens of each turn, and how many drafts are accepted, on a server without any cache."""
    log = options.log.with_name("plain.log")
    plain = replace(options, log=log, cache="none")
    with Server(plain) as server:
        turns = turns_of(conversations)
        replies = [server.generate(turn.prompt, len(turn.reply.output_ids)) for turn in turns]
    return [(reply.output_ids, accepted(reply)) for reply in replies]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.versions if name in OFTEN else pytest.mark.long)
        for name in SERVERS
    ],
)
def test_l3_changes_no_token_and_no_draft(name: str, model_cache: Path, tmp_path: Path) -> None:
    algorithm, mode, hcache, options = SERVERS[name]
    started = drafting_server(
        algorithm, model_cache, tmp_path, hcache={"mode": mode} | hcache, **options
    )

    def talk(**how: Any) -> Sequence[Conversation]:
        with Server(started) as server:
            found = converse(server, make_conversations(2, turns=3, tokens=200), **how)
            if mode == "plain":
                ours.assert_nothing_went_wrong(server)
            else:
                ours.assert_sound_own_pages(server, "hidden" if mode == "hidden" else "kv")
        return found

    conversations = talk()
    ours.assert_restored_from_l3(conversations, started.page_size)
    pages = ours.stored_pages(tmp_path)
    started.log = tmp_path / "restarted.log"
    again = talk(flush=False)  # nothing of the drafts is on the device by chance
    assert all(turn.cached.storage for turn in turns_of(again))
    assert mode != "auto" or ours.stored_pages(tmp_path) == pages
    wanted = without_a_cache(started, conversations)
    for found in (conversations, again):
        replies = [turn.reply for turn in turns_of(found)]
        assert [(reply.output_ids, accepted(reply)) for reply in replies] == wanted
    if algorithm.startswith("MTP"):
        assert all(sum(counts[1:]) > 2 for _, counts in wanted)
    elif algorithm in ("STANDALONE", "EAGLE"):
        assert sum(sum(counts[1:]) for _, counts in wanted) > 10


@pytest.mark.long
@pytest.mark.parametrize("mode", ["kv", "hidden"])
def test_encoded_pages_of_a_model_that_drafts(mode: str, model_cache: Path, tmp_path: Path) -> None:
    options = drafting_server(
        "STANDALONE", model_cache, tmp_path, hcache={"mode": mode}, dtype="bfloat16"
    )
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        ours.assert_restored_from_l3(conversations, 16)
        ours.assert_sound_own_pages(server, mode)
        assert "codec exp4" in server.log_text()
    ours.assert_no_cache_output_up_to_ties(options.model, tmp_path, conversations)

    def drafts_taken(turns: Iterable[list[int]]) -> int:
        return sum(number * count for counts in turns for number, count in enumerate(counts))

    # A prefill behind a hit rounds otherwise than one of the whole prompt, so drafts may differ.
    found = drafts_taken(accepted(turn.reply) for turn in turns_of(conversations))
    wanted = drafts_taken(counts for _, counts in without_a_cache(options, conversations))
    assert found >= 0.9 * wanted


@pytest.mark.parametrize(
    "hcache", [pytest.param(LAYERWISE, marks=pytest.mark.long), {}], ids=["layer-wise", "front"]
)
def test_lost_pages_of_a_draft_cost_no_token(
    hcache: dict[str, Any], model_cache: Path, tmp_path: Path
) -> None:
    """Read in order, the hit ends before such a page, as with SGLang's own backends. Behind a
    front, fewer drafts are accepted. Neither costs a token."""
    options = drafting_server("STANDALONE", model_cache, tmp_path, hcache={"mode": "kv"} | hcache)
    with Server(options) as server:
        converse(server, make_conversations(2, turns=2, tokens=200), flush=False)
        server.wait_backed_up()
    pages = ours.stored_pages(tmp_path)
    of_draft = min(path.stat().st_size for path in pages)
    damaged = [path for path in pages if path.stat().st_size == of_draft]
    assert 2 * len(damaged) == len(pages)
    for path in damaged[::4]:
        path.unlink()
    for path in damaged[1::4]:
        ours.flip_bit(path, -100)
    options.log = tmp_path / "restarted.log"
    with Server(options) as server:
        again = converse(server, make_conversations(2, turns=2, tokens=200))
        ours.assert_sound_own_pages(server, "kv")
    found = sum(turn.cached.storage for turn in turns_of(again))
    assert (0 < found < 2 * (192 + 400)) if hcache else found
    ours.assert_no_cache_output(options.model, again)


@pytest.mark.parametrize("algorithm", ["EAGLE", LITE])
def test_pages_of_another_draft_are_misses(
    algorithm: str, model_cache: Path, tmp_path: Path
) -> None:
    """Its K and V would be wrong ones, and next to no draft accepted."""
    hcache = {"mode": "kv", "recompute": "never"}
    for seed, from_l3 in ((0, 0), (1, 0), (0, 192)):
        options = drafting_server(
            algorithm, model_cache, tmp_path, seed=seed, hcache=hcache, log=tmp_path / f"{seed}.log"
        )
        with Server(options) as server:
            [conversation] = converse(server, make_conversations(1, turns=1, tokens=200))  # flushed
            ours.assert_nothing_went_wrong(server)
        assert conversation.turns[0].cached.storage == from_l3
