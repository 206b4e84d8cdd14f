"""What servers do, turn by turn of their schedulers, is what it was.

``recorder.py`` says what stands in a trace and why it is the same in every run. Replies are those
of the model without a cache, in every mode. They are not recorded: sums differ between CPUs.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from bench.harness.models import build_model, with_changed_layers
from bench.harness.server import Server, ServerOptions
from tests.engine.harness import ours
from tests.engine.harness.conversations import Conversation, random_tokens
from tests.engine.harness.disaggregation import PrefillServer
from tests.engine.machines.servers import TRANSFER
from tests.goldens.golden import compare
from tests.goldens.traced import PAGE, Script, conversation, our_traced_server, traced
from tests.kit.models import MODELS

pytestmark = pytest.mark.engine
MIXED = {"partition": ours.partition(1, 2, 1)}
KV = {"mode": "kv"}
NOBODY = "2.2.2.2"
"""SGLang's name of a decode server that takes everything at once and is not there."""


class Scenario(NamedTuple):
    """What users do to a server, and to which."""

    use: Callable[[Script, Path], list[Conversation]]  # gets the folder of the server, too
    hcache: dict[str, Any]  # options of ours
    options: Mapping[str, Any] = MappingProxyType({})  # others of the server
    trace: Mapping[str, Any] = MappingProxyType({})  # as ``recorder.Settings``
    # Makes the server instead, of the model and the folder.
    options_of: Callable[[Path, Path], ServerOptions] | None = None
    ranks: int = 1
    server: type[Server] = Server


def first_time(script: Script, tokens: int, seeds: Iterable[int]) -> list[list[int]]:
    """Prompts that nobody asked before, one after the other."""
    prompts = [random_tokens(tokens, seed) for seed in seeds]
    for number, prompt in enumerate(prompts):
        script.ask((f"first {number}", prompt))
    return prompts


def one_server(script: Script, folder: Path) -> list[Conversation]:
    """A conversation from L3, aborts in each phase, a weight update, a flush and a cleared L3."""
    script.settle("a conversation from L3")
    found = conversation(script)
    script.settle("aborts in each phase")
    prompts = first_time(script, 160, range(2))
    script.flush()
    script.ask(("abort in prefetch", [*prompts[0], 5]), ("beside it", [*prompts[1], 5]))
    script.flush()
    script.ask(("abort in load", [*prompts[1], 6]))
    script.ask(("abort in prefill", [*prompts[0], *random_tokens(200, 7)]))
    script.ask(("abort in decode", [*prompts[0], 7]))
    script.settle("weight update")
    other = with_changed_layers(script.server.options.model, folder / "other", layers=[0])
    script.flush()
    script.server.update_weights_from_disk(other, flush=False)
    script.settle()
    script.ask(("before the flush", prompts[0]))
    script.flush()
    script.ask(("behind the flush", prompts[0]))
    script.flush()
    script.ask(("from L3", prompts[0]))
    script.settle("flush and clear")
    script.flush()
    script.server.clear_storage()
    script.settle()
    script.ask(("not in L3", prompts[0]))
    return [found]


def pressure(script: Script, folder: Path) -> list[Conversation]:
    """More than the device holds, then more than that and host memory, then decodes that do not
    fit."""
    script.settle("eviction under pressure")
    prompts = first_time(script, 245, range(3))
    script.ask(("from the host", [*prompts[0], 9]))
    script.ask(*((f"together {number}", random_tokens(245, number)) for number in (3, 4)))
    script.settle("retraction")
    script.ask(*((f"long {n}", random_tokens(220, 50 + n)) for n in range(2)), tokens=45)
    return []


def attached(script: Script, folder: Path) -> list[Conversation]:
    """Without L3, with it, without it, and with it again."""
    server, prompt = script.server, random_tokens(100, 1)
    script.settle("detached")
    script.ask(("nothing is there", prompt))
    script.settle("attach")
    ours.attach(server, ours.attach_config(folder))
    script.settle()
    found = conversation(script)
    script.settle("detach")
    server.detach_storage()
    script.settle()
    script.ask(("not from L3", found.history))
    script.settle("attach again")
    ours.attach(server, ours.attach_config(folder))
    script.flush()
    script.ask(("from L3", found.history))
    return [found]


def fronts(script: Script, folder: Path) -> list[Conversation]:
    """The front of a hit is recomputed while its back is read: alone, of two, behind a prefix on
    the device, and of a request that is aborted meanwhile."""
    script.settle("a conversation from L3")
    found = conversation(script)
    script.settle("fronts")
    prompts = first_time(script, 330, (3, 4))
    script.flush()
    script.ask(("alone", [*prompts[0], 5]))
    script.flush()
    script.ask(("one", [*prompts[0], 6]), ("two", [*prompts[1], 6]))
    script.flush()
    script.ask(("a prefix", prompts[0][:100]))
    script.ask(("behind a prefix", [*prompts[0], 7]))
    script.flush()
    script.ask(("abort in prefetch", [*prompts[1], 8]))
    return [found]


def unfit(script: Script, folder: Path) -> list[Conversation]:
    """Pages that cannot be encoded: they are misses in host memory and in L3."""
    script.settle("unfit pages")
    prompts = first_time(script, 180, range(3))
    script.ask(("from the host", [*prompts[0], 5]))
    script.flush()
    script.ask(("from L3", [*prompts[1], 5]))
    return []


