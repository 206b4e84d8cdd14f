"""Shares of pages: every rank has the memory of its own share, and reads what others wrote."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_testing import (
    NAMESPACE,
    content,
    damage,
    key,
    memory,
    open_quiet,
    ops_that,
    page_files,
    payload,
    without_direct_io,
)

from hcache_backend.format.file import file_layout, parse_header
from hcache_backend.format.units import ALL_EIGHTHS, WHOLE, Segment, SegmentTable, Shard, units_of
from hcache_backend.store import FileOps, PageStore
from hcache_backend.store.file_ops import MAX_VECTORS

LAYERS = SegmentTable(
    (
        Segment(4096),
        Segment(32768, 8),
        Segment(32768, 8, 2),
        Segment(32768, 8),
        Segment(4096),
        Segment(32768, 8),
    )
)
PAGE_1 = content(key(1), LAYERS.page_bytes)
UNTOUCHED = 0xEE

COUNTS = (1, 2, 4, 8)
SHARES = [Shard(number, of) for of in COUNTS for number in range(of)]

segments = st.builds(
    lambda groups, pieces, unit: Segment(unit * groups * pieces, groups, pieces),
    st.sampled_from(COUNTS),
    st.integers(1, 3),
    st.sampled_from([1, 3, 64, 511, 512, 4096]),
)
tables = st.lists(segments, min_size=1, max_size=5).map(lambda found: SegmentTable(tuple(found)))
some_shares = st.sampled_from(SHARES)


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageStore]:
    """A store for many examples: opening one for each would take the time."""
    path = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hcache_backend.store.folder.BUFFER_BYTES", 8192)
        store = open_quiet(path / "a", path / "b")
    yield store
    store.close()


def split(view: memoryview, cut: int) -> list[memoryview]:
    """A page's memory in two parts."""
    cut = min(cut, len(view))
    return [view[:cut], view[cut:]]


def put_share(
    store: PageStore,
    shard: Shard,
    table: SegmentTable = LAYERS,
    *,
    page: bytes = b"",
    cut: int = 0,
    shift: int = 0,
) -> bool:
    view = memory(payload(page or content(key(1), table.page_bytes), table, shard), shift)
    [stored] = store.put(NAMESPACE, [key(1)], [split(view, cut)], shard=shard, table=table)
    view[:] = bytes(len(view))
    return stored


def get_share(
    store: PageStore, shard: Shard, table: SegmentTable = LAYERS, *, cut: int = 0, shift: int = 0
) -> bytes | None:
    """What a rank finds of page 1; None is a miss."""
    target = memory(len(payload(bytes(table.page_bytes), table, shard)), shift)
    target[:] = bytes([UNTOUCHED]) * len(target)
    [found] = store.get(NAMESPACE, [key(1)], [split(target, cut)], shard=shard)
    return bytes(target) if found else None


def share_file(store: PageStore, shard: Shard) -> Path:
    """The file that holds a share of page 1."""
    folders = [disk.path for disk in store.disks]
    end = f".{shard.number}of{shard.of}.page"
    [path] = [path for path in page_files(*folders) if path.name.endswith(end)]
    return path


def own(shard: Shard) -> bytes:
    """A rank's share of page 1."""
    return payload(PAGE_1, LAYERS, shard)


@settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    table=tables,
    written=st.lists(some_shares, max_size=6),
    shard=some_shares,
    cut=st.integers(0, 5000),
    shift=st.sampled_from([0, 0, 8, 512]),
)
def test_what_was_written_is_found_and_nothing_else_touched(
    shared_store: PageStore,
    table: SegmentTable,
    written: list[Shard],
    shard: Shard,
    cut: int,
    shift: int,
) -> None:
    store = shared_store
    store.drop(NAMESPACE)
    there = 0
    for one in written:
        before = store.stats.pages_written
        assert put_share(store, one, table, cut=cut, shift=shift)
        news = bool(one.eighths & ~there)
        assert store.stats.pages_written - before == news, "what is covered is not written again"
        there |= one.eighths
    assert store.exists(NAMESPACE, [key(1)], shard=shard) == [not shard.eighths & ~there]
    found = get_share(store, shard, table, cut=cut, shift=shift)
    page = content(key(1), table.page_bytes)
    assert found == (None if shard.eighths & ~there else payload(page, table, shard))


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(
    writers=st.sampled_from(COUNTS),
    shard=some_shares,
    data=st.data(),
    how=st.sampled_from(["bit", "cut", "gone"]),
)
def test_a_lost_share_is_a_miss_for_the_ranks_that_need_it(
    shared_store: PageStore, writers: int, shard: Shard, data: st.DataObject, how: str
) -> None:
    store = shared_store
    store.drop(NAMESPACE)
    for number in range(writers):
        put_share(store, Shard(number, writers))
    lost = Shard(data.draw(st.integers(0, writers - 1)), writers)
    path, missing = share_file(store, lost), lost.eighths
    if how == "bit":
        layout = file_layout(LAYERS, lost)
        units = [unit for unit in layout.units if unit.eighths != ALL_EIGHTHS]
        unit = data.draw(st.sampled_from(units))
        missing = unit.eighths
        damage(path, layout.header_bytes + unit.payload_offset + unit.length - 1)
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-4096])
    else:
        path.unlink()
    found = get_share(store, shard)
    assert found == (None if shard.eighths & missing else own(shard))
    if found is None:
        assert get_share(store, shard) is None
        assert not store.exists(NAMESPACE, [key(1)], shard=shard)[0], "it is known to be gone"


def test_a_damaged_header_segment_costs_the_ranks_that_have_it_of_that_file(
    store: PageStore,
) -> None:
    for number in range(2):
        put_share(store, Shard(number, 2))
    damage(share_file(store, Shard(1, 2)), 4096 + 100)
    for shard in (WHOLE, Shard(0, 2), Shard(1, 4), Shard(2, 4)):
        found = get_share(store, shard)
        assert found is None or found == own(shard)
        assert shard == WHOLE or (found is None) == bool(shard.eighths & Shard(1, 2).eighths)


def test_what_every_share_repeats_is_read_once_and_of_one_file(store: PageStore) -> None:
    """Two servers may have written other headers; nothing of a page is then half of each."""
    for number in range(2):
        page = bytes([number]) * LAYERS.page_bytes
        assert put_share(store, Shard(number, 2), page=page)
    found = get_share(store, WHOLE)
    assert found is not None
    header = found[:4096]
    assert header in (bytes(4096), bytes([1]) * 4096)
    assert found[4096 + 32768 + 65536 :][:4096] == header, "both of one file"
    assert store.stats.bad_pages == 0


def test_an_entry_without_file_covers_nothing(store: PageStore) -> None:
    for shard in (Shard(0, 2), Shard(1, 2)):
        assert put_share(store, shard)
    share_file(store, Shard(1, 2)).unlink()
    assert put_share(store, Shard(1, 4))
    assert store.stats.pages_already_stored == 1, "the file of the other half is still there"
    assert put_share(store, Shard(3, 4))
    assert store.stats.pages_written == 3
    assert len(page_files(store.disks[0].path)) == 2


