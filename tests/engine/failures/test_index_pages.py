"""Attempts to make a server with sparse attention use index keys that are not its sequence's.

In a page of ours latents stand with the indexer's keys. Plain pages have these in two files: a hit
ends before the first page that lacks either of them, whatever stands behind it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from typer.testing import CliRunner

from bench.harness.models import build_model
from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.main import app
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.format.envelope import parse_name
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    turns_of,
)
from tests.engine.harness.sparse import PACKED, SPARSE, TURNED, assert_sparse_output

pytestmark = pytest.mark.engine

PAGE = 64
LONG = pytest.mark.long
Kind = Literal["index", "latents", "both"]


@dataclass(frozen=True)
class Kept:
    """A model and what a server keeps of it."""

    model: str
    packed: bool = False
    mode: str = "plain"

    def options(
        self, models: Path, folder: Path, log: str = "server", seed: int = 0, **more: Any
    ) -> ServerOptions:
        return ours.our_server(
            build_model(self.model, models, seed=seed),
            folder,
            hcache={"mode": self.mode} | more.pop("hcache", {}),
            log=folder / f"{log}.log",
            **SPARSE | {"extra_args": PACKED if self.packed else ()} | more,
        )


DEEPSEEK, GLM, OWN = (
    Kept("deepseek_v32"),
    Kept("glm_5", packed=True),
    Kept("deepseek_v32", mode="auto"),
)


def files(folder: Path, kind: Kind) -> list[Path]:
    """All of this kind, of all namespaces. Index keys are the smaller files."""
    pages = ours.stored_pages(folder)
    if kind == "both":
        return pages
    smaller = min(path.stat().st_size for path in pages)
    found = [path for path in pages if (path.stat().st_size == smaller) == (kind == "index")]
    assert len(found) == len(pages) / 2
    return found


def unlinked(pages: Sequence[Path]) -> None:
    for path in pages:
        path.unlink()


def damaged(pages: Sequence[Path]) -> None:
    for path in pages:
        ours.flip_bit(path, path.stat().st_size // 2)


def damaged_keys(pages: Sequence[Path]) -> None:
    """The last layer's are the last 8,448 bytes of a page of ours, before less than 4,096 others
    that fill the file."""
    for path in pages:
        ours.flip_bit(path, -5000)


def of_others(pages: Sequence[Path]) -> None:
    """Each page is another one, of this conversation or of the other one."""
    contents = [path.read_bytes() for path in pages]
    for path, content in zip(pages, [*contents[1:], contents[0]], strict=True):
        path.write_bytes(content)


Harm = Callable[[Sequence[Path]], None]


@pytest.mark.parametrize(
    ("kept", "ranks"),
    [
        (OWN, 1),
        pytest.param(OWN, 2, marks=LONG),
        (DEEPSEEK, 1),
        pytest.param(GLM, 1, marks=LONG),
        pytest.param(DEEPSEEK, 2, marks=LONG),
    ],
    ids=["own", "own, two ranks", "deepseek_v32", "glm_5, FP8", "two ranks"],
)
def test_a_hit_ends_before_a_page_that_is_not_whole(
    kept: Kept, ranks: int, model_cache: Path, tmp_path: Path
) -> None:
    """Pages of the second turn are harmed, or those of the first one, before the third: it finds
    those of the first one, or none. A turn behind it finds what it has computed."""
    harms: list[tuple[Harm, Kind, int]] = [
        *((harm, "index", 1) for harm in (unlinked, damaged, of_others)),
        (unlinked, "index", 0),
        (damaged, "latents", 1),
    ]
    if kept is OWN:
        harms = [
            (harm, "both", turn) for harm in (unlinked, damaged_keys, of_others) for turn in (0, 1)
        ]
    options, asked = kept.options(model_cache, tmp_path, tp=ranks), list[Conversation]()
    found = []
    with Server(options) as server:
        for number, (harm, kind, harmed) in enumerate(harms):
            talks = make_conversations(2, turns=3, tokens=200, seed=number)
            stored: list[set[Path]] = [set(ours.stored_pages(tmp_path))]
            for turn in (1, 2):
                converse(server, talks, turns=turn)
                stored.append(set(ours.stored_pages(tmp_path)))
            new = stored[harmed + 1] - stored[harmed]
            harm([path for path in files(tmp_path, kind) if path in new])
            converse(server, talks)
            again = ask(server, [talk.turns[2].prompt for talk in talks])
            found.append([turn.cached.storage for turn in (talks[0].turns[2], talks[1].turns[2])])
            assert all(turn.cached.storage == 9 * PAGE for turn in turns_of(again))
            asked += [*talks, *again]
        ours.assert_nothing_went_wrong(server)
    assert found == [[3 * PAGE * turn] * 2 for _, _, turn in harms]
    assert_sparse_output(options, asked)


@pytest.mark.parametrize(
    ("kept", "other"),
    [
        (DEEPSEEK, {"seed": 1}),
        pytest.param(DEEPSEEK, {"extra_args": PACKED}, marks=LONG),
        (GLM, {"extra_env": SPARSE["extra_env"] | TURNED}),
    ],
    ids=["weights", "precision", "turned otherwise"],
)
def test_index_keys_of_another_server_are_never_used(
    kept: Kept, other: dict[str, Any], model_cache: Path, tmp_path: Path
) -> None:
    """First they are in the same folder, then under the names of this server's own."""
    servers = [
        kept.options(model_cache, tmp_path, f"{number}", **how)
        for number, how in ((0, {}), (1, other))
    ]
    prompt = make_conversations(1, turns=1, tokens=400)[0].questions[0]
    pages: list[dict[bytes, Path]] = []

    def asked(options: ServerOptions) -> None:
        with Server(options) as server:
            replies = [*ask(server, [prompt]), *ask(server, [prompt])]
        assert [turn.cached.storage for turn in turns_of(replies)] == [0, 6 * PAGE]
        assert_sparse_output(options, replies)

    for options in servers:
        before = set(ours.stored_pages(tmp_path))
        asked(options)
        new = set(ours.stored_pages(tmp_path)) - before
        smaller = min(path.stat().st_size for path in new)
        index = [path for path in new if path.stat().st_size == smaller]
        pages.append({page.key: path for path in index if (page := parse_name(path.name))})
    mine, others = pages
    assert mine.keys() == others.keys() and not set(mine.values()) & set(others.values())
    for key, path in mine.items():
        path.write_bytes(others[key].read_bytes())
    asked(servers[0])