def prefill_server(script: Script, folder: Path) -> list[Conversation]:
    """A prefill server that sends to nobody: what it keeps and restores."""
    script.settle("a prefill server")
    to = {"bootstrap_host": NOBODY, "bootstrap_port": 1, "bootstrap_room": 7}
    prompt = random_tokens(150, 1)
    script.ask(("first", prompt), tokens=1, **to)
    script.flush()
    script.ask(("from L3", [*prompt, *random_tokens(40, 2)]), tokens=1, **to)
    script.ask(("from the device", [*prompt, 9]), tokens=1, **to)
    return []


def shared_tier(script: Script, folder: Path) -> list[Conversation]:
    """A shared tier answers, hangs, and is left alone."""
    script.settle("a shared tier")
    prompts = first_time(script, 100, range(2))
    script.flush()
    for page in (folder / "l3").glob("pages/??/*.page"):
        page.unlink()
    script.ask(("from the shared tier", [*prompts[0], 5]))
    script.flush()
    script.settle("it hangs")
    (folder / "hang").touch()
    script.ask(("in vain", [*prompts[1], 5]))
    script.flush()
    script.ask(("not asked", [*prompts[1], 6]))
    script.flush()
    script.ask(("what is on the disk", [*prompts[0], 6]))
    (folder / "hang").unlink()
    return []


def ranks(script: Script, folder: Path) -> list[Conversation]:
    """What both ranks agree on."""
    script.settle("a conversation from L3")
    found = conversation(script, turns=2)
    script.settle("aborts")
    script.ask(("abort in prefetch", [*found.history, *random_tokens(40, 4)]))
    script.ask(("abort in decode", [*found.history, 5]))
    return [found]


def slow_l3(script: Script, folder: Path) -> list[Conversation]:
    """Reading takes longer than computing: hits are refused once that is known."""
    script.settle("a slow L3")
    prompts = first_time(script, 150, range(2))
    script.flush()
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            script.ask((f"turn {turn} of {number}", [*prompt, turn]))
        script.flush()
    return []


def plain(script: Script, folder: Path) -> list[Conversation]:
    script.settle("a conversation from L3")
    return [conversation(script)]


def without_l3(model: Path, folder: Path) -> ServerOptions:
    env = ours.hidden_mode_env(
        profile=str(ours.slow_profile(folder)), partition=ours.partition(0, 4, 0)
    )
    options = ServerOptions(model, folder / "server.log", page_size=PAGE, extra_env=env)
    return traced(options)


def with_shared_tier(model: Path, folder: Path) -> ServerOptions:
    hcache = {"shared": {"backend": "file", "read_seconds": 0.5}, **KV}
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "shared")}
    return our_traced_server(model, folder, hcache, trace={}, extra_env=env)


SMALL = {"max_total_tokens": 512, "hicache_ratio": 2.0}
SOME_DO_NOT_FIT = {
    "max_total_tokens": 512,
    "hicache_ratio": 4.0,
    "dtype": "bfloat16",
    "extra_env": ours.faulty("third_pages_do_not_fit"),
}
OVERCOMMIT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "16"}
"""SGLang lets requests begin that will not fit, as if their replies were short."""
SCENARIOS = {
    "one server": Scenario(one_server, MIXED, {"chunked_prefill_size": 128}),
    "pressure": Scenario(pressure, KV, {**SMALL, "extra_env": OVERCOMMIT}),
    "attach and detach": Scenario(attached, {}, options_of=without_l3),
    "fronts": Scenario(fronts, {"recompute_ms": 1e4, **KV}, trace={"read_seconds": 3e-3}),
    "unfit pages": Scenario(unfit, {"codec": "exp4", **KV}, SOME_DO_NOT_FIT),
    "prefill server": Scenario(prefill_server, MIXED, server=PrefillServer),
    "shared tier": Scenario(shared_tier, {}, options_of=with_shared_tier),
    "two ranks": Scenario(ranks, MIXED, {"tp": 2}, ranks=2),
    "two stages": Scenario(ranks, {"partition": ours.partition(0, 1, 1)}, {"pp": 2}, ranks=2),
    "slow L3": Scenario(slow_l3, {"min_gain": 1.0, **KV}, trace={"read_seconds": 1.0}),
    "plain pages": Scenario(plain, {"mode": "plain"}),
}


@pytest.fixture(scope="module")
def model() -> Path:
    return build_model("llama", MODELS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=TRANSFER if "prefill" in name else ()) for name in SCENARIOS]
)
def test_traces(name: str, model: Path, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    if scenario.options_of is not None:
        options = scenario.options_of(model, tmp_path)
    else:
        how = {"trace": scenario.trace, **scenario.options}
        options = our_traced_server(model, tmp_path, scenario.hcache, **how)
    with scenario.server(options) as server:
        script = Script(server, scenario.ranks)
        conversations = scenario.use(script, tmp_path)
        found = script.lines()
        ours.assert_nothing_went_wrong(server)
    compare(f"{name.replace(' ', '_')}.txt", found)
    ours.assert_no_cache_output(model, conversations)
