"""Tensor-parallel ranks that each hold a shard of every page's tokens (paper section 5)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness.models import build_model
from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    converse,
    converse_at_random,
    make_conversations,
    turns_of,
)

pytestmark = pytest.mark.engine

LONG = pytest.mark.long


def shards(folder: Path) -> dict[str, list[Path]]:
    """The page files by shard, as ``1of2``."""
    found: dict[str, list[Path]] = {}
    for path in ours.stored_pages(folder):
        found.setdefault(path.name.split(".")[-2], []).append(path)
    return found


def size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize(
    ("name", "layers", "ranks"),
    [
        pytest.param("llama", (0, 4, 0), (1, 2, 1), id="hidden", marks=LONG),
        pytest.param("llama", (0, 0, 4), (1, 2, 1), id="K and V", marks=LONG),
        pytest.param("llama", (0, 2, 2), (1, 2, 1), id="mixed", marks=pytest.mark.versions),
        pytest.param("deepseek", (0, 0, 4), (2, 1), id="latents"),
        pytest.param("deepseek", (0, 0, 4), (1, 4, 2), id="latents of 4", marks=LONG),
    ],
)
def test_each_rank_stores_its_part_and_any_number_of_ranks_reads_it(
    name: str,
    layers: tuple[int, int, int],
    ranks: tuple[int, ...],
    model_cache: Path,
    tmp_path: Path,
) -> None:
    """Each server reads pages that another number of ``ranks`` wrote. The heads of K and V are as
    many groups as ``tp_lcm_size`` says. Hidden states and latents are divided by tokens."""
    model = build_model(name, model_cache)
    conversations = make_conversations(2, turns=len(ranks), tokens=200)
    config = ours.extra_config(tmp_path, partition=ours.partition(*layers)) | {
        "tp_lcm_size": max(ranks)
    }
    for turn, tp in enumerate(ranks, 1):
        options = ours.our_server(model, tmp_path, tp=tp, log=tmp_path / f"{turn}.log")
        with Server(replace(options, extra_config=config)) as server:
            converse(server, conversations, turns=turn)
            ours.assert_sound_own_pages(server, "hidden" if layers[1] else "kv")
            if layers[1]:
                rows = 512 // tp  # of K and V of a rank
                by_spec = f"4 layers by spec (fused weight {rows}x256, RoPE neox 64)"
                assert ours.projections(server) == [by_spec] * tp
    ours.assert_restored_from_l3(conversations, 64)
    found = shards(tmp_path)
    assert set(found) == {f"{number}of{tp}" for tp in ranks for number in range(tp)}
    stored, headers = set[str](), 2 * 4096  # of the file, and of the page
    whole = size(found["0of1"]) / len(found["0of1"]) - headers
    for tp in set(ranks):
        shards_of_tp = [found[f"{number}of{tp}"] for number in range(tp)]
        names = [{path.name.split(".")[1] for path in paths} for paths in shards_of_tp]
        assert names == [names[0]] * tp
        assert not names[0] & stored  # nothing was stored a second time
        stored |= names[0]
        for paths in shards_of_tp:
            assert size(paths) / len(paths) - headers == whole / tp
    ours.assert_no_cache_output(model, conversations)


@pytest.mark.parametrize("requests", [60, pytest.param(200, marks=LONG)])
def test_random_misses_on_one_rank_never_part_the_ranks(
    requests: int, model: Path, tmp_path: Path
) -> None:
    """Every request is answered as without a cache, whatever the second rank lacks; none hangs."""
    options = ours.our_server(
        model,
        tmp_path,
        tp=2,
        page_size=16,
        max_total_tokens=2048,
        hicache_ratio=4.0,
        extra_args=("--watchdog-timeout", "240"),
        extra_env=ours.faulty("misses_on_rank_1"),
    )
    conversations = make_conversations(10, turns=requests // 10, tokens=30)
    with Server(options) as server:
        converse_at_random(server, conversations, at_once=5, flushed=0.3)
        turns = turns_of(conversations)
        cached = sum(turn.cached.storage + turn.cached.host for turn in turns)
        assert len(turns) == requests
        assert cached > 5 * requests  # far fewer than usual (20): how many depends on who is faster
        ours.assert_hidden_mode(server)
        log = server.log_text()
        assert "self-check" not in log and "Exception in thread" not in log
    ours.assert_no_cache_replies_up_to_ties(model, turns)