def test_aligned_shares_go_straight_between_memory_and_disk(tmp_path: Path) -> None:
    readings: list[int] = []  # of more than a header: pieces of memory

    def note(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        readings.extend([len(buffers)] if sum(map(len, buffers)) > 4096 else [])

    store = open_quiet(tmp_path / "store", ops=ops_that(read=note))
    with store.disks[0].use() as folder:
        if not folder.io.alignment.flags:
            pytest.skip("the file system has no direct I/O")
    for number in range(2):
        put_share(store, Shard(number, 2))
    readings.clear()
    assert get_share(store, Shard(1, 2)) == own(Shard(1, 2))
    assert readings == [2], "header and payload in one reading, each one piece of memory"
    readings.clear()
    assert get_share(store, WHOLE) == PAGE_1
    assert readings == [4, 3, 1], "a file in one reading, but for what the other has brought"
    assert get_share(store, Shard(1, 4)) == own(Shard(1, 4))
    assert store.stats.bytes_copied == 0
    assert get_share(store, Shard(1, 2), shift=8) == own(Shard(1, 2))
    assert store.stats.bytes_copied > 0


def test_a_page_in_more_pieces_than_a_system_call_takes_is_read(tmp_path: Path) -> None:
    store = open_quiet(tmp_path / "store", ops=without_direct_io())
    lengths = [100] * (MAX_VECTORS + 500)
    data = content(key(1), sum(lengths))

    def pieces(view: memoryview) -> list[memoryview]:
        return [view[start : start + 100] for start in range(0, len(view), 100)]

    assert store.put(NAMESPACE, [key(1)], [pieces(memory(data))]) == [True]
    target = memory(len(data))
    assert store.get(NAMESPACE, [key(1)], [pieces(target)]) == [True]
    assert bytes(target) == data


@pytest.mark.parametrize("wrong", [Shard(2, 2), Shard(0, 3), Shard(-1, 4), Shard(0, 0)])
def test_what_is_no_share_is_refused(store: PageStore, wrong: Shard) -> None:
    page = [[memory(LAYERS.page_bytes)]]
    for call, pages in ((store.exists, []), (store.get, [page]), (store.put, [page])):
        table = {"table": LAYERS} if call == store.put else {}
        with pytest.raises(ValueError, match="there are 1, 2, 4 or 8"):
            call(NAMESPACE, [key(1)], *pages, shard=wrong, **table)


def test_digests_that_the_caller_has_are_not_computed_again(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard(1, 2)
    share = own(shard)
    starts = ((unit.payload_offset, unit.length) for unit in units_of(LAYERS, shard))
    digests = [xxhash.xxh3_64_intdigest(share[start : start + length]) for start, length in starts]

    def put(*digests: list[int]) -> list[bool]:
        pages = [[memory(share)]]
        return store.put(NAMESPACE, [key(1)], pages, shard=shard, table=LAYERS, digests=digests)

    with monkeypatch.context() as patched:
        patched.delattr("hcache_backend.format.units.xxhash")
        assert put(digests) == [True]
    header = parse_header(memoryview(share_file(store, shard).read_bytes()))
    assert header.digests == tuple(digests)
    assert get_share(store, shard) == share
    digests[3] ^= 1
    store.drop(NAMESPACE)
    put(digests)
    assert get_share(store, shard) is None, "a page that is not what its digests say is a miss"
    for wrong in ([digests[:-1]], [digests, digests]):
        with pytest.raises(ValueError, match="digests"):
            put(*wrong)


def test_memory_that_is_not_that_of_the_share_is_refused(store: PageStore) -> None:
    whole = memory(LAYERS.page_bytes)
    half = Shard(0, 2)
    with pytest.raises(ValueError, match=r"memory of 139264 bytes .* shard 0 of 2 .* 73728"):
        store.put(NAMESPACE, [key(1)], [[whole]], shard=half, table=LAYERS)
    with pytest.raises(ValueError, match="shard 0 of 2 without a table"):
        store.put(NAMESPACE, [key(1)], [[whole]], shard=half)
    for written in (WHOLE, half):
        put_share(store, written)
        assert store.get(NAMESPACE, [key(1)], [[whole]], shard=half) == [False]
        assert store.get(NAMESPACE, [key(1)], [[whole[:-8]]]) == [False]
        assert get_share(store, half) == own(half), "the page itself is fine"
        store.drop(NAMESPACE)


class NoFurther(FileOps):
    """Reads nothing past the end of a file, as KvikIO."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset + sum(buffer.nbytes for buffer in buffers) > os.fstat(fd).st_size:
            raise OSError(errno.EIO, "past the end")
        return super().read(fd, buffers, offset)


@pytest.mark.parametrize("length", [100, 511, 512, 4095, 4096, 4097, 4708, 20480, 1061056])
def test_of_a_page_of_any_length_less_than_a_sector_is_copied(length: int, tmp_path: Path) -> None:
    """Encoded pages are no multiples of a block: all of their bytes were copied, both ways."""
    data = np.random.default_rng(length).integers(0, 256, length, np.uint8).tobytes()
    with closing(open_quiet(tmp_path / "store", ops=NoFurther())) as store:
        with store.disks[0].use() as folder:
            sector = folder.io.alignment.length
        assert store.put(NAMESPACE, [key(0)], [[memory(data)]]) == [True]
        target = memory(length)
        assert store.get(NAMESPACE, [key(0)], [[target]]) == [True]
        assert bytes(target) == data
        assert store.stats.bytes_copied == 2 * (length % sector)
        [file] = page_files(store.disks[0].path)
        assert file.stat().st_size % 4096 == 0
