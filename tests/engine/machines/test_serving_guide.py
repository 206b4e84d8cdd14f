"""The commands of docs/cluster.md run as they stand there.

What readers have to fill in is filled in: `...` by what every server of a test has; hosts, ports
and folders by those of this machine; transfers are by TCP (`mooncake_tcp`).
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness import mooncake
from bench.harness.server import Server, ServerOptions, free_port
from tests.docs.pages import read_page
from tests.engine.harness import ours
from tests.engine.harness.conversations import ask, converse, make_conversations
from tests.engine.harness.disaggregation import DecodeServer, PrefillServer
from tests.engine.harness.router import Router

from .servers import ROUTER, TRANSFER

pytestmark = [pytest.mark.engine, pytest.mark.long]

PAGE = 64
GUIDE = read_page(Path(__file__).parents[3] / "docs" / "cluster.md")
PLAIN = {"mode": "plain"}
TCP: dict[str, object] = {"-transfer-backend mooncake": "-transfer-backend mooncake_tcp"}
EVERY_HIT = {"HCACHE_CONFIG": '{"min_gain": 0}'}
"""A hit of a busy machine is read, too."""


class Command(NamedTuple):
    """Variables, module and arguments (but for `...`) of a command of the guide."""

    env: dict[str, str]
    module: str
    arguments: list[str]


def commands(part: str, filled_in: Mapping[str, object]) -> list[Command]:
    """Those of the one block that has `part` in it, with what is `filled_in` for words of it."""
    words = shlex.split(block("sh", part, filled_in).replace("\\\n", " "), comments=True)
    found: list[Command] = []
    env: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, is_assignment, value = word.partition("=")
        if is_assignment and name.isupper():
            env[name] = value
        elif word == "-m":
            found.append(Command(dict(env), following, []))
        elif found and word not in ("...", "python", "export", found[-1].module):
            found[-1].arguments.append(word)
    return found


def block(language: str, part: str, filled_in: Mapping[str, object]) -> str:
    [text] = [b.text for b in GUIDE.blocks if b.language == language and part in b.text]
    for word, value in filled_in.items():
        assert word in text, word
        text = text.replace(word, str(value))
    return text


def of_the_guide(
    command: Command, model: Path, log: Path, l3: Path, hcache: dict[str, Any], **options: Any
) -> ServerOptions:
    """The server that a command starts; `{...}` is an extra config with options of ours."""
    assert command.module == "sglang.launch_server"
    arguments = [
        json.dumps(ours.attach_config(l3, **hcache)) if word == "{...}" else word
        for word in command.arguments
    ]
    env = {**command.env, **EVERY_HIT}
    return ServerOptions(model, log, extra_args=arguments, extra_env=env, **options)


class RouterOfTheGuide(Router):
    """With the arguments of a command, but for where it listens."""

    def __init__(self, command: Command, workers: Sequence[Server], log: Path) -> None:
        assert command.module == "sglang_router.launch_router"
        self._given = command.arguments
        super().__init__(workers, log)

    def _addresses(self) -> list[str]:
        place = {"--host", "--port"}
        pairs = zip(self._given, ["", *self._given[:-1]], strict=True)
        return [word for word, before in pairs if not place & {word, before}]


def started(stack: ExitStack, server: Server, port: int) -> Server:
    stack.callback(server.kill)
    server.start(port)
    return server


def assert_goes_on(model: Path, server: Server) -> None:
    """Conversations, with what L3 has of them."""
    conversations = converse(server, make_conversations(2, turns=2, tokens=400))
    ours.assert_restored_from_l3(conversations, PAGE)
    ours.assert_no_cache_output(model, conversations)


@TRANSFER
@ROUTER
def test_prefill_servers(model: Path, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    filled_in = TCP | {"8998": free_port()}
    filled_in |= {f"HOST_{n}:30000": f"127.0.0.1:{p}" for n, p in zip("AB", ports, strict=True)}
    commanded = commands("--disaggregation-bootstrap-port", filled_in)
    with ExitStack() as stack:
        servers = [
            started(stack, Server(of_the_guide(c, model, tmp_path / log, tmp_path, {}, **o)), port)
            for c, port, log, o in zip(
                commanded[:2], ports, ("prefill.log", "decode.log"), ({}, {"cache": "radix"}),
                strict=True,
            )
        ]  # fmt: skip
        front = RouterOfTheGuide(commanded[2], servers, tmp_path / "router.log")
        assert_goes_on(model, stack.enter_context(front))
        for server in servers:
            ours.assert_nothing_went_wrong(server)


@TRANSFER
@pytest.mark.parametrize("number", [0, 1], ids=["offload", "radix cache"])
def test_decode_servers(number: int, model: Path, tmp_path: Path) -> None:
    """A prefill server finds what they write."""
    command = commands("--disaggregation-decode-enable-offload-kvcache", TCP)[number]
    log = tmp_path / "decode.log"
    prefill = PrefillServer(ours.our_server(model, tmp_path, hcache=PLAIN))
    options = of_the_guide(command, model, log, tmp_path, PLAIN, cache="radix")
    with prefill, DecodeServer(options, [prefill]) as decode:
        [first] = converse(decode, make_conversations(1, turns=1), reply_tokens=80)
        pages = (len(first.history) - 1) // PAGE
        decode.until(lambda: len(ours.stored_pages(tmp_path)) == pages, "the reply to be stored")
        [second] = ask(decode, [[*first.history, 1]])
        ours.assert_nothing_went_wrong(decode)
    assert second.turns[0].cached.storage == pages * PAGE > len(first.turns[0].prompt)
    ours.assert_no_cache_output(model, [first, second])


@ROUTER
def test_replicas_that_share_a_folder(model: Path, tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        servers = []
        for name, port in zip("AB", ports, strict=True):
            folders = {"/mnt/shared": tmp_path, "/mnt/ssd0": tmp_path / name}
            [command] = commands('"backend": "file"', folders)
            options = of_the_guide(command, model, tmp_path / f"{name}.log", tmp_path, {})
            servers.append(started(stack, Server(options), port))
        hosts = {f"HOST_{n}:30000": f"127.0.0.1:{p}" for n, p in zip("AB", ports, strict=True)}
        [command] = commands("--policy cache_aware", hosts)
        front = RouterOfTheGuide(command, servers, tmp_path / "router.log")
        assert_goes_on(model, stack.enter_context(front))
        assert list((tmp_path / "hcache").glob("*.bin"))
        for server in servers:
            ours.assert_nothing_went_wrong(server)


@pytest.mark.skipif(mooncake.missing() is not None, reason=f"no Mooncake: {mooncake.missing()}")
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "alone"])
def test_mooncake(shared: bool, model: Path, tmp_path: Path) -> None:
    with mooncake.cluster(tmp_path) as cluster:
        here = {"HOST:50051": cluster.address, "THIS_HOST": "127.0.0.1"}
        log = tmp_path / "server.log"
        if shared:
            text = block("json", '"shared"', here | {"/mnt/ssd0": tmp_path})
            options = ServerOptions(
                model, log, storage_backend="dynamic", extra_config=text, extra_env=EVERY_HIT,
                fork=False,
            )  # fmt: skip
        else:
            [command] = commands("--hicache-storage-backend mooncake", here)
            options = of_the_guide(command, model, log, tmp_path, {}, fork=False)
        with Server(options) as server:
            assert_goes_on(model, server)
            ours.assert_nothing_went_wrong(server)
        assert mooncake.keys(cluster)


def test_sglangs_file_backend(model: Path, tmp_path: Path) -> None:
    [command] = commands("--hicache-storage-backend file", {})
    folder = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / "l3")}
    command = command._replace(env=command.env | folder)
    with Server(of_the_guide(command, model, tmp_path / "server.log", tmp_path, {})) as server:
        assert_goes_on(model, server)
        ours.assert_nothing_went_wrong(server)
