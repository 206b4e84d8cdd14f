"""Attempts to make the server use windows and states that are not those of the sequence.

A page beside the full-attention layers (a sliding window, a recurrent state) says whose it is, as
all pages of the store do. Without it a hit ends where both are whole.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model, replace_weights
from bench.harness.server import CachedTokens, Server, ServerOptions
from hcache_backend.cli.main import app
from hcache_backend.format.envelope import parse_name
from tests.engine.harness.conversations import Conversation, ask, converse, make_conversations
from tests.engine.harness.ours import assert_own_pages_of_kv, flip_bit, our_server, stored_pages
from tests.engine.harness.reference import assert_equal_tokens

pytestmark = pytest.mark.engine

PAGE = 16


@dataclass
class Class:
    """A class of models. ``boundary``: a hit ends at its multiples."""

    model: str
    boundary: int
    env: dict[str, str] = field(default_factory=dict)


WINDOWS = Class("gpt_oss", PAGE)
STATES = Class("qwen3_next", 64, {"SGLANG_MAMBA_CONV_DTYPE": "float32"})
CLASSES = pytest.mark.parametrize("one", [WINDOWS, STATES], ids=lambda one: one.model)


def options(
    one: Class,
    model: Path,
    folder: Path,
    number: int,
    hcache: dict[str, Any] | None = None,
    **more: Any,
) -> ServerOptions:
    how: dict[str, Any] = {"page_size": PAGE, "extra_env": one.env} | more
    return our_server(
        model,
        folder,
        hcache={"mode": "auto", "state_tokens": 0} | (hcache or {}),
        log=folder / f"{number}.log",
        **how,
    )


def said(server: Server, prompts: Sequence[list[int]]) -> list[Conversation]:
    """Replies to prompts; L1 and L2 are empty at each."""
    found: list[Conversation] = []
    for prompt in prompts:
        server.flush_cache()
        found += ask(server, [prompt])
    return found


def assert_right(
    one: Class, model: Path, folder: Path, asked: Sequence[Conversation], tp: int = 1
) -> None:
    plain = ServerOptions(
        model, folder / "plain.log", cache="none", page_size=PAGE, extra_env=one.env, tp=tp
    )
    with Server(plain) as server:
        for turn in (turn for conversation in asked for turn in conversation.turns):
            want = server.generate(turn.prompt, len(turn.reply.output_ids))
            assert want.cached == CachedTokens(0, 0, 0)
            assert_equal_tokens(turn.reply.output_ids, want.output_ids)


def namespace(path: Path) -> str:
    return path.name.split(".")[0]


def sides(folder: Path) -> list[Path]:
    """Files beside those of the full-attention layers, of which there are more, oldest first."""
    namespaces = Counter(map(namespace, stored_pages(folder)))
    [(full, _), *_] = namespaces.most_common()
    files = [path for path in stored_pages(folder) if not path.name.startswith(full)]
    assert 0 < len(files) < namespaces[full]
    assert all(parse_name(path.name) for path in files)
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


@CLASSES
def test_sides_of_other_sequences_and_damaged_ones_are_never_used(
    one: Class, model_cache: Path, tmp_path: Path
) -> None:
    """Files change names between two conversations, then bits change. Each time the next turn
    computes what it lacks, and the turn behind it finds that."""
    model = build_model(one.model, model_cache)
    conversations = make_conversations(2, turns=6, tokens=200)
    with Server(options(one, model, tmp_path, 0)) as server:
        converse(server, conversations, turns=2)
        assert_own_pages_of_kv(server)

    def swap() -> None:
        files = sides(tmp_path)
        contents = [path.read_bytes() for path in files]
        for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
            path.write_bytes(content)

    def flip() -> None:
        damaged(tmp_path, sides(tmp_path))

    for number, damage in enumerate((swap, flip), 1):
        damage()
        with Server(options(one, model, tmp_path, number)) as server:
            converse(server, conversations, turns=2 + 2 * number)
            assert_own_pages_of_kv(server)
        for conversation in conversations:
            lost, found = conversation.turns[-2:]
            assert lost.cached.storage == 0
            assert found.history_tokens - found.cached.storage <= one.boundary + PAGE
    assert_right(one, model, tmp_path, conversations)


def gone(folder: Path, files: Iterable[Path]) -> None:
    """The index knows that they are gone."""
    unlinked(folder, files)
    CliRunner().invoke(app, ["verify", "--repair", "--dir", str(folder / "l3")])


def unlinked(_: Path, files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()


def damaged(_: Path, files: Iterable[Path]) -> None:
    for path in files:
        flip_bit(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("one", "lose", "ranks"),
    [
        (WINDOWS, damaged, 1),
        (WINDOWS, unlinked, 1),
        (STATES, gone, 1),
        *(
            pytest.param(one, lose, ranks, marks=pytest.mark.long)
            for one, lose, ranks in (
                *((WINDOWS, gone, 1), (STATES, damaged, 1), (STATES, unlinked, 1)),
                *((one, lose, 2) for one in (WINDOWS, STATES) for lose in (gone, damaged)),
            )
        ),
    ],
    ids=lambda it: getattr(it, "model", None) or getattr(it, "__name__", it),
)
def test_a_hit_ends_where_all_pools_have_their_part(
    one: Class,
    lose: Callable[[Path, Iterable[Path]], None],
    ranks: int,
    model_cache: Path,
    tmp_path: Path,
) -> None:
    """The sides of the last two turns are lost, with two ranks those of either of them: a request
    to a fresh server finds the turn before, and the next one what it has computed."""
    model = build_model(one.model, model_cache)
    [conversation] = make_conversations(1, turns=3, tokens=200)
    first, *others = conversation.questions
    conversation.questions[:] = [first]
    with Server(options(one, model, tmp_path, 0, tp=ranks)) as server:
        converse(server, [conversation])
        older = set(sides(tmp_path))
        conversation.questions += others
        converse(server, [conversation])
    whole = conversation.turns[2].prompt
    lost = set(sides(tmp_path)) - older
    of_ranks = sorted(set(map(namespace, lost)))
    assert len(of_ranks) == ranks
    either = of_ranks[0 if lose is gone else -1]
    lose(tmp_path, [path for path in lost if namespace(path) == either])
    with Server(options(one, model, tmp_path, 1, tp=ranks)) as server:
        again = said(server, [whole, whole])
    shorter, longer = (asked.turns[0].cached.storage for asked in again)
    assert shorter % one.boundary == longer % one.boundary == 0
    assert 0 <= len(conversation.turns[0].prompt) + 16 - shorter <= one.boundary + PAGE
    assert len(whole) - longer <= one.boundary + PAGE
    assert_right(one, model, tmp_path, [conversation, *again], tp=ranks)


@pytest.mark.parametrize(
    "one", [pytest.param(WINDOWS, marks=pytest.mark.long), STATES], ids=lambda one: one.model
)
def test_a_full_store_keeps_what_was_used_last_with_its_sides(
    one: Class, model_cache: Path, tmp_path: Path
) -> None:
    """Two of four conversations have room. A hit needs pages and sides of the same conversation."""
    model = build_model(one.model, model_cache)
    with Server(options(one, model, tmp_path, 0)) as server:
        converse(server, make_conversations(4, turns=2, tokens=300))
    quota = sum(path.stat().st_size for path in stored_pages(tmp_path)) // 2
    small = tmp_path / "small"
    with Server(options(one, model, small, 1, {"quota_bytes": quota})) as server:
        asked = [converse(server, [talk])[0] for talk in make_conversations(4, 2, tokens=300)]
        again = said(server, [talk.turns[1].prompt for talk in reversed(asked)])
        assert_own_pages_of_kv(server)
    assert sum(path.stat().st_size for path in stored_pages(small)) <= quota
    newest, *_, oldest = (talk.turns[0] for talk in again)
    assert len(newest.prompt) - newest.cached.storage <= one.boundary + PAGE
    assert oldest.cached.storage < len(oldest.prompt) - one.boundary - PAGE
    assert_right(one, model, tmp_path, [*asked, *again])


@pytest.mark.long
def test_conversations_go_on_while_pages_and_windows_are_evicted(
    model_cache: Path, tmp_path: Path
) -> None:
    """Four conversations take turns. There is room for two fifths of what they write."""
    model, small = build_model(WINDOWS.model, model_cache), tmp_path / "small"
    with Server(options(WINDOWS, model, tmp_path, 0)) as server:
        converse(server, make_conversations(4, turns=3, tokens=200))
    everything, all_sides = stored_pages(tmp_path), sides(tmp_path)
    quota = sum(path.stat().st_size for path in everything) * 2 // 5
    with Server(options(WINDOWS, model, small, 1, {"quota_bytes": quota})) as server:
        asked = converse(server, make_conversations(4, turns=3, tokens=200))
        assert_own_pages_of_kv(server)
    kept, kept_sides = stored_pages(small), sides(small)
    assert sum(path.stat().st_size for path in kept) <= quota
    assert len(kept_sides) < len(all_sides)
    assert len(kept) - len(kept_sides) < len(everything) - len(all_sides)
    turns = [turn for talk in asked for turn in talk.turns[1:]]
    lost = [turn.history_tokens - turn.cached.storage > WINDOWS.boundary + PAGE for turn in turns]
    assert any(lost) and not all(lost)
    assert_right(WINDOWS, model, tmp_path, asked)


@CLASSES
def test_another_checkpoint_finds_neither_pages_nor_sides(
    one: Class, model_cache: Path, tmp_path: Path
) -> None:
    models = [build_model(one.model, model_cache, seed=seed) for seed in (0, 1)]
    served = tmp_path / "model"
    shutil.copytree(models[0], served)
    for number, model in enumerate(models):
        replace_weights(served, model)
        with Server(options(one, served, tmp_path, number)) as server:
            talk = converse(server, make_conversations(1, turns=2, tokens=200))
        assert talk[0].turns[0].cached.storage == 0
        assert talk[0].turns[1].cached.storage > 0
        assert_right(one, model, tmp_path, talk)
