"""SGLang's kits for pauses, aborts and sessions, on one server of each L3.

Tokens behind hits are those without a cache in other tests, so the kits for KL and radix caches are
left out.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness.server import Server

from .servers import MODES, assert_sound, options
from .standins import case, kit, tokenizer_of

pytestmark = pytest.mark.engine


class Served(NamedTuple):
    """A server with an L3 of that name, and its tokenizer."""

    l3: str
    server: Server
    model: Path
    tokenizer: Any

    def case(self, mixin: type, **attributes: Any) -> Any:
        """A kit's class of tests that asks this server."""
        return case(
            mixin,
            base_url=self.server.url,
            process=self.server.process,
            model=str(self.model),
            tokenizer=self.tokenizer,
            **attributes,
        )


ALL = ("file", "auto", "hidden", "kv")


def runs(*short: str, long: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parameters `served` and `name`: the tests of a kit that run always, and in long runs only."""
    return pytest.mark.parametrize(
        ("served", "name"),
        [
            pytest.param("auto", name, marks=pytest.mark.versions, id=f"{name}-short")
            for name in short
        ]
        + [
            pytest.param(l3, name, marks=pytest.mark.long, id=f"{name}-{l3}")
            for l3 in ALL
            for name in (*short, *long)
        ],
        indirect=["served"],
    )


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    return request.node.get_closest_marker("long") is not None


@pytest.fixture(scope="module")
def servers(
    speaker: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Server]]:
    """The server with an L3 of that name: the same for all tests, unless it died."""
    running: dict[str, Server] = {}

    def alive(l3: str) -> bool:
        server = running.get(l3)
        return bool(server and server.process and server.process.poll() is None)

    with contextlib.ExitStack() as stack:

        def served_by(l3: str) -> Server:
            if not alive(l3):
                chosen = options(
                    l3,
                    speaker,
                    tmp_path_factory.mktemp(l3),
                    max_total_tokens=12_288,
                    # Kits ask for 100,000 tokens and abort.
                    extra_args=["--enable-streaming-session", "--allow-auto-truncate"],
                    # As the fixtures of the kits have it.
                    extra_env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
                )
                running[l3] = stack.enter_context(Server(chosen))
            return running[l3]

        yield served_by
        for l3 in filter(alive, MODES):
            assert_sound(running[l3], l3)


@pytest.fixture
def served(
    request: pytest.FixtureRequest, servers: Callable[[str], Server], speaker: Path
) -> Served:
    return Served(request.param, servers(request.param), speaker, tokenizer_of(speaker))


@runs("test_pause_resume_in_place")
def test_pause(name: str, served: Served, long: bool) -> None:
    asked = served.case(
        kit("kits.pause_generation_kit").PauseResumeInPlaceMixin,
        pause_num_requests=32 if long else 8,
        pause_max_new_tokens=256,
        pause_duration=5 if long else 1,
    )
    getattr(asked, name)()


@runs("test_abort_all")
def test_abort(name: str, served: Served, long: bool) -> None:
    asked = served.case(
        kit("kits.abort_timeout_kit").AbortAllMixin,
        abort_all_num_requests=32 if long else 8,
        abort_all_max_new_tokens=8000,
        abort_all_sleep=2 if long else 1,
    )
    getattr(asked, name)()


@runs(
    *("test_kv_cache_inheritance", "test_nth_mid_abort_recovery", "test_preabort_recovery"),
    long=[
        *("test_first_mid_abort_recovery", "test_leak_logprob_concurrent"),
        "test_stress_concurrent_sessions",
    ],
)
def test_streaming_sessions(name: str, served: Served, request: pytest.FixtureRequest) -> None:
    ends = served.l3 == "file" and name != "test_first_mid_abort_recovery"  # which keeps no node
    if ends:
        why = "SGLang asks its tree whether a session's node, which is in no tree, is backed up"
        # What a test says of a server that died depends on the test.
        request.applymarker(pytest.mark.xfail(reason=why, strict=True))
    mixin = kit("kits.streaming_session_kit").StreamingSessionKitMixin
    # The last token of a reply is computed by the next pass only; the kit of 0.5.22 knows it.
    getattr(served.case(mixin, kv_inherit_offsets=(0, -1)), name)()
