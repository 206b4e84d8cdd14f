"""What the store's work costs a decoding request, per token.

SGLang serves a random Llama on the CPU and answers the same request again and again, in turn

- ``idle``: nothing else happens
- ``same process``: a thread of the scheduler's process writes, reads and deletes pages of 2 MiB
- ``other process``: a process of its own does, which takes the same CPU and disk but not the
  interpreter lock of the scheduler

Ratios are medians of the ratios to the idle turns of the same round.
"""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from bench.harness.models import TinyLlama
from bench.harness.options import ServerOptions, base_environment
from bench.harness.program import Program, Run, Setting, at_least, scratch
from bench.harness.report import Results, Table, columns
from bench.harness.server import Server
from hcache_backend.config import parse_config
from hcache_backend.store import PageStore

_SHAPE = TinyLlama()
"""So small that a token is mostly Python: what the interpreter lock costs shows at its worst."""
_PAGE, _BATCH = 2 << 20, 64
_NAMESPACE, _WRITER = b"bench-----------", b"bench---"
_TURNS = ("idle", "same process", "other process")


def measure(run: Run) -> Results:
    """A row for each kind of turn."""
    with scratch(run.given.dir) as folder:
        found, moved = in_turns(Path(folder), run.given.rounds, run.given.tokens)
    rows = [
        {
            "turn": turn,
            "ms": median(found[turn]),
            "of_idle": median(a / b for a, b in zip(found[turn], found["idle"], strict=True)),
            "gb_moved": moved[turn] / 1e9,
            "rounds_ms": found[turn],
        }
        for turn in _TURNS
    ]
    return {"rows": rows}


def in_turns(
    folder: Path, rounds: int, tokens: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Milliseconds per token in every round, and the bytes moved meanwhile, by turn."""
    found: dict[str, list[float]] = {turn: [] for turn in _TURNS}
    moved = dict.fromkeys(_TURNS, 0)
    places = {turn: folder / turn.split()[0] for turn in _TURNS[1:]}
    for place in places.values():
        place.mkdir()
    with _server(folder, places["same process"]) as server, _mover(places["other process"]):
        for number in range(-1, rounds):
            for turn in random.Random(number).sample(_TURNS, len(_TURNS)):
                with _moving(places.get(turn)) as amounts:
                    start = time.perf_counter()
                    server.generate([1, 2, 3], tokens)
                    elapsed = time.perf_counter() - start
                if number >= 0:  # the first round does more
                    found[turn].append(elapsed / tokens * 1e3)
                    moved[turn] += sum(amounts)
            print(f"{number + 1} of {rounds} rounds", flush=True)
    return found, moved


def move(folder: Path) -> None:
    """Write, read and delete batches of pages while the file ``go`` is there; never returns.

    A batch adds a line with its bytes, written and read, to the file ``moved``. Between turns there
    is the file ``rests``.
    """
    pages = [[memoryview(mmap.mmap(-1, _PAGE))] for _ in range(_BATCH)]
    for [page] in pages:
        page[:] = os.urandom(_PAGE)
    config = parse_config({"dirs": [str(folder / "store")], "min_free_bytes": 0}, "bench")
    with closing(PageStore(config, _WRITER)) as store:
        while True:
            if not (folder / "go").exists():
                (folder / "rests").touch()
                time.sleep(0.01)
                continue
            (folder / "rests").unlink(missing_ok=True)
            keys = [os.urandom(32) for _ in pages]
            done = store.put(_NAMESPACE, keys, pages) + store.get(_NAMESPACE, keys, pages)
            store.drop(_NAMESPACE)
            with (folder / "moved").open("a") as moved:
                moved.write(f"{sum(done) * _PAGE}\n")


@contextmanager
def _server(folder: Path, place: Path) -> Iterator[Server]:
    """A server whose scheduler's process moves pages in ``place``."""
    root = str(Path(__file__).parents[2])
    config = {"backend_name": "mover", "module_path": "bench.store.mover", "class_name": "Mover"}
    options = ServerOptions(
        model=_SHAPE.build(folder),
        log=folder / "server.log",
        storage_backend="dynamic",
        extra_config={**config, "folder": str(place)},
        extra_env={"PYTHONPATH": os.pathsep.join((root, base_environment("cpu")["PYTHONPATH"]))},
    )
    with Server(options) as server:
        yield server


@contextmanager
def _mover(place: Path) -> Iterator[None]:
    """A process that moves pages in ``place``."""
    code = f"from bench.store.decode import move, Path; move(Path({str(place)!r}))"
    mover = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])
    try:
        yield
    finally:
        mover.kill()
        mover.wait()


@contextmanager
def _moving(place: Path | None) -> Iterator[list[int]]:
    """Have pages moved in ``place``; the list has the bytes of every batch when the block ends."""
    amounts: list[int] = []
    if place is None:
        yield amounts
        return
    log, go = place / "moved", place / "go"
    before = len(log.read_text().split()) if log.exists() else 0
    go.touch()
    try:
        yield amounts
    finally:
        go.unlink()
        while not (place / "rests").exists():  # the batch that has begun
            time.sleep(0.01)
        amounts += map(int, log.read_text().split()[before:] if log.exists() else ())


PROGRAM = Program(
    name="store_decode",
    module="bench.store.decode",
    doc=__doc__,
    measure=measure,
    settings=(
        Setting("--dir", Path, Path(tempfile.gettempdir()), "the disk"),
        Setting("--rounds", at_least(1), 9, "of all turns"),
        Setting("--tokens", at_least(1), 200, "of a reply"),
    ),
    tables={
        "table": (
            Table(
                "rows",
                columns(
                    "store = turn | ms per token = ms | of idle = of_idle | GB moved = gb_moved"
                ),
            ),
        )
    },
)

if __name__ == "__main__":
    PROGRAM.run()
