"""Decode servers with an L3: prefill servers find what they write, and nothing fails a request."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness.models import build_model
from bench.harness.server import ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.disaggregation import DecodeServer, PrefillServer

from .servers import TRANSFER

pytestmark = [pytest.mark.engine, TRANSFER]

PAGE = 16
PLAIN = {"mode": "plain"}
ONLY_WRITES = "hcache: a decode server only writes L3"
OTHER_WEIGHTS = "a prefill server sent K and V of other or unknown weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def other(model_cache: Path) -> Path:
    """A model of the same shape as `model`, with other weights."""
    return build_model("llama", model_cache, seed=1)


@pytest.fixture(scope="module")
def prefill(model: Path, folder: Path) -> Iterator[PrefillServer]:
    """A prefill server with plain pages in the L3 `folder / "l3"`."""
    log = folder / "prefill.log"
    options = ours.our_server(model, folder, hcache=PLAIN, log=log, page_size=PAGE)
    with PrefillServer(options) as server:
        yield server


@pytest.fixture(scope="module")
def radix(model: Path, folder: Path, prefill: PrefillServer) -> Iterator[DecodeServer]:
    """A decode server whose radix cache has an L3 of its own, `folder / "radix"`."""
    options = ours.our_server(
        model,
        folder,
        hcache={"mode": "kv", "dirs": [str(folder / "radix")]},
        log=folder / "radix.log",
        page_size=PAGE,
        extra_args=("--disaggregation-decode-enable-radix-cache",),
        extra_env=ours.faulty("lost_after_look_ups", folder / "lose"),
    )
    with DecodeServer(options, [prefill]) as server:
        yield server


def offloading(model: Path, folder: Path, name: str, **options: Any) -> ServerOptions:
    """A decode server that writes what it decodes, to L3 at `folder / "l3"` unless told."""
    config = json.dumps(ours.extra_config(folder, **(PLAIN | options)))
    hicache: list[str] = [
        *("--disaggregation-decode-enable-offload-kvcache", "--hicache-ratio", "2"),
        *("--hicache-mem-layout", "page_first", "--hicache-storage-backend", "dynamic"),
        *("--hicache-storage-backend-extra-config", config),
    ]
    log = folder / f"{name}.log"
    return ServerOptions(model, log, cache="radix", page_size=PAGE, extra_args=hicache)


def test_prefill_servers_find_what_a_decode_server_offloads(
    model: Path, folder: Path, prefill: PrefillServer
) -> None:
    """Whole pages of a reply, which follow those of its prompt, which the prefill server wrote."""
    prompt = random_tokens(200, 1)
    with DecodeServer(offloading(model, folder, "offload"), [prefill]) as decode:
        [first] = converse(decode, make_conversations(1, turns=1, seed=1), reply_tokens=40)
        pages = (len(first.history) - 1) // PAGE
        decode.until(lambda: len(ours.stored_pages(folder)) == pages, "the reply to be stored")
        decode.flush_cache()
        [second] = ask(decode, [[*first.history, *prompt]])
        log = decode.log_text()
        ours.assert_nothing_went_wrong(decode)
    assert second.turns[0].cached.storage == pages * PAGE > len(first.turns[0].prompt)
    assert "KV mode, plain pages: decode offload makes a host pool" in log
    assert ONLY_WRITES in log
    assert "inactive" not in log
    assert "HCACHE_ENABLE" not in log
    ours.assert_no_cache_output(model, [first, second])


@pytest.mark.long
def test_replies_to_prompts_of_other_weights_are_not_offloaded(
    model: Path, other: Path, folder: Path, prefill: PrefillServer
) -> None:
    """In the middle of a rolling update: what is decoded behind them is of neither model."""
    l3 = folder / "other-l3"
    options = offloading(other, folder, "other", dirs=[str(l3)])
    with DecodeServer(options, [prefill]) as decode:
        converse(decode, make_conversations(1, turns=2, seed=4), reply_tokens=40)
        log = decode.log_text()
        ours.assert_nothing_went_wrong(decode)
    assert log.count(OTHER_WEIGHTS) == 1
    assert not list(l3.glob("**/*.page"))


SPOILT: dict[str, Callable[[Path], object]] = {
    "sound": lambda page: None,
    "a bit flipped": lambda page: ours.flip_bit(page, page.stat().st_size // 2),
    "cut short": lambda page: os.truncate(page, page.stat().st_size // 2),
    "gone": Path.unlink,
}


def written_in(decode: DecodeServer, conversation: Conversation) -> set[Path]:
    """The pages that the decode server writes in a turn; they are in L3 only."""
    l3 = decode.options.log.with_suffix("")
    before = set(l3.glob("**/*.page"))
    converse(decode, [conversation], turns=len(conversation.turns) + 1)
    return set(l3.glob("**/*.page")) - before


def test_pages_that_a_decode_server_cannot_read_fail_no_request(
    model: Path, folder: Path, radix: DecodeServer
) -> None:
    """SGLang would have told the prefill server to leave them out. Pages are spoilt, and at last
    evicted between a look-up and the read."""
    conversations = make_conversations(len(SPOILT) + 1, turns=2, seed=2)
    *spoilt, evicted = conversations
    for conversation, spoil in zip(spoilt, SPOILT.values(), strict=True):
        written = written_in(radix, conversation)
        assert len(written) >= 200 // PAGE
        for page in written:
            spoil(page)
    converse(radix, spoilt)
    assert written_in(radix, evicted)
    lose = folder / "lose"
    lose.touch()
    converse(radix, [evicted])
    lose.unlink()
    assert lose.with_suffix(".lost").exists(), "no pages were looked up"
    assert ONLY_WRITES in radix.log_text()
    assert "KV mode, plain pages: a server that decodes for prefill servers" in radix.log_text()
    ours.assert_nothing_went_wrong(radix)
    ours.assert_no_cache_output(model, conversations)


def test_prompts_of_other_weights_are_not_stored(
    model: Path, other: Path, radix: DecodeServer
) -> None:
    """A decode server that was updated before its prefill server stores nothing of what that one
    sends; when both have the same weights again, it does."""
    conversation, later = make_conversations(2, turns=2, seed=5)
    radix.update_weights_from_disk(other)
    try:
        assert not written_in(radix, conversation)
        assert OTHER_WEIGHTS in radix.log_text()
    finally:
        radix.update_weights_from_disk(model)
    assert len(written_in(radix, later)) >= 200 // PAGE
    ours.assert_nothing_went_wrong(radix)
    ours.assert_no_cache_output(model, [later])
