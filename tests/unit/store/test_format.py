"""Page files: what version 2 wrote stays readable, and no changed byte goes unnoticed."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_testing import (
    FILE,
    NAMESPACE,
    PAGE,
    content,
    damage,
    get,
    key,
    memory,
    open_quiet,
    page_files,
    payload,
    put,
)

from hcache_backend.format.envelope import PageName, check_names, parse_name
from hcache_backend.format.file import DamagedFileError, file_layout, parse_header
from hcache_backend.format.units import WHOLE, Segment, SegmentTable, Shard, units_of
from hcache_backend.store import PageStore
from hcache_backend.store.maintenance import find_unknown_files

FIXTURES = Path(__file__).parent / "fixtures"
LAYERS = SegmentTable(
    (Segment(512), Segment(8192, 8), Segment(8192, 4, 2), Segment(8192, 4), Segment(8192, 8))
)


def test_version_2_files_stay_readable(tmp_path: Path) -> None:
    """The files in ``fixtures`` were written by version 2 and are never written again."""
    folder = tmp_path / "store"
    store = open_quiet(folder)
    fixtures = sorted(FIXTURES.glob("*.page"))
    assert len(fixtures) == 3
    for fixture in fixtures:
        bucket = folder / "pages" / parse_name(fixture.name).bucket
        bucket.mkdir(exist_ok=True)
        shutil.copy(fixture, bucket)
    with store.disks[0].use() as opened:
        assert find_unknown_files(opened, adopt=True).adopted == 3
    whole, shared = memory(LAYERS.page_bytes), memory(LAYERS.page_bytes)
    assert store.get(NAMESPACE, [key(1), key(2)], [[whole], [shared]]) == [True, True]
    assert bytes(whole) == content(key(1), LAYERS.page_bytes)
    assert bytes(shared) == content(key(2), LAYERS.page_bytes)


def damaged_versions(original: bytes) -> Iterator[tuple[str, bytes]]:
    yield "longer", original + bytes(4096)
    for position in range(4096):
        changed = bytearray(original)
        changed[position] ^= 0xFF
        yield f"header byte {position}", bytes(changed)
    chance = random.Random(5)
    for _ in range(2000):
        bit = chance.randrange(4096 * 8, (4096 + PAGE) * 8)
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        yield f"payload bit {bit}", bytes(changed)


@pytest.fixture
def page(store: PageStore) -> Path:
    """The file of page 1, which stays when it is found damaged."""
    put(store, 1)
    store.disks[0]._discard = lambda *ignored: None
    [path] = page_files(store.disks[0].path)
    return path


def test_any_changed_byte_is_a_miss(page: Path, store: PageStore) -> None:
    original, target = page.read_bytes(), memory(PAGE)
    assert len(original) == FILE
    with page.open("r+b", buffering=0) as file:
        for what, changed in (*damaged_versions(original), ("as it was", original)):
            file.seek(0)
            file.write(changed)
            file.truncate(len(changed))
            found = store.get(NAMESPACE, [key(1)], [[target]])
            assert found == [what == "as it was"], what


@pytest.mark.parametrize("shard", [WHOLE, Shard(1, 2), Shard(3, 8)])
def test_a_changed_byte_at_either_end_of_any_unit_is_a_miss(
    tmp_path: Path, store: PageStore, shard: Shard
) -> None:
    own = payload(content(key(1), LAYERS.page_bytes), LAYERS, shard)
    store.put(NAMESPACE, [key(1)], [[memory(own)]], shard=shard, table=LAYERS)
    [path] = page_files(tmp_path / "store")
    store.disks[0]._discard = lambda *ignored: None  # type: ignore[method-assign]
    layout, target = file_layout(LAYERS, shard), memory(len(own))
    with path.open("r+b", buffering=0) as file:
        for unit in layout.units:
            for place in (unit.payload_offset, unit.payload_offset + unit.length - 1):
                for byte in (own[place] ^ 1, own[place]):
                    file.seek(layout.header_bytes + place)
                    file.write(bytes([byte]))
                    found = store.get(NAMESPACE, [key(1)], [[target]], shard=shard)
                    assert found == [byte == own[place]], unit


@pytest.mark.parametrize("step", [37, pytest.param(1, marks=pytest.mark.long)])
def test_any_truncated_length_is_a_miss(page: Path, store: PageStore, step: int) -> None:
    target = memory(PAGE)
    with page.open("r+b", buffering=0) as file:
        lengths = {*range(4200), *range(4200, FILE, step), FILE - 1}
        for length in sorted(lengths, reverse=True):
            file.truncate(length)
            assert store.get(NAMESPACE, [key(1)], [[target]]) == [False], length


def test_a_damaged_page_is_deleted_and_can_be_stored_again(
    tmp_path: Path, store: PageStore
) -> None:
    put(store, 1)
    [path] = page_files(tmp_path / "store")
    path.write_bytes(path.read_bytes() + b"\x00")
    assert get(store, 1) is None
    assert store.stats.bad_pages == 1
    assert page_files(tmp_path / "store") == []
    assert store.exists(NAMESPACE, [key(1)]) == [False]
    assert put(store, 1) == [True]
    assert get(store, 1) == content(key(1))


def test_a_page_under_another_name_is_a_miss(tmp_path: Path, store: PageStore) -> None:
    put(store, 1, 2)
    files = page_files(tmp_path / "store")
    for file, data in zip(files, [file.read_bytes() for file in reversed(files)], strict=True):
        file.write_bytes(data)
    assert get(store, 1) is get(store, 2) is None


def test_every_unit_is_verified_alone(tmp_path: Path, store: PageStore) -> None:
    """Of a damaged file that several ranks read, no other shard than the damaged one is lost."""
    original = content(key(1), LAYERS.page_bytes)
    store.put(NAMESPACE, [key(1)], [[memory(original)]], table=LAYERS)
    [path] = page_files(tmp_path / "store")
    units = (unit for unit in units_of(LAYERS) if (unit.segment, unit.eighths) == (4, 1 << 7))
    damage(path, file_layout(LAYERS, WHOLE).header_bytes + next(units).page_offset)
    for number in range(8):
        wanted = payload(original, LAYERS, Shard(number, 8))
        target = memory(len(wanted))
        found = store.get(NAMESPACE, [key(1)], [[target]], shard=Shard(number, 8))
        assert found == [number != 7]
        assert number == 7 or bytes(target) == wanted


def test_names_are_made_of_hexadecimal_digits_only() -> None:
    page = PageName(b"../../../../../.", b"/etc/passwd\x00" + b"/" * 20, Shard(1, 2))
    name = page.file
    assert page.bucket == "2f"
    assert "/" not in name
    assert parse_name(name) == page
    for wrong in ("x" + name, name + "x", name.replace("1of2", "2of2"), name.upper()):
        assert parse_name(wrong) is None


@pytest.mark.parametrize("bad", [b"", b"k" * 31, b"k" * 33, "k" * 32, None])
def test_what_is_no_key_is_refused(store: PageStore, bad: object) -> None:
    with pytest.raises(ValueError, match="a key is 32 bytes"):
        check_names(NAMESPACE, [bad])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a key is 32 bytes"):
        store.exists(NAMESPACE, [bad])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a namespace is 16 bytes"):
        store.exists(bad, [key(1)])  # type: ignore[arg-type]


def test_a_table_that_does_not_divide_is_refused() -> None:
    for segment, said in (
        (Segment(100, 8), "has 100 bytes in 8 groups of 1 units"),
        (Segment(64, 4, 3), "has 64 bytes in 4 groups of 3 units"),
        (Segment(96, 3), "has 3 groups; there are 1, 2, 4 or 8"),
    ):
        with pytest.raises(ValueError, match=f"segment 1 {said}"):
            SegmentTable((Segment(64, 8), segment))
    for number, of in ((2, 2), (0, 3)):
        with pytest.raises(ValueError, match=f"shard {number} of {of}"):
            file_layout(LAYERS, Shard(number, of))


@pytest.mark.parametrize("version", [1, 3])
def test_a_file_of_another_version_says_so_and_is_a_miss(
    page: Path, store: PageStore, version: int
) -> None:
    data = bytearray(page.read_bytes())
    data[4] = version
    page.write_bytes(data)
    with pytest.raises(DamagedFileError, match=f"format version {version}; this is version 2"):
        parse_header(memoryview(data))
    assert get(store, 1) is None
