"""Tensor-parallel ranks that each hold a share of every page's tokens (paper section 5)."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness.conversations import Conversation, converse, make_conversations
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_no_cache_reply_up_to_ties,
    assert_nothing_went_wrong,
    assert_restored_from_l3,
    faulty,
    our_server,
    stored_pages,
)

pytestmark = pytest.mark.engine

REQUESTS = int(os.environ.get("HCACHE_TEST_RANK_REQUESTS", "200"))
WATCHDOG = ("--watchdog-timeout", "240")


def converse_in_turns(servers: Sequence[Server], conversations: list[Conversation]) -> None:
    """One turn of all conversations on each of ``servers``, one server after the other."""
    rest = [conversation.questions for conversation in conversations]
    for number, server in enumerate(servers, 1):
        for conversation, questions in zip(conversations, rest, strict=True):
            conversation.questions = questions[:number]
        with server:
            converse(server, conversations)
            assert_hidden_mode(server)
            assert_nothing_went_wrong(server)


def shares(folder: Path) -> dict[str, list[Path]]:
    """The page files by share, as ``1of2``."""
    found: dict[str, list[Path]] = {}
    for path in stored_pages(folder):
        found.setdefault(path.name.split(".")[-2], []).append(path)
    return found


def size(paths: Sequence[Path]) -> int:
    """Bytes of files."""
    return sum(path.stat().st_size for path in paths)


@pytest.mark.versions
def test_each_rank_stores_half_and_any_number_of_ranks_reads_it(
    model: Path, tmp_path: Path
) -> None:
    """What one rank wrote two read, and back, and what two wrote one reads."""
    conversations = make_conversations(2, turns=4, tokens=200)
    logs = (tmp_path / f"{turn}.log" for turn in range(4))
    servers = [
        Server(our_server(model, tmp_path, tp=tp, log=log))
        for tp, log in zip((1, 2, 1, 2), logs, strict=True)
    ]
    converse_in_turns(servers, conversations)
    assert_restored_from_l3(conversations, 64)
    found = shares(tmp_path)
    assert sorted(found) == ["0of1", "0of2", "1of2"]
    assert len(found["0of2"]) == len(found["1of2"]) > 0
    names = [{path.name.split(".")[1] for path in paths} for paths in found.values()]
    assert not names[0] & names[1]  # nothing was stored a second time
    whole = size(found["0of1"]) / len(found["0of1"])
    headers = 2 * 4096  # of the file, and of the page
    for share in ("0of2", "1of2"):
        half = size(found[share]) / len(found[share])
        assert half - headers == (whole - headers) / 2
    assert_no_cache_output(model, conversations)


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "opt"])
def test_two_ranks_with_other_models(family: str, model_cache: Path, tmp_path: Path) -> None:
    """Grouped queries, norms over the heads of all ranks, biases and learned positions."""
    model = build_model(family, model_cache)
    with Server(our_server(model, tmp_path, tp=2, page_size=16)) as server:
        conversations = converse(server, make_conversations(2, turns=3, tokens=150))
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 16)
    assert {"0of2", "1of2"} == set(shares(tmp_path))
    assert_no_cache_output(model, conversations)


def test_a_share_that_is_gone_or_damaged_is_a_miss_on_all_ranks(
    model: Path, tmp_path: Path
) -> None:
    with Server(our_server(model, tmp_path, tp=2, extra_args=WATCHDOG)) as server:
        lost, damaged = make_conversations(2, turns=3, tokens=300)
        rest = [[c.questions.pop()] for c in (lost, damaged)]
        converse(server, [lost])
        before = set(stored_pages(tmp_path))
        converse(server, [damaged])
        for path in before & set(shares(tmp_path)["1of2"]):
            path.unlink()
        for path in set(shares(tmp_path)["0of2"]) - before:
            data = bytearray(path.read_bytes())
            data[-1000] ^= 1
            path.write_bytes(data)
        for conversation, questions in zip((lost, damaged), rest, strict=True):
            conversation.questions += questions
        converse(server, [lost, damaged])
        assert [c.turns[2].cached.storage for c in (lost, damaged)] == [0, 0]
        # Both ranks have stored what was missing once more.
        again = [Conversation([[*c.history, 1, 2, 3]]) for c in (lost, damaged)]
        converse(server, again)
        assert all(c.turns[0].cached.storage > 800 for c in again)
        assert_hidden_mode(server)
    assert_no_cache_output(model, [lost, damaged, *again])


@pytest.mark.parametrize("name", ["recompute", "mixed"])
def test_first_layers_are_recomputed_by_all_ranks_together(
    name: str, model: Path, tmp_path: Path
) -> None:
    partition = {
        "recompute": {"recompute": 1, "hidden": 3, "kv": 0},
        "mixed": {"recompute": 1, "hidden": 2, "kv": 1},
    }[name]
    options = our_server(
        model, tmp_path, tp=2, hcache={"partition": partition}, max_total_tokens=2048
    )
    with Server(options) as server:
        conversations = make_conversations(3, turns=3, tokens=200)
        converse(server, conversations, concurrent=True)
        assert_hidden_mode(server)
        assert "layers are not recomputed" not in server.log_text()
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    # K and V of a rank's own heads are nobody else's: pages that hold some are not shares.
    assert set(shares(tmp_path)) == ({"0of2", "1of2"} if name == "recompute" else {"0of1"})
    assert_no_cache_output(model, conversations)


def test_shares_pass_through_a_backend_that_is_not_ours(model: Path, tmp_path: Path) -> None:
    options = our_server(model, tmp_path, tp=2)
    options.storage_backend = "file"
    options.extra_config = {"prefetch_threshold": 16}
    options.extra_env = {
        "HCACHE_ENABLE": "1",
        "HCACHE_CONFIG": '{"mode": "hidden", "check_every_pages": 1}',
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "file"),
    }
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=3))
        assert_hidden_mode(server)
        assert_nothing_went_wrong(server)
    assert_restored_from_l3(conversations, 64)
    assert_no_cache_output(model, conversations)


def test_random_misses_on_one_rank_never_part_the_ranks(model: Path, tmp_path: Path) -> None:
    """Every request is answered as without a cache, whatever the second rank lacks; none hangs."""
    options = our_server(
        model,
        tmp_path,
        tp=2,
        page_size=16,
        max_total_tokens=2048,
        hicache_ratio=4.0,
        extra_args=WATCHDOG,
        extra_env=faulty("misses_on_rank_1"),
    )
    dice = random.Random(1)
    conversations = make_conversations(10, turns=REQUESTS // 10, tokens=30)
    with Server(options) as server:
        served, cached = 0, 0
        while served < REQUESTS:
            waiting = [c for c in conversations if len(c.turns) < len(c.questions)]
            chosen = dice.sample(waiting, min(len(waiting), dice.randint(1, 5)))
            prompts = [conversation.next_prompt() for conversation in chosen]
            replies = server.generate_many(prompts, 4)
            for conversation, prompt, reply in zip(chosen, prompts, replies, strict=True):
                conversation.add(prompt, reply)
                cached += reply.cached.storage + reply.cached.host
            served += len(chosen)
            if dice.random() < 0.3:
                server.flush_cache()
        assert cached > 20 * REQUESTS  # or this would be a test of recomputation only
        assert_hidden_mode(server)
        log = server.log_text()
        assert "self-check" not in log and "Exception in thread" not in log
    for conversation in conversations:
        for turn in conversation.turns:
            assert_no_cache_reply_up_to_ties(model, turn)
