"""Damaged and hostile bytes of all kinds that we read: a miss, a named error, or the right page."""

import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
import yaml
from store_testing import (
    NAMESPACE,
    assert_right_or_miss,
    content,
    get,
    key,
    keys,
    look_after,
    open_quiet,
    page_files,
    put,
    there,
)
from typer.testing import CliRunner

from hcache_backend.cli.main import app
from hcache_backend.config import ConfigError, HCacheConfig, load_table, parse_config
from hcache_backend.format import file as page_file
from hcache_backend.format.envelope import CHECKSUM, PageName, parse_name
from hcache_backend.format.page import PageLayout, hidden_layer, kv_layer
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, Shard
from hcache_backend.plan.profile import load_profile, preset_profile
from hcache_backend.plan.record import PartitionRecord, find_record
from hcache_backend.server_report import ServerReport, read_report, write_report
from hcache_backend.store.maintenance import _recover

pytestmark = pytest.mark.long

SEED = 20261129
SECONDS = 5.0
"""No input takes longer."""

Kind = Callable[[random.Random, Path], Iterator[str]]
"""Tries inputs one after the other, and says what became of each."""


def damaged(chance: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One fault, or some, of a disk or of a writer."""
    changed = bytearray(data)
    place = chance.randrange(max(1, len(data)))
    length = chance.choice((1, 4, 8, 512, 4096))
    match chance.randrange(8):
        case 0:
            for _ in range(chance.choice((1, 2, 8))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        case 1:
            del changed[place:]
        case 2:
            changed += chance.randbytes(length)
        case 3:
            changed[place : place + length] = bytes(len(changed[place : place + length]))
        case 4:
            changed[place : place + length] = chance.randbytes(len(changed[place : place + length]))
        case 5:
            changed[place : place + length] = other[place : place + length]
        case 6:
            number = chance.choice((0, 1, 2**31 - 1, 2**32 - 1, 2**63, chance.randrange(2**16)))
            size = chance.choice((2, 4, 8))
            changed[place : place + size] = number.to_bytes(8, "little")[:size]
        case _:
            changed = bytearray(chance.randbytes(len(data)))
    return bytes(changed)


def page_bytes(chance: random.Random, folder: Path) -> Iterator[str]:
    """Page files of an open store."""
    store = open_quiet(folder)
    put(store, 1, 2)
    path, other_path = sorted(page_files(folder), key=lambda path: key(2).hex() in path.name)
    other = other_path.read_bytes()
    original = path.read_bytes()
    while True:
        path.write_bytes(damaged(chance, original, other))
        found = get(store, 1)
        assert found in (None, content(key(1)))
        yield "a miss" if found is None else "right"
        if path.exists():
            path.write_bytes(original)
        else:
            assert put(store, 1) == [True]
        assert get(store, 1) == content(key(1)), "a fault of one file is one of the folder"


def headers(chance: random.Random, folder: Path) -> Iterator[str]:
    """Headers of page files whose checksum is right, as a writer may make them."""
    table = SegmentTable((Segment(4096), Segment(2 * 4096, 2, 1), Segment(2 * 4096, 2, 4)))
    layout = page_file.file_layout(table, Shard(1, 2))
    name = PageName(NAMESPACE, key(1), Shard(1, 2))
    packed = memoryview(bytearray(layout.header_bytes))
    page_file.pack_header(packed, name, b"writer-1", layout, range(len(layout.units)))
    fields = CHECKSUM.stop + 16 + 32 + 8
    places = [*range(4, 16), *range(fields, fields + 24 + 8 + 3 * 12)]
    while True:
        header = bytearray(packed)
        for _ in range(chance.choice((1, 1, 2, 4))):
            place, size = chance.choice(places), chance.choice((1, 2, 4))
            header[place : place + size] = chance.randbytes(size)
        rest = header[: CHECKSUM.start] + header[CHECKSUM.stop :]
        header[CHECKSUM] = xxhash.xxh3_128_digest(bytes(rest))
        try:
            page_file.parse_header(memoryview(header))
            yield "a header"
        except page_file.DamagedFileError as error:
            yield re.sub(r"[\d-]+", "N", str(error))[:30]


def host_pages(chance: random.Random, folder: Path) -> Iterator[str]:
    """Pages as other machines send them, half of them with a right checksum of the header."""
    layout = PageLayout(16, (hidden_layer(16, 16, 8), kv_layer(16, 16, 16, 2, 1)))
    sealed = np.random.default_rng(SEED).integers(0, 256, layout.page_bytes, dtype=np.uint8)
    layout.seal(sealed, NAMESPACE, key(1), b"writer-1")
    ids = layout.token_ids(sealed).copy()
    while True:
        changed = damaged(chance, sealed.tobytes(), chance.randbytes(len(sealed)))
        page = np.frombuffer(changed[: len(sealed)].ljust(len(sealed), b"\0"), np.uint8).copy()
        forged = chance.random() < 0.5
        if forged:
            page[CHECKSUM] = np.frombuffer(layout._checksum_now(page), np.uint8)
        problem = layout.problem(page, NAMESPACE, key(1), ids)
        same = np.array_equal(page[layout.header_bytes :], sealed[layout.header_bytes :])
        assert problem or same, "other K and V than those that were sealed"
        yield problem or "right"


def indexes(chance: random.Random, folder: Path) -> Iterator[str]:
    """The index of a store that is opened again, twice."""
    for number in range(1 << 30):
        store = open_quiet(folder / str(number % 8), quota_bytes=1 << 30)
        put(store, *range(6))
        store.close()
        index = folder / str(number % 8) / "index" / "index.sqlite"
        index.write_bytes(damaged(chance, index.read_bytes(), chance.randbytes(1 << 16)))
        if chance.random() < 0.2:
            index.with_name(f"{index.name}-journal").write_bytes(chance.randbytes(5000))
        hits = []
        for _ in range(2):
            store = open_quiet(folder / str(number % 8), quota_bytes=1 << 30)
            there(store, *range(6))
            hits.append(assert_right_or_miss(store, *range(6)))
            put(store, 6)
            store.use(NAMESPACE, keys(range(6)))
            store.flush()
            look_after(store)
            store.drop(b"nobody's pages--")
            _recover(store.disks[0], threading.Event())
            look_after(store)
            store.close()
        store = open_quiet(folder / str(number % 8), quota_bytes=1 << 30)
        for _ in range(3):  # a broken tree may take a page and not find it, until it is made anew
            put(store, *range(6))
            look_after(store)
            _recover(store.disks[0], threading.Event())
        assert all(put(store, *range(6))) and assert_right_or_miss(store, *range(6)) == 6
        store.close()
        if hits[1] < 6:  # SQLite sees nothing wrong with fewer rows
            yield "misses until pages are stored again"
        else:
            yield "at once" if hits[0] == 6 else "when the files were read again"


VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "auto", "500GB"),
    *("1,5TB", "\0", "~nobody-here/x", "/tmp/x", "\udce9", "[/red]", [], [1], ["/a", "/a"], {}),
    *({"recompute": 1, "hidden": 2, "kv": 3}, {"backend": "file"}, {"a": {"b": []}}, "kv", "exp4"),
)


def tables(chance: random.Random, folder: Path) -> Iterator[str]:
    """Tables of options."""
    known = [*HCacheConfig.model_fields, "quota", "", "shared.backend", "dirs "]
    while True:
        names = chance.sample(known, chance.randrange(4))
        try:
            parse_config({name: chance.choice(VALUES) for name in names}, "a test")
            yield "accepted"
        except ConfigError as error:
            assert "a test" in str(error)
            yield "refused"


def texts(chance: random.Random, folder: Path) -> Iterator[str]:
    """Files of options."""
    table = {"hcache": {"dirs": ["/mnt/a", "/mnt/b"], "quota_bytes": "500GB", "mode": "kv"}}
    toml = '[hcache]\ndirs = ["/mnt/a", "/mnt/b"]\nquota_bytes = "500GB" # a comment\nmode = "kv"\n'
    whole = {".json": json.dumps(table), ".toml": toml, ".yaml": yaml.safe_dump(table)}
    while True:
        ending = chance.choice(list(whole))
        path = folder / f"options{ending}"
        path.write_bytes(damaged(chance, whole[ending].encode(), b"[{:,\n\t#\0\xff&*!%@`" * 40))
        try:
            load_table(f"@{path}", "a test")
            yield "read"
        except ConfigError as error:
            assert str(path) in str(error)
            yield "refused"


def sidecars(chance: random.Random, folder: Path) -> Iterator[str]:
    """What servers leave in a folder for other servers and for the command line."""
    report = ServerReport(
        time=1e9, model="m", mode="kv", pages="own", reason=None, codec="exp3", projection=()
    )
    write_report(folder, report)
    record = PartitionRecord(
        model="m", reason="r", recompute=0, hidden=1, kv=1, shape=None, tokens=64, tp=1, l3="none"
    )
    (folder / "partition-a.json").write_text(record.model_dump_json())
    preset_profile("h100").save(folder / "profile-a.json")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    while True:
        path = chance.choice(list(files))
        path.write_bytes(damaged(chance, files[path], b'{}[]":,0123456789eE+-.\\u' * 200))
        found = [read_report(folder), find_record([folder], "partition-a.json")]
        with suppress(ConfigError):
            found.append(load_profile(folder / "profile-a.json"))
        yield f"{sum(map(bool, found))} of 3 read"
        path.write_bytes(files[path])


def file_names(chance: random.Random, folder: Path) -> Iterator[str]:
    """Names in the buckets of a folder."""
    right = PageName(NAMESPACE, key(1), WHOLE).file
    while True:
        name = damaged(chance, right.encode(), right.encode()[::-1]).decode("latin-1")
        found = parse_name(name)
        assert found is None or found.file == name
        yield "a page's" if found else "another's"


def commands(chance: random.Random, folder: Path) -> Iterator[str]:
    """Arguments of the command line; it ends with a status and a text."""
    put(open_quiet(folder), 1)
    store, plan = ["-d", str(folder)], ["-m", "gpt2", "-w", "h100"]
    given = [
        *(["--json"], ["--limit", "1"], ["--limit", "-1"], ["--quota-bytes", "4GB"], store, plan),
        *(["--quota-bytes", "1e9"], ["--namespace", "[/red]"], ["--tp", "3"], ["--tokens", "60K"]),
        *(["--tokens", "0"], ["\udce9"], [""], ["-d"], ["--nothing"], ["--repair"], ["--rebuild"]),
    ]
    names = dict.fromkeys(("stats", "ls", "verify", "gc", "config"), store)
    names |= {"plan": plan, "size": ["-m", "gpt2"], "nothing": []}
    while True:
        command = chance.choice(list(names))
        arguments = [one for some in chance.choices(given, k=chance.randrange(3)) for one in some]
        arguments += names[command]
        result = CliRunner().invoke(app, [command, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        assert result.exit_code == 0 or result.output
        yield f"{command} {result.exit_code}"


KINDS: dict[Kind, int] = {
    page_bytes: 15_000,
    headers: 25_000,
    host_pages: 20_000,
    indexes: 1_500,
    tables: 20_000,
    texts: 10_000,
    sidecars: 12_000,
    file_names: 5_000,
    commands: 500,
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_a_miss_or_a_named_error(
    kind: Kind, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    outcomes, inputs = Counter[str](), kind(random.Random(SEED), tmp_path)
    for _ in range(KINDS[kind]):
        start = time.perf_counter()
        outcomes[next(inputs)] += 1
        assert time.perf_counter() - start < SECONDS
    print(f"{kind.__name__}: {KINDS[kind]} inputs, {dict(outcomes.most_common())}")
    record_property("inputs", KINDS[kind])
    record_property("outcomes", dict(outcomes.most_common(8)))
    assert len(outcomes) > 1, "all inputs had one outcome: this tries nothing"
