"""The store against a dictionary: any sequence of calls, with eviction, shards and reopening."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_sound,
    content,
    key,
    keys,
    memory,
    open_quiet,
    payload,
)

from hcache_backend.format.units import Segment, SegmentTable, Shard

TABLE = SegmentTable((Segment(512), Segment(4096, 8), Segment(4096, 8), Segment(4096, 8, 2)))
SIZE = TABLE.page_bytes
QUOTA = 12 * 20480

numbers = st.integers(0, 15)
namespaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE])
writers = st.sampled_from([b"writer-1", b"writer-2"])
shards = st.sampled_from([1, 2, 4, 8]).flatmap(
    lambda count: st.integers(0, count - 1).map(lambda number: Shard(number, count))
)


class StoreMachine(RuleBasedStateMachine):
    """The model says which eighths were given and by whom; eviction may take any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.folders = [self.root / "a", self.root / "b"]
        self.given: dict[tuple[bytes, int], dict[Shard, set[bytes]]] = {}
        self.bounded = False
        self.writer = b"writer-1"

    @initialize(bounded=st.booleans())
    def open(self, bounded: bool) -> None:
        self.bounded = bounded
        options = {"quota_bytes": QUOTA} if self.bounded else {}
        self.store = open_quiet(*self.folders, writer=self.writer, **options)

    @rule(writer=writers)
    def reopen(self, writer: bytes) -> None:
        self.store.close()
        self.writer = writer
        self.open(self.bounded)

    @rule(
        batch=st.lists(numbers, min_size=1, max_size=5, unique=True),
        namespace=namespaces,
        shard=shards,
        shift=st.sampled_from([0, 8]),
    )
    def put(self, batch: list[int], namespace: bytes, shard: Shard, shift: int) -> None:
        page = self.page
        views = [memory(payload(page(namespace, n), TABLE, shard), shift) for n in batch]
        pages = [[view[:700], view[700:]] for view in views]
        stored = self.store.put(namespace, keys(batch), pages, shard=shard, table=TABLE)
        assert all(stored) or self.bounded
        for view in views:
            view[:] = bytes(len(view))
        for number, ok in zip(batch, stored, strict=True):
            mine = self.given.setdefault((namespace, number), {})
            # What was evicted is written again, nobody knows when.
            if ok and (self.bounded or not self.is_given(namespace, number, shard)):
                mine.setdefault(shard, set()).add(self.writer)

    @rule(batch=st.lists(numbers, min_size=1, max_size=8), namespace=namespaces, shard=shards)
    def get(self, batch: list[int], namespace: bytes, shard: Shard) -> None:
        views = [memory(len(payload(bytes(SIZE), TABLE, shard))) for _ in batch]
        found = self.store.get(namespace, keys(batch), [[view] for view in views], shard=shard)
        self.check(namespace, batch, shard, found)
        for number, view, ok in zip(batch, views, found, strict=True):
            if ok:
                assert bytes(view) == payload(self.page(namespace, number), TABLE, shard)

    @rule(namespace=namespaces, shard=shards)
    def exists(self, namespace: bytes, shard: Shard) -> None:
        present = self.store.exists(namespace, keys(range(16)), shard=shard)
        self.check(namespace, range(16), shard, present)

    @rule(writer=writers)
    def drop_writer(self, writer: bytes) -> None:
        dropped = self.store.drop_writer(writer)
        expected = 0
        for mine in self.given.values():
            for shard in list(mine):
                if writer in mine[shard]:
                    mine[shard].discard(writer)
                    expected += 1
                if not mine[shard]:
                    del mine[shard]
        assert dropped == expected or self.bounded

    @rule(namespace=namespaces)
    def clear(self, namespace: bytes) -> None:
        self.store.drop(namespace)
        for name in [name for name in self.given if name[0] == namespace]:
            del self.given[name]

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def sound(self) -> None:
        for disk in self.store.disks:
            with disk.use() as folder:
                assert not self.bounded or folder.index.totals().bytes <= QUOTA
        assert_sound(self.store)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)

    def is_given(self, namespace: bytes, number: int, shard: Shard) -> bool:
        missing = shard.eighths
        for given in self.given.get((namespace, number), {}):
            missing &= ~given.eighths
        return not missing

    def check(
        self, namespace: bytes, numbers: Sequence[int], shard: Shard, found: list[bool]
    ) -> None:
        for number, ok in zip(numbers, found, strict=True):
            given = self.is_given(namespace, number, shard)
            assert ok <= given, "a page that was never given, or was deleted, is there"
            assert ok or not given or self.bounded, "a page is gone without eviction"

    @staticmethod
    def page(namespace: bytes, number: int) -> bytes:
        return content(key(number), SIZE, version=namespace[0])


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
