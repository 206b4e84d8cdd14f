"""Attempts to make the server use windows and states that are not those of the sequence.

A page beside the full-attention layers (a sliding window, a recurrent state) says whose it is, as
all pages of the store do. Without it a hit ends where both are whole.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model, replace_weights
from bench.harness.server import CachedTokens, Server, ServerOptions
from hcache_backend.cli.main import app
from hcache_backend.format.envelope import parse_name
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.reference import assert_equal_tokens

pytestmark = pytest.mark.engine

PAGE = 16
LONG = pytest.mark.long


@dataclass(frozen=True)
class Class:
    """A class of models. ``boundary``: a hit ends at its multiples."""

    model: str
    boundary: int
    env: dict[str, str] = field(default_factory=dict)

    def found_all(self, conversation: Conversation) -> bool:
        """Whether the hit of the last turn ended where the history did."""
        turn = conversation.turns[-1]
        return turn.history_tokens - turn.cached.storage <= self.boundary + PAGE


WINDOWS = Class("gpt_oss", PAGE)
STATES = Class("qwen3_next", 64, {"SGLANG_MAMBA_CONV_DTYPE": "float32"})
CLASSES = pytest.mark.parametrize("one", [WINDOWS, STATES], ids=lambda one: one.model)
Check = Callable[..., None]


@pytest.fixture(scope="module")
def assert_right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Check]:
    """Asserts that replies of a model are those of a server without a cache, one for all tests."""
    running: dict[tuple[str, int], Server] = {}
    with ExitStack() as stack:

        def check(one: Class, model: Path, asked: Sequence[Conversation], tp: int = 1) -> None:
            if (one.model, tp) not in running:
                log = tmp_path_factory.mktemp(one.model) / "plain.log"
                plain = ServerOptions(
                    model, log, cache="none", page_size=PAGE, extra_env=one.env, tp=tp
                )
                running[one.model, tp] = stack.enter_context(Server(plain))
            server = running[one.model, tp]
            server.flush_cache(300)  # in the turn of a reply SGLang refuses to flush at the update
            server.update_weights_from_disk(model)
            for turn in turns_of(asked):
                want = server.generate(turn.prompt, len(turn.reply.output_ids))
                assert want.cached == CachedTokens(0, 0, 0)
                assert_equal_tokens(turn.reply.output_ids, want.output_ids)

        yield check


def options(one: Class, model: Path, folder: Path, number: int = 0, **more: Any) -> ServerOptions:
    return ours.our_server(
        model,
        folder,
        hcache={"mode": "auto", "state_tokens": 0},
        log=folder / f"{number}.log",
        page_size=PAGE,
        extra_env=one.env,
        **more,
    )


def namespace(path: Path) -> str:
    return path.name.split(".")[0]


def sides(folder: Path) -> list[Path]:
    """Files beside those of the full-attention layers, of which there are more, oldest first."""
    namespaces = Counter(map(namespace, ours.stored_pages(folder)))
    [(full, _), *_] = namespaces.most_common()
    files = [path for path in ours.stored_pages(folder) if not path.name.startswith(full)]
    assert 0 < len(files) < namespaces[full]
    assert all(parse_name(path.name) for path in files)
    return sorted(files, key=lambda path: path.stat().st_mtime_ns)


def swapped(_: Path, files: Sequence[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


def damaged(_: Path, files: Iterable[Path]) -> None:
    for path in files:
        ours.flip_bit(path, path.stat().st_size // 2)


def unlinked(_: Path, files: Iterable[Path]) -> None:
    for path in files:
        path.unlink()


def gone(folder: Path, files: Iterable[Path]) -> None:
    """The index knows that they are gone."""
    unlinked(folder, files)
    CliRunner().invoke(app, ["verify", "--repair", "--dir", str(folder / "l3")])


@CLASSES
def test_sides_of_other_sequences_damaged_ones_and_those_of_another_checkpoint_are_never_used(
    one: Class, assert_right: Check, model_cache: Path, tmp_path: Path
) -> None:
    """Files change names between two conversations, then bits change, then the weights. Each time
    the next turn computes what it lacks, and the turn behind it finds that."""
    models = [build_model(one.model, model_cache, seed=seed) for seed in (0, 1)]
    served = tmp_path / "model"
    shutil.copytree(models[0], served)

    def assert_next_turn_is_computed(server: Server, asked: Sequence[Conversation]) -> None:
        for found in (False, True):
            converse(server, asked, turns=len(asked[0].turns) + 1)
            assert [c.turns[-1].cached.storage > 0 for c in asked] == [found] * len(asked)
        assert all(map(one.found_all, asked))
        ours.assert_own_pages_of_kv(server)

    old, new = (make_conversations(2, turns=turns, tokens=200) for turns in (6, 2))
    with Server(options(one, served, tmp_path)) as server:
        converse(server, old, turns=2)
        for damage in (swapped, damaged):
            damage(tmp_path, sides(tmp_path))
            assert_next_turn_is_computed(server, old)
    replace_weights(served, models[1])
    with Server(options(one, served, tmp_path, 1)) as server:
        assert_next_turn_is_computed(server, new)
    for model, asked in zip(models, (old, new), strict=True):
        assert_right(one, model, asked)


@pytest.mark.parametrize(
    ("one", "lose", "ranks"),
    [
        (WINDOWS, unlinked, 1),
        (STATES, gone, 1),
        *(
            pytest.param(one, lose, ranks, marks=LONG)
            for one, lose, ranks in (
                *((WINDOWS, gone, 1), (WINDOWS, damaged, 1)),
                *((STATES, damaged, 1), (STATES, unlinked, 1)),
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
    assert_right: Check,
    model_cache: Path,
    tmp_path: Path,
) -> None:
    """The sides of the last two turns are lost, with two ranks those of either of them: a request
    to a fresh server finds the turn before, and the next one what it has computed."""
    model = build_model(one.model, model_cache)
    [conversation] = make_conversations(1, turns=3, tokens=200)
    with Server(options(one, model, tmp_path, tp=ranks)) as server:
        converse(server, [conversation], turns=1)
        older = set(sides(tmp_path))
        converse(server, [conversation])
    whole = conversation.turns[2].prompt
    lost = set(sides(tmp_path)) - older
    of_ranks = sorted(set(map(namespace, lost)))
    assert len(of_ranks) == ranks
    either = of_ranks[0 if lose is gone else -1]
    lose(tmp_path, [path for path in lost if namespace(path) == either])
    with Server(options(one, model, tmp_path, 1, tp=ranks)) as server:
        again = [*ask(server, [whole]), *ask(server, [whole])]
    shorter, longer = (asked.turns[0].cached.storage for asked in again)
    assert shorter % one.boundary == longer % one.boundary == 0
    assert 0 <= len(conversation.turns[0].prompt) + 16 - shorter <= one.boundary + PAGE
    assert len(whole) - longer <= one.boundary + PAGE
    assert_right(one, model, [conversation, *again], tp=ranks)


@pytest.mark.parametrize(
    "one", [pytest.param(WINDOWS, marks=LONG), STATES], ids=lambda one: one.model
)
def test_a_full_store_keeps_what_was_used_last_with_its_sides(
    one: Class, assert_right: Check, model_cache: Path, tmp_path: Path
) -> None:
    """Two of four conversations have room. A hit needs pages and sides of the same conversation."""
    model = build_model(one.model, model_cache)
    with Server(options(one, model, tmp_path)) as server:
        converse(server, make_conversations(1, turns=2, tokens=300))
        quota = 2 * sum(path.stat().st_size for path in ours.stored_pages(tmp_path))
        server.detach_storage()
        ours.attach(server, ours.attach_config(tmp_path / "small", quota_bytes=quota))
        asked = [converse(server, [talk])[0] for talk in make_conversations(4, 2, tokens=300)]
        again = [ask(server, [talk.turns[1].prompt])[0] for talk in reversed(asked)]
        ours.assert_own_pages_of_kv(server)
    assert sum(path.stat().st_size for path in ours.stored_pages(tmp_path / "small")) <= quota
    newest, *_, oldest = (talk.turns[0] for talk in again)
    assert len(newest.prompt) - newest.cached.storage <= one.boundary + PAGE
    assert oldest.cached.storage < len(oldest.prompt) - one.boundary - PAGE
    assert_right(one, model, [*asked, *again])
