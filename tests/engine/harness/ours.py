"""Servers with our backend, and what tests ask about what they stored and said."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness.options import hcache_config
from bench.harness.server import CachedTokens, Server, ServerOptions
from hcache_backend.plan.profile import Profile, Rate
from tests.cpu_engine.hcache_cpu_engine import cpu_engine_env

from .conversations import Conversation, Turn, turns_of
from .reference import assert_equal_or_tie, assert_equal_tokens, load_reference

TIE_NATS = 0.126
"""In bfloat16 a token may differ where the two best of the no-cache run are closer than this: their
logits are neighbours, an eighth apart between 16 and 32."""
TIE_FLOAT32 = 1e-4
"""Logits of two engines differ by about 1e-5 in float32: among tens of thousands of tokens of a
random model some are closer to the best one than this, and either may win."""


CHECKED: dict[str, Any] = {"mode": "hidden", "check_every_pages": 1}
"""Options of ours that tests begin with: every page is checked."""
EVERY_HIT: dict[str, Any] = {"min_gain": 0}
"""Every L3 hit is read, however slow this machine is at the moment."""


def partition(recompute: int, hidden: int, kv: int) -> dict[str, int]:
    return {"recompute": recompute, "hidden": hidden, "kv": kv}


def attach_config(folder: Path, **options: Any) -> dict[str, Any]:
    """Extra config of an attach: these options of ours, the others are what the server has."""
    return hcache_config(folder / "l3", **(EVERY_HIT | options))


def extra_config(folder: Path, **options: Any) -> dict[str, Any]:
    """Extra config of a server that starts with our backend and these options of ours."""
    return attach_config(folder, **(CHECKED | options))


def hidden_mode_env(**options: Any) -> dict[str, str]:
    """Environment for hidden mode where the L3 backend is another one, or none yet."""
    return {"HCACHE_ENABLE": "1", "HCACHE_CONFIG": json.dumps(CHECKED | EVERY_HIT | options)}


def our_server(
    model: Path, folder: Path, *, hcache: dict[str, Any] | None = None, **options: Any
) -> ServerOptions:
    return ServerOptions(
        model=model,
        log=options.pop("log", folder / "server.log"),
        storage_backend="dynamic",
        extra_config=extra_config(folder, **(hcache or {})),
        **options,
    )


def slow_profile(folder: Path, device: str = "none", **seconds: float) -> Path:
    """A machine where a layer takes so long, whatever the number of tokens."""
    rates = {
        name: Rate(seconds=seconds.get(name, 1e-6), per_second=1e18)
        for name in ("hidden_copy", "kv_load", "projection", "dense", "attention")
    }
    path = folder / f"profile-of-{device}.json"
    Profile(device=device, source="a test", dtype="float32", l3=None, **rates).save(path)
    return path


def file_backend(
    model: Path, folder: Path, *, extra_env: Mapping[str, str] | None = None, **options: Any
) -> ServerOptions:
    """Options of a server with SGLang's own file backend in `folder`."""
    return ServerOptions(
        model=model,
        log=folder / "server.log",
        storage_backend="file",
        extra_config={"prefetch_threshold": 16},
        extra_env={
            "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "l3"),
            **(extra_env or {}),
        },
        **options,
    )


def attach(server: Server, config: Mapping[str, Any], **policies: str) -> None:
    answer = server.attach_storage("dynamic", config, **policies)
    assert answer.status_code == 200, answer.text


def stored_pages(folder: Path) -> list[Path]:
    return sorted((folder / "l3").glob("**/*.page"))


