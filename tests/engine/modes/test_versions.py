"""Servers of an SGLang that nobody tested: copies of the installed one with the next number."""

from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from shutil import copytree

import pytest

from bench.harness.options import ServerOptions
from bench.harness.server import Server
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env
from tests.engine.harness import ours
from tests.engine.harness.conversations import ask, converse, make_conversations, turns_of

pytestmark = pytest.mark.engine
NEXT = "0.5.24"
SAID = f"SGLang {NEXT} is newer than the tested ones"


def with_the_next_version(options: ServerOptions, folder: Path, gone: str = "") -> ServerOptions:
    """The server of a copy of SGLang in which the name ``gone`` is another one everywhere."""
    installed = distribution("sglang")
    package = Path(str(installed.locate_file("sglang")))
    copytree(package, folder / "sglang", copy_function=lambda a, b: Path(b).hardlink_to(a))
    for path in folder.rglob("*.py") if gone else ():
        if gone in (text := path.read_text()):
            path.unlink()
            path.write_text(text.replace(gone, f"{gone}_anew"))
    notes = folder / f"sglang-{NEXT}.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {NEXT}\n")
    path = f"{folder}:{cpu_engine_env()['PYTHONPATH']}"
    env = {**options.extra_env, "PYTHONPATH": path}
    return replace(options, log=folder / "next.log", extra_env=env, fork=False)


def test_the_next_version_finds_what_the_last_one_stored(model: Path, tmp_path: Path) -> None:
    options = ours.our_server(model, tmp_path, hcache={"mode": "kv"}, page_size=16)
    with Server(options) as server:
        conversations = converse(server, make_conversations(2, turns=2, tokens=200))
    folder = tmp_path / "next"
    with Server(with_the_next_version(options, folder)) as server:
        again = ask(server, [conversation.history for conversation in conversations])
        ours.assert_sound_own_pages(server, "kv")
        log = server.log_text()
    assert f"hcache: {SAID}, 0.5.21 to 0.5.23; all" in log and "seams are there" in log
    for turn in turns_of(again):
        assert turn.cached.storage >= len(turn.prompt) - 32
    ours.assert_no_cache_output(model, [*conversations, *again])


def test_a_version_without_a_seam_has_plain_pages_and_names_it(model: Path, tmp_path: Path) -> None:
    options = ours.our_server(model, tmp_path, page_size=16)
    gone = "_drain_storage_control_queues_impl"
    with Server(with_the_next_version(options, tmp_path / "next", gone)) as server:
        conversations = converse(server, make_conversations(2, turns=2, tokens=200))
        log = server.log_text()
    assert f"hcache: KV mode, plain pages: {SAID}" in log
    assert f"UnifiedRadixCache.{gone}" in log
    ours.assert_restored_from_l3(conversations, 16)
    ours.assert_no_cache_output(model, conversations)
