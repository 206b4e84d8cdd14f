"""Servers whose prefetches go on batch by batch, as a test wants."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.server import Server, ServerOptions
from hcache_backend.cli.metrics_page import fetch
from hcache_backend.prefetch.reader import batch_pages
from tests.engine.harness.conversations import Conversation, ask, random_tokens
from tests.engine.harness.ours import assert_sound_own_pages, faulty, our_server, partition

PAGE = 16
STORED: dict[str, dict[str, Any]] = {
    "hidden": {"partition": partition(0, 4, 0), "recompute": "never"},
    "kv": {"mode": "kv", "recompute": "never"},
    "kv, from the back": {"mode": "kv", "recompute_ms": 1e4},
    "mixed": {"partition": partition(0, 2, 2), "recompute": "never"},
    "hidden, from the back": {"partition": partition(0, 4, 0), "recompute_ms": 1e4},
    "mixed, from the back": {"partition": partition(0, 2, 2), "recompute_ms": 1e4},
    "recompute": {"partition": partition(1, 3, 0)},
    "recompute, mixed": {"partition": partition(1, 2, 1)},
    "recompute, kv": {"partition": partition(1, 0, 3)},
}
FAULTS = "batches_in_step,disk"
"""All that :class:`tests.engine.harness.trouble.Trouble` needs."""


def eager_server(
    model: Path,
    folder: Path,
    stored: str,
    *,
    faults: str = "batches_in_step",
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
    **options: Any,
) -> ServerOptions:
    """A server that stores layers as ``stored`` says (see ``STORED``).

    While the file ``in-step`` exists, as it does to begin with, the scheduler sees every batch of a
    prefetch before the next one is read: all but the last are restored before the load. It checks
    in every turn that no page of the device is lost.
    """
    in_step = folder / "in-step"
    in_step.touch()
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    return our_server(
        model,
        folder,
        hcache=STORED[stored],
        metrics=True,
        extra_args=("--watchdog-timeout", "240", *extra_args),
        extra_env=env | faulty(faults, in_step) | dict(extra_env or {}),
        page_size=PAGE,
        **options,
    )


def read_batches(server: Server, most: int | None, front: int | None = None) -> None:
    """From now on no more than so many batches of each prefetch are read; None: all.

    Of what is read from the back, no more than ``front`` pages are recomputed; None: all.
    """
    numbers = ("inf" if number is None else str(number) for number in (most, front))
    tell_faults(server, " ".join(numbers))


def tell_faults(server: Server, text: str) -> None:
    in_step = server.options.log.parent / "in-step"
    new = in_step.with_suffix(".new")
    new.write_text(text)
    new.replace(in_step)


def counted(server: Server, what: str, event: str) -> float:
    """How often ``event`` happened so far, as the metric ``what`` says."""
    return fetch(server.url).counters[what].get(event, 0)


def tokens(server: Server, event: str) -> float:
    return counted(server, "tokens", event)


@contextmanager
def counting(server: Server, **events: str) -> Iterator[dict[str, float]]:
    """How often each of ``events`` happens in the block, once it is left: names of metrics, and of
    what they count."""
    grown = {event: -counted(server, what, event) for event, what in events.items()}
    yield grown
    for event, what in events.items():
        grown[event] += counted(server, what, event)


@contextmanager
def until_more(server: Server, what: str, event: str, count: int) -> Iterator[None]:
    """What the block starts has made `event` happen to so many more, as the metric `what` says."""

    wanted = counted(server, what, event) + count
    yield
    server.until(lambda: counted(server, what, event) >= wanted, f"{count} more {what} {event}")


def assert_fine(server: Server, stored: str) -> None:
    assert_sound_own_pages(server, "kv" if stored.startswith("kv") else "hidden")
    assert "restores while L3 is read (" not in server.log_text()
    assert "eak" not in server.log_text().replace("peak", "").replace("Peak", "")


def asked(server: Server, *prompts: list[int]) -> Sequence[Conversation]:
    """Conversations of one turn, all at once."""
    return ask(server, prompts, flush=False, concurrent=True)


BATCH = PAGE * batch_pages((800 - 1) // PAGE)
"""Tokens of a batch of a prefetch of 800 tokens."""


def stored(server: Server, seed: int, count: int = 800) -> list[int]:
    """A prompt that is in L3, and nowhere else."""
    prompt = random_tokens(count, seed)
    server.generate(prompt, 1)
    server.flush_cache()
    return prompt
