"""Speculative decoding over own pages: the same tokens, and as many accepted drafts as ever.

A draft model's K and V are a pool of SGLang's own beside ours; L3 has its pages in our store.
"""

from pathlib import Path
from typing import Any

import pytest

from bench.harness.drafts import accepted, drafting
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, converse, make_conversations, turns_of

pytestmark = pytest.mark.engine

LONG = pytest.mark.long
LAYERWISE = {"restore": "layerwise"}


def drafts_without_a_cache(
    options: ServerOptions, folder: Path, conversations: list[Conversation]
) -> list[list[int]]:
    """How many drafts a server without any cache accepts in each turn."""
    plain = ServerOptions(
        options.model,
        folder / "plain.log",
        cache="none",
        page_size=options.page_size,
        tp=options.tp,
        dtype=options.dtype,
        extra_args=options.extra_args,
    )
    with Server(plain) as server:
        return [
            accepted(server.generate(turn.prompt, len(turn.reply.output_ids)))
            for turn in turns_of(conversations)
        ]


@pytest.mark.parametrize(
    ("algorithm", "mode", "hcache", "options"),
    [
        ("NGRAM", "hidden", {}, {}),
        pytest.param("NGRAM", "kv", {}, {}, marks=LONG),
        ("STANDALONE", "kv", {}, {}),
        pytest.param("STANDALONE", "hidden", LAYERWISE, {}, marks=LONG),
        pytest.param("STANDALONE", "kv", LAYERWISE, {}, marks=LONG),
        pytest.param("STANDALONE", "hidden", {}, {}, marks=LONG),
        ("EAGLE", "hidden", {}, {}),
        pytest.param("EAGLE", "kv", {}, {}, marks=LONG),
        pytest.param("EAGLE3", "kv", {}, {}, marks=LONG),
        pytest.param("EAGLE3", "hidden", {}, {}, marks=LONG),
        ("STANDALONE", "kv", {}, {"tp": 2}),
        pytest.param("EAGLE", "hidden", {}, {"tp": 2}, marks=LONG),
    ],
)
def test_l3_changes_neither_tokens_nor_accepted_drafts(
    algorithm: str,
    mode: str,
    hcache: dict[str, Any],
    options: dict[str, Any],
    model_cache: Path,
    tmp_path: Path,
) -> None:
    drafts = drafting(algorithm, model_cache, tmp_path)
    started = ours.our_server(
        drafts.model,
        tmp_path,
        hcache={"mode": mode} | hcache,
        page_size=16,
        extra_args=drafts.arguments,
        **options,
    )
    with Server(started) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        ours.assert_restored_from_l3(conversations, 16)
        ours.assert_sound_own_pages(server, mode)
    started.log = tmp_path / "restarted.log"
    with Server(started) as server:  # nothing of the drafts is on the device by chance
        again = converse(server, make_conversations(2, turns=3, tokens=200), flush=False)
        ours.assert_sound_own_pages(server, mode)
    assert all(turn.cached.storage for turn in turns_of(again))
    ours.assert_no_cache_output(drafts.model, [*conversations, *again])
    found = [accepted(turn.reply) for turn in turns_of(conversations)]
    assert found == drafts_without_a_cache(started, tmp_path, conversations)
    assert found == [accepted(turn.reply) for turn in turns_of(again)]
    assert algorithm in ("NGRAM", "EAGLE3") or sum(sum(turn[1:]) for turn in found) > 10


