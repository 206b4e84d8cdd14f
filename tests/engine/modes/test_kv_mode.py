"""Requests that must not share pages: of other adapters, salts and extra keys."""

import shutil
import uuid
from pathlib import Path

import pytest

from bench.harness.server import Server
from tests.engine.harness.conversations import ask, random_tokens
from tests.engine.harness.lora import build_lora
from tests.engine.harness.ours import assert_no_cache_output, our_server

pytestmark = pytest.mark.engine

OWN_PAGES = "hcache: KV mode, own pages: "


def test_adapters_and_salts_share_no_pages(model: Path, model_cache: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(build_lora(model, model_cache), adapter)
    second = build_lora(model, model_cache, seed=2)
    adapters = [f"tiny={adapter}", f"second={second}"]
    args = ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths", *adapters]
    prompt = random_tokens(300, seed=41)
    options = our_server(model, tmp_path, extra_args=args)

    def hits(server: Server, **request: str) -> int:
        reply = server.generate(prompt, 16, **request)
        server.flush_cache()
        replies.setdefault(str(request), []).append(reply.output_ids)
        return reply.cached.storage

    replies: dict[str, list[list[int]]] = {}
    kinds: list[dict[str, str]] = [
        {},
        {"lora": "tiny"},
        {"lora": "second"},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora": "tiny", "cache_salt": "a"},
    ]
    with Server(options) as server:
        assert OWN_PAGES + "LoRA adapters" in server.log_text()
        assert [hits(server, **kind) for kind in kinds] == [0] * len(kinds)
        assert [hits(server, **kind) for kind in kinds] == [256] * len(kinds)
        (plain,) = ask(server, [prompt])
    assert all(first == second for first, second in replies.values())
    assert len({str(replies[str(kind)][0]) for kind in kinds[:3]}) == 3
    assert plain.outputs == replies[str(kinds[0])][:1]
    assert_no_cache_output(model, [plain])
    options.log = tmp_path / "restarted.log"
    with Server(options) as server:
        assert [hits(server, **kind) for kind in kinds[:3]] == [256, 256, 256]
    # An adapter has the same name and path in every run, whatever was trained into it since.
    shutil.rmtree(adapter)
    shutil.copytree(build_lora(model, model_cache, seed=1), adapter)
    options.log = tmp_path / "changed.log"
    with Server(options) as server:
        assert hits(server, lora="tiny") == 0
        assert hits(server, lora="tiny") == 256
    before, *_, cold, restored = replies[str(kinds[1])]
    assert before != cold == restored


@pytest.mark.parametrize("mode", ["auto", pytest.param("plain", marks=pytest.mark.long)])
def test_an_extra_key_of_an_adapters_id(
    mode: str, model: Path, model_cache: Path, tmp_path: Path
) -> None:
    """SGLang appends the id to `extra_key`: both requests would have one key."""
    adapter = build_lora(model, model_cache)
    identity = uuid.uuid5(uuid.NAMESPACE_URL, f"tiny\0{adapter}").hex  # as SGLang makes it
    args = ["--enable-lora", "--lora-backend", "torch_native", "--lora-paths", f"tiny={adapter}"]
    prompt = random_tokens(300, seed=43)
    options = our_server(model, tmp_path, hcache={"mode": mode}, extra_args=args)
    of_adapter: list[dict[str, str]] = [{"lora": "tiny"}, {"lora": "tiny", "extra_key": "a"}]
    named: list[dict[str, str]] = [
        {"extra_key": identity},
        {"extra_key": f"a{identity}"},
        {"extra_key": f"hcache:adapter:32:{identity}"},
    ]

    def asked(server: Server, requests: list[dict[str, str]]) -> list[tuple[int, list[int]]]:
        replies = [server.generate(prompt, 16, **request) for request in requests]
        server.flush_cache()
        return [(r.cached.device + r.cached.storage, r.output_ids) for r in replies]

    with Server(options) as server:
        first = asked(server, of_adapter)
        assert [hits for hits, _ in first] == [0, 0]
        # Of none of them L1 or L3 has anything, and all say what the model alone says.
        plain = server.generate(prompt, 16).output_ids
        assert plain != first[0][1]
        assert asked(server, named) == [(0, plain)] * 3
        assert asked(server, named) == [(256, plain)] * 3, "those that share find their own"
    options.log = tmp_path / "restarted.log"
    with Server(options) as server:
        assert asked(server, named) == [(256, plain)] * 3
        assert asked(server, of_adapter) == [(256, output) for _, output in first]
