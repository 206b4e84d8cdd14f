"""Decode servers with an L3: prefill servers find what they write, and nothing fails a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.harness import disaggregation
from bench.harness.disaggregation import DecodeServer, PrefillServer
from bench.harness.models import build_model
from bench.harness.server import ServerError, ServerOptions
from tests.engine.harness.conversations import (
    Conversation,
    ask,
    converse,
    make_conversations,
    random_tokens,
)
from tests.engine.harness.ours import (
    assert_no_cache_output,
    assert_nothing_went_wrong,
    extra_config,
    faulty,
    flip_bit,
    our_server,
    stored_pages,
)

WHY_NOT = disaggregation.missing()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no transfer: {WHY_NOT}"),
]

PAGE = 16
PLAIN = {"mode": "kv", "pages": "plain"}
ONLY_WRITES = "hcache: a decode server only writes L3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module")
def prefill(model: Path, folder: Path) -> Iterator[PrefillServer]:
    """A prefill server with plain pages in the L3 `folder / "l3"`."""
    log = folder / "prefill.log"
    options = our_server(model, folder, hcache=PLAIN, log=log, page_size=PAGE)
    with PrefillServer(options) as server:
        yield server


def offloading(model: Path, folder: Path, name: str, **options: Any) -> ServerOptions:
    """A decode server that writes what it decodes, to L3 at `folder / "l3"` unless told."""
    config = json.dumps(extra_config(folder, **(PLAIN | options)))
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
        decode.until(lambda: len(stored_pages(folder)) == pages, "the reply to be stored")
        decode.flush_cache()
        [second] = ask(decode, [[*first.history, *prompt]])
        log = decode.log_text()
        assert_nothing_went_wrong(decode)
    assert second.turns[0].cached.storage == pages * PAGE > len(first.turns[0].prompt)
    assert "KV mode, plain pages: decode offload has a host pool" in log
    assert ONLY_WRITES in log
    assert "nothing to do" not in log
    assert "HCACHE_ENABLE" not in log
    assert_no_cache_output(model, [first, second])


def test_replies_to_prompts_of_other_weights_are_not_stored(
    model: Path, model_cache: Path, folder: Path, prefill: PrefillServer
) -> None:
    """In the middle of a rolling update: what is decoded behind them is of neither model."""
    other, l3 = build_model("llama", model_cache, seed=1), folder / "other-l3"
    options = offloading(other, folder, "other", dirs=[str(l3)])
    with DecodeServer(options, [prefill]) as decode:
        converse(decode, make_conversations(1, turns=2, seed=4), reply_tokens=40)
        log = decode.log_text()
        assert_nothing_went_wrong(decode)
    assert log.count("a prefill server sent K and V of other weights") == 1
    assert not list(l3.glob("**/*.page"))


def cut_short(page: Path) -> None:
    with page.open("r+b") as file:
        file.truncate(page.stat().st_size // 2)


SPOILT: dict[str, Callable[[Path], object]] = {
    "sound": lambda page: None,
    "a bit flipped": lambda page: flip_bit(page, page.stat().st_size // 2),
    "cut short": cut_short,
    "gone": Path.unlink,
}


def radix_cached(model: Path, folder: Path, name: str, **options: Any) -> ServerOptions:
    """A decode server whose radix cache has an L3 of its own, `folder / name`."""
    return our_server(
        model,
        folder,
        hcache={**PLAIN, "dirs": [str(folder / name)]},
        log=folder / f"{name}.log",
        page_size=PAGE,
        extra_args=("--disaggregation-decode-enable-radix-cache",),
        **options,
    )


def spoil_what_is_written(
    decode: DecodeServer, conversation: Conversation, spoil: Callable[[Path], object]
) -> None:
    """A turn, whose pages are in L3 only, and spoilt there."""
    l3 = decode.options.log.with_suffix("")
    before = set(l3.glob("**/*.page"))
    converse(decode, [conversation], turns=1)
    written = set(l3.glob("**/*.page")) - before
    assert len(written) >= 200 // PAGE
    for page in written:
        spoil(page)


def test_pages_that_a_decode_server_cannot_read_fail_no_request(
    model: Path, folder: Path, prefill: PrefillServer
) -> None:
    """SGLang would have told the prefill server to leave them out."""
    conversations = make_conversations(len(SPOILT), turns=2, seed=2)
    with DecodeServer(radix_cached(model, folder, "radix"), [prefill]) as decode:
        for conversation, spoil in zip(conversations, SPOILT.values(), strict=True):
            spoil_what_is_written(decode, conversation, spoil)
        converse(decode, conversations)
        assert ONLY_WRITES in decode.log_text()
        assert_nothing_went_wrong(decode)
    assert_no_cache_output(model, conversations)


@pytest.mark.long
def test_sglang_fails_a_request_whose_promised_pages_cannot_be_read(
    model: Path, folder: Path, prefill: PrefillServer
) -> None:
    """Why decode servers find nothing: what another L3 may promise, they commit to."""
    options = radix_cached(model, folder, "promised", extra_env=faulty("hits_promised"))
    sound, damaged = make_conversations(2, turns=2, seed=3)
    with DecodeServer(options, [prefill]) as decode:
        spoil_what_is_written(decode, sound, SPOILT["sound"])
        converse(decode, [sound])
        spoil_what_is_written(decode, damaged, SPOILT["a bit flipped"])
        with pytest.raises(ServerError, match="answered 500"):
            converse(decode, [damaged])
    assert_no_cache_output(model, [sound])