@pytest.mark.parametrize(
    ("name", "tp", "hcache"),
    [
        ("glm4_moe_lite", 1, {}),
        pytest.param("glm4_moe", 1, {}, marks=LONG),
        pytest.param("glm4_moe_lite", 2, {}, marks=LONG),
        pytest.param("glm4_moe_lite", 1, LAYERWISE, marks=LONG),
    ],
)
def test_draft_layers_behind_the_models_come_back_with_it(
    name: str, tp: int, hcache: dict[str, Any], model_cache: Path, tmp_path: Path
) -> None:
    """Of MTP: their K and V, or latents, are layers of our pages."""
    drafts = drafting(f"MTP {name}", model_cache, tmp_path)
    options = {"page_size": 16, "tp": tp, "extra_args": drafts.arguments}
    started = ours.our_server(drafts.model, tmp_path, hcache={"mode": "auto"} | hcache, **options)
    with Server(started) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        ours.assert_restored_from_l3(conversations, 16)
        ours.assert_sound_own_pages(server, "kv")
    pages = ours.stored_pages(tmp_path)
    started.log = tmp_path / "restarted.log"
    with Server(started) as server:  # nothing of the drafts is on the device by chance
        again = converse(server, make_conversations(2, turns=3, tokens=200), flush=False)
        ours.assert_sound_own_pages(server, "kv")
    assert all(turn.cached.storage for turn in turns_of(again))
    assert ours.stored_pages(tmp_path) == pages
    log = tmp_path / "plain.log"
    with Server(ServerOptions(drafts.model, log, cache="none", **options)) as server:
        for turn, restored in zip(turns_of(conversations), turns_of(again), strict=True):
            want = server.generate(turn.prompt, len(turn.reply.output_ids))
            assert turn.reply.output_ids == restored.reply.output_ids == want.output_ids
            assert accepted(turn.reply) == accepted(restored.reply) == accepted(want)
            assert sum(accepted(want)[1:]) > 2


@pytest.mark.parametrize("mode", ["kv", pytest.param("hidden", marks=LONG)])
def test_encoded_pages_of_a_model_that_drafts(mode: str, model_cache: Path, tmp_path: Path) -> None:
    drafts = drafting("STANDALONE", model_cache, tmp_path)
    options = ours.our_server(
        drafts.model,
        tmp_path,
        hcache={"mode": mode},
        page_size=16,
        dtype="bfloat16",
        extra_args=drafts.arguments,
    )
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=200))
        ours.assert_restored_from_l3(conversations, 16)
        ours.assert_sound_own_pages(server, mode)
        assert "codec exp4" in server.log_text()
    ours.assert_no_cache_output_up_to_ties(drafts.model, tmp_path, conversations)

    def drafts_taken(turns: list[list[int]]) -> int:
        return sum(number * count for counts in turns for number, count in enumerate(counts))

    # A prefill behind a hit rounds otherwise than one of the whole prompt, so drafts may differ.
    found = drafts_taken([accepted(turn.reply) for turn in turns_of(conversations)])
    assert found >= 0.9 * drafts_taken(drafts_without_a_cache(options, tmp_path, conversations))


@pytest.mark.parametrize("hcache", [LAYERWISE, {}], ids=["layer-wise", "front"])
def test_lost_and_damaged_pages_of_a_draft_cost_no_token(
    hcache: dict[str, Any], model_cache: Path, tmp_path: Path
) -> None:
    """Read in order, the hit ends before such a page, as with SGLang's own backends. Behind a
    front, fewer drafts are accepted. Neither costs a token."""
    drafts = drafting("STANDALONE", model_cache, tmp_path)
    options = ours.our_server(
        drafts.model,
        tmp_path,
        hcache={"mode": "kv"} | hcache,
        page_size=16,
        extra_args=drafts.arguments,
    )
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
    ours.assert_no_cache_output(drafts.model, again)


@pytest.mark.parametrize("algorithm", ["EAGLE", "MTP glm4_moe_lite"])
def test_pages_of_another_draft_are_not_taken_for_those_of_this_one(
    algorithm: str, model_cache: Path, tmp_path: Path
) -> None:
    """Its K and V would be wrong ones, and next to no draft accepted."""
    for seed in (0, 1, 0):
        drafts = drafting(algorithm, model_cache, tmp_path, seed=seed)
        options = ours.our_server(
            drafts.model,
            tmp_path,
            log=tmp_path / f"{seed}.log",
            hcache={"mode": "kv", "recompute": "never"},
            page_size=16,
            extra_args=drafts.arguments,
        )
        before = len(ours.stored_pages(tmp_path)) * (1 if algorithm == "EAGLE" else 2)  # of pages
        with Server(options) as server:
            [conversation] = converse(server, make_conversations(1, turns=1, tokens=200))  # flushed
            ours.assert_nothing_went_wrong(server)
        storage = conversation.turns[0].cached.storage
        assert storage == (192 if before > 20 and seed == 0 else 0)