def test_index_keys_are_older_than_the_weights_after_an_update(
    model_cache: Path, tmp_path: Path
) -> None:
    options, other = (OWN.options(model_cache, tmp_path, seed=seed) for seed in (0, 1))
    prompt = make_conversations(1, turns=1, tokens=400)[0].questions[0]
    replies: dict[int, list[Conversation]] = {0: [], 1: []}
    with Server(options) as server:
        for served in (0, 1, 0):
            server.update_weights_from_disk(Path((options, other)[served].model))
            replies[served] += [*ask(server, [prompt]), *ask(server, [prompt])]
    found = [[turn.cached.storage for turn in turns_of(asked)] for asked in replies.values()]
    assert found == [[0, *[6 * PAGE] * 3], [0, 6 * PAGE]]
    assert_sparse_output(options, replies[0])
    assert_sparse_output(other, replies[1])


@pytest.mark.parametrize("kept", [DEEPSEEK, pytest.param(GLM, marks=LONG)], ids=lambda k: k.model)
def test_a_fresh_server_finds_what_the_folder_has(
    kept: Kept, model_cache: Path, tmp_path: Path
) -> None:
    """Index keys of the last turn are gone, and the store knows it: a hit ends before them, and no
    more is promised."""
    [conversation] = make_conversations(1, turns=3, tokens=200)
    options = kept.options(model_cache, tmp_path)
    with Server(options) as server:
        converse(server, [conversation], turns=2)
        older = set(ours.stored_pages(tmp_path))
        converse(server, [conversation])
        server.kill()
    unlinked([path for path in files(tmp_path, "index") if path not in older])
    CliRunner().invoke(app, ["verify", "--repair", "--dir", str(tmp_path / "l3")])
    with Server(kept.options(model_cache, tmp_path, "again", metrics=True)) as server:
        whole = conversation.turns[2].prompt
        again = ask(server, [whole])
        counted = fetch(server.url).counters["l3_tokens"]
        assert (counted["found"], counted["other_pool"]) == (6 * PAGE, 3 * PAGE)
        again = [*again, *ask(server, [whole])]
    assert [turn.cached.storage for turn in turns_of(again)] == [6 * PAGE, 9 * PAGE]
    assert_sparse_output(options, [conversation, *again])


@pytest.mark.long
def test_a_full_store_keeps_index_keys_of_what_was_used_last(
    model_cache: Path, tmp_path: Path
) -> None:
    """Two of four conversations have room, each with both kinds of pages."""
    options = GLM.options(model_cache, tmp_path)
    with Server(options) as server:
        converse(server, make_conversations(1, turns=2, tokens=300))
        quota = 2 * sum(path.stat().st_size for path in ours.stored_pages(tmp_path))
        server.detach_storage()
        small = ours.attach_config(tmp_path / "small", quota_bytes=quota)
        ours.attach(server, small)
        asked = [converse(server, [talk])[0] for talk in make_conversations(4, 2, tokens=300)]
        again = [ask(server, [talk.turns[1].prompt])[0] for talk in reversed(asked)]
        ours.assert_nothing_went_wrong(server)
    assert sum(path.stat().st_size for path in ours.stored_pages(tmp_path / "small")) <= quota
    newest, *_, oldest = (talk.turns[0] for talk in again)
    assert newest.cached.storage == len(newest.prompt) // PAGE * PAGE
    assert oldest.cached.storage < newest.cached.storage
    assert_sparse_output(options, [*asked, *again])
