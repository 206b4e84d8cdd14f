"""Attempts to make the server use pages that are damaged, misplaced, or of another model."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.harness.models import build_model, replace_weights
from bench.harness.server import Server
from tests.engine.harness.conversations import Conversation, ask, converse, make_conversations
from tests.engine.harness.ours import (
    assert_hidden_mode,
    assert_no_cache_output,
    assert_own_pages_of_kv,
    assert_restored_from_l3,
    faulty,
    flip_bit,
    our_server,
    projections,
    stored_pages,
)

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l3")


@pytest.fixture(scope="module", params=["hidden", "kv"])
def server(model: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    log = folder / f"{request.param}.log"
    options = {"mode": request.param, "recompute": "never"}  # else not every page is read
    with Server(our_server(model, folder, hcache=options, log=log)) as server:
        yield server
        if request.param == "hidden":
            assert_hidden_mode(server)
        else:
            assert_own_pages_of_kv(server)


def flip_a_byte(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        flip_bit(page, rng.randrange(page.stat().st_size), rng.randrange(8))


def flip_a_header_byte(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        flip_bit(page, rng.randrange(88), rng.randrange(8))


def truncate(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        with page.open("r+b") as file:
            file.truncate(rng.randrange(page.stat().st_size))


def empty(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        page.write_bytes(b"")


def swap(pages: list[Path], rng: random.Random) -> None:
    contents = [page.read_bytes() for page in pages]
    for page, content in zip(pages, [*contents[1:], contents[0]], strict=True):
        page.write_bytes(content)


DAMAGES: list[Callable[[list[Path], random.Random], None]] = [
    flip_a_byte,
    flip_a_header_byte,
    truncate,
    empty,
    swap,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_pages_are_misses(
    damage: Callable[[list[Path], random.Random], None], server: Server, model: Path, folder: Path
) -> None:
    before = set(stored_pages(folder))
    (conversation,) = make_conversations(1, turns=3, tokens=400, seed=DAMAGES.index(damage))
    converse(server, [conversation], turns=2)
    assert_restored_from_l3([conversation], 64)
    pages = [page for page in stored_pages(folder) if page not in before]
    assert len(pages) >= 12
    damage(pages, random.Random(1))
    converse(server, [conversation])
    assert conversation.turns[2].cached.storage == 0
    # What was damaged has been written again by that turn, and serves.
    (again,) = ask(server, [conversation.turns[2].prompt])
    assert again.turns[0].cached.storage >= len(again.turns[0].prompt) - 64
    assert_no_cache_output(model, [conversation, again])


def test_pages_of_other_weights_or_another_dtype_are_misses_after_a_restart(
    model: Path, model_cache: Path, tmp_path: Path
) -> None:
    served = tmp_path / "model"
    shutil.copytree(model, served)

    def prompts_from_l3(log: str, dtype: str = "float32") -> list[Conversation]:
        options = our_server(served, tmp_path, dtype=dtype, log=tmp_path / log)
        with Server(options) as server:
            conversations = converse(server, make_conversations(2, turns=1, tokens=400))
            assert_hidden_mode(server)
            server.kill()  # SIGKILL: what was acknowledged must be whole all the same
        return conversations

    first = prompts_from_l3("first.log")
    assert all(c.turns[0].cached.storage == 0 for c in first)
    restarted = prompts_from_l3("restarted.log")
    assert all(c.turns[0].cached.storage == 384 for c in restarted)
    bfloat16 = prompts_from_l3("bfloat16.log", "bfloat16")
    assert all(c.turns[0].cached.storage == 0 for c in bfloat16)
    assert_no_cache_output(served, [*first, *restarted])

    other = build_model("llama", model_cache, seed=1)
    replace_weights(served, other)
    replaced = prompts_from_l3("replaced.log")
    assert all(c.turns[0].cached.storage == 0 for c in replaced)
    assert_no_cache_output(other, replaced)


@pytest.mark.versions
def test_weights_that_arrive_after_load_model_are_the_namespace(
    model: Path, model_cache: Path, tmp_path: Path
) -> None:
    """Two checkpoints of one architecture never find each other's pages."""
    models = [model, build_model("llama", model_cache, seed=1)]

    def from_l3(number: int, log: str) -> list[int]:
        options = our_server(
            models[number], tmp_path, log=tmp_path / log, extra_env=faulty("weights_late")
        )
        with Server(options) as server:
            conversations = converse(server, make_conversations(2, turns=1, tokens=400))
            assert_hidden_mode(server)
        assert_no_cache_output(models[number], conversations)
        return [conversation.turns[0].cached.storage for conversation in conversations]

    assert from_l3(0, "first.log") == [0, 0]
    assert from_l3(1, "second.log") == [0, 0]
    assert from_l3(0, "again.log") == [384, 384]


@pytest.mark.versions
def test_weights_updated_in_service_are_another_namespace(
    server: Server, model: Path, model_cache: Path
) -> None:
    other = build_model("llama", model_cache, seed=1)

    def turn() -> Conversation:
        return converse(server, make_conversations(1, turns=1, tokens=400, seed=90))[0]

    first = turn()
    server.update_weights_from_disk(other)
    under_other = [turn(), turn()]
    server.update_weights_from_disk(model)
    back = turn()
    assert [c.turns[0].cached.storage for c in under_other] == [0, 384]
    assert back.turns[0].cached.storage == 384  # what these weights wrote before
    if "hidden mode" in server.log_text():
        by_spec = "4 layers by spec (fused weight 512x256, RoPE neox 64)"
        assert projections(server) == 3 * [by_spec]  # proven again for each weights
    assert_no_cache_output(model, [first, back])
    assert_no_cache_output(other, under_other)