def flip_bit(path: Path, at: int, bit: int = 0) -> None:
    """Change a bit of the byte `at` of a file; a negative place counts from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def assert_hidden_mode(server: Server) -> None:
    log = server.log_text()
    assert "hcache: hidden mode:" in log
    assert "KV mode" not in log


def assert_own_pages_of_kv(server: Server) -> None:
    log = server.log_text()
    assert "hcache: KV mode, own pages: " in log
    assert "hcache: own pages: " in log
    assert "plain pages" not in log


def projections(server: Server) -> list[str]:
    """What the server said about how it projects, a line for each kind of layers."""
    found: list[str] = re.findall(r"hcache: projection: (.*)", server.log_text())
    return found


def assert_nothing_went_wrong(server: Server) -> None:
    """No check failed, nothing of ours or of HiCache raised."""
    log = server.log_text()
    failures = ("storage get failed", "storage set failed", "did not assemble")
    for sign in ("self-check", "not captured", *failures):
        assert sign not in log, sign
    assert "Exception in thread" not in log


def assert_sound_hidden_mode(server: Server) -> None:
    assert_hidden_mode(server)
    assert_nothing_went_wrong(server)


def assert_sound_own_pages(server: Server, mode: str) -> None:
    """Own pages with hidden states (mode `hidden`), or of K and V (`kv`); nothing went wrong."""
    if mode == "hidden":
        assert_hidden_mode(server)
    else:
        assert_own_pages_of_kv(server)
    assert_nothing_went_wrong(server)


def assert_no_cache_output(model: Path, conversations: Sequence[Conversation]) -> None:
    """Every reply is, token for token, what the model says without any cache (float32).

    The reply is fed to transformers in one pass: it is the greedy continuation if and only if each
    of its tokens is the best one after those before it.
    """
    for turn in turns_of(conversations):
        assert_equal_tokens(turn.reply.output_ids, best_tokens(model, turn))


def assert_no_cache_output_up_to_ties(
    model: Path, folder: Path, conversations: Sequence[Conversation], tp: int = 1
) -> None:
    """The rule for bfloat16; the reference is this engine without any cache, of ``tp`` ranks:
    sums of two ranks are rounded once more than one rank's."""
    plain = ServerOptions(model, folder / "plain.log", cache="none", dtype="bfloat16", tp=tp)
    with Server(plain) as server:
        for turn in turns_of(conversations):
            want = server.generate(turn.prompt, len(turn.reply.output_ids), logprobs=True)
            assert want.cached == CachedTokens(0, 0, 0)
            assert_equal_or_tie(turn.reply.output_ids, want.output_ids, want.top2, TIE_NATS)


def assert_no_cache_replies_up_to_ties(model: Path, turns: Sequence[Turn]) -> None:
    """Each token of a float32 reply is the best one without any cache, up to `TIE_FLOAT32`."""
    for turn in turns:
        logits, reply = _logits(model, turn), turn.reply.output_ids
        behind = logits.max(-1).values - logits[range(len(reply)), reply]
        assert behind.max() <= TIE_FLOAT32, (
            f"token {int(behind.argmax())} of {len(reply)} is {float(behind.max())} behind the "
            f"best one without a cache; {turn.cached}"
        )


def best_tokens(model: Path, turn: Turn) -> list[int]:
    """For each place of the reply, the best token after the prompt and the reply before it."""
    best: list[int] = _logits(model, turn).argmax(-1).tolist()
    return best


def _logits(model: Path, turn: Turn) -> Any:
    """Logits of each place of the reply, by transformers: float32 `[tokens, vocabulary]`."""
    import torch

    reply = turn.reply.output_ids
    with torch.inference_mode():
        return load_reference(model)(
            input_ids=torch.tensor([turn.prompt + reply[:-1]]), logits_to_keep=len(reply)
        ).logits[0]


def likeliest(model: Path, conversations: Sequence[Conversation]) -> float:
    """Share of the tokens behind restored histories that are the model's most likely ones."""
    turns = [turn for conversation in conversations for turn in conversation.turns[1:]]
    pairs = [
        pair
        for turn in turns
        for pair in zip(turn.reply.output_ids, best_tokens(model, turn), strict=True)
    ]
    return sum(got == want for got, want in pairs) / len(pairs)


def assert_restored_from_l3(conversations: Sequence[Conversation], page_size: int) -> None:
    """Every turn after the first got all whole pages of its history from storage."""
    for conversation in conversations:
        for turn in conversation.turns[1:]:
            assert turn.cached.storage >= turn.history_tokens - page_size, turn.cached


def faulty(name: str, trigger: Path | None = None, stage: int | None = None) -> dict[str, str]:
    """Environment of a server with the faults `name` of tests/engine/faults, active while `trigger`
    exists (always, without one), in the pipeline stage `stage` (all, without one)."""
    here, root = Path(__file__).parents[1], Path(__file__).parents[3]
    paths = [str(here / "faults"), str(root), cpu_engine_env()["PYTHONPATH"]]
    env = {"HCACHE_TEST_FAULT": name, "PYTHONPATH": os.pathsep.join(paths)}
    if stage is not None:
        env["HCACHE_TEST_STAGE"] = str(stage)
    return env if trigger is None else {**env, "HCACHE_TEST_TRIGGER": str(trigger)}


def told(server: Server, report: Path) -> Any:
    """What the faults `report_...` write into the file `report`."""
    report.touch()
    server.until(lambda: bool(report.read_text()), "a report")
    text = report.read_text()
    report.unlink()
    return json.loads(text)


def holdings(server: Server, report: Path) -> dict[str, int]:
    """What the scheduler holds, once what a detach ends has ended: ten times the same in a row."""
    seen: list[dict[str, int]] = []

    def settled() -> bool:
        seen.append(told(server, report))
        last = [(held["threads"], held["descriptors"]) for held in seen[-10:]]
        return len(last) == 10 and len(set(last)) == 1

    server.until(settled, "threads and descriptors to stay as they are")
    return seen[-1]
