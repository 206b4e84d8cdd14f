"""Attempts to make the server use pages that are damaged, misplaced, or of another model."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.harness.models import build_model, replace_weights
from bench.harness.server import Server
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, ask, converse, make_conversations

pytestmark = pytest.mark.engine

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("l3")


@pytest.fixture(scope="module", params=["hidden", "kv", pytest.param("latents", marks=LONG)])
def server(model_cache: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    log, latents = folder / f"{request.param}.log", request.param == "latents"
    model = build_model("deepseek" if latents else "llama", model_cache)
    mode = "auto" if latents else request.param
    options = {"mode": mode, "recompute": "never"}  # else not every page is read
    with Server(ours.our_server(model, folder, hcache=options, log=log)) as server:
        yield server
        if mode == "hidden":
            ours.assert_hidden_mode(server)
        else:
            ours.assert_own_pages_of_kv(server)


def flip_a_byte(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        ours.flip_bit(page, rng.randrange(page.stat().st_size), rng.randrange(8))


def flip_a_header_byte(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        ours.flip_bit(page, rng.randrange(88), rng.randrange(8))


def truncate(pages: list[Path], rng: random.Random) -> None:
    for page in pages:
        os.truncate(page, rng.randrange(page.stat().st_size))


def swap(pages: list[Path], rng: random.Random) -> None:
    contents = [page.read_bytes() for page in pages]
    for page, content in zip(pages, [*contents[1:], contents[0]], strict=True):
        page.write_bytes(content)


Damage = Callable[[list[Path], random.Random], None]
DAMAGES: list[Damage] = [flip_a_byte, flip_a_header_byte, truncate, swap]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_pages_are_misses(damage: Damage, server: Server, folder: Path) -> None:
    before = set(ours.stored_pages(folder))
    (conversation,) = make_conversations(1, turns=3, tokens=200, seed=DAMAGES.index(damage))
    converse(server, [conversation], turns=2)
    pages = [page for page in ours.stored_pages(folder) if page not in before]
    assert len(pages) >= 6
    damage(pages, random.Random(1))
    converse(server, [conversation])
    assert conversation.turns[2].cached.storage == 0
    # What was damaged has been written again by that turn, and serves.
    (again,) = ask(server, [conversation.turns[2].prompt])
    assert again.turns[0].cached.storage >= len(again.turns[0].prompt) - 64
    ours.assert_no_cache_output(Path(server.options.model), [conversation, again])


@pytest.mark.parametrize(
    "late", [False, pytest.param(True, marks=pytest.mark.versions)], ids=["loaded", "late"]
)
def test_pages_of_other_weights_or_another_dtype_are_misses_after_a_restart(
    late: bool, model: Path, model_cache: Path, tmp_path: Path
) -> None:
    """Also if weights arrive after ``load_model``: two checkpoints of one architecture never find
    each other's pages."""
    served, other = tmp_path / "model", build_model("llama", model_cache, seed=1)
    shutil.copytree(model, served)
    starts = [(model, "float32", 0), (model, "float32", 384), (other, "float32", 0)]
    starts += [] if late else [(model, "bfloat16", 0)]
    for number, (weights, dtype, found) in enumerate(starts):
        replace_weights(served, weights)
        env = ours.faulty("weights_late") if late else {}
        log = tmp_path / f"{number}.log"
        with Server(
            ours.our_server(served, tmp_path, dtype=dtype, log=log, extra_env=env)
        ) as server:
            conversations = converse(server, make_conversations(1, turns=1, tokens=400))
            ours.assert_hidden_mode(server)
            server.kill()  # SIGKILL: what was acknowledged must be whole all the same
        assert conversations[0].turns[0].cached.storage == found
        if dtype == "float32":
            ours.assert_no_cache_output(served, conversations)


@pytest.mark.versions
def test_weights_updated_in_service_are_another_namespace(
    server: Server, model_cache: Path
) -> None:
    model = Path(server.options.model)
    other = build_model(model.name.rpartition("-")[0], model_cache, seed=1)

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
        assert ours.projections(server) == 3 * [by_spec]  # proven again for each weights
    ours.assert_no_cache_output(model, [first, back])
    ours.assert_no_cache_output(other, under_other)
