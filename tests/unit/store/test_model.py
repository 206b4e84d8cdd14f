"""The store against a dictionary: any sequence of calls, with eviction, shards and reopening."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_testing import (
    NAMESPACE,
    OTHER_NAMESPACE,
    assert_sound,
    content,
    key,
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
        shared = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
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

    @rule(batch=st.lists(numbers, min_size=1, max_size=5, unique=True), namespace=namespaces)
    def put(self, batch: list[int], namespace: bytes) -> None:
        self.put_share(batch, namespace, Shard(0, 1), 0)

    @rule(
        batch=st.lists(numbers, min_size=1, max_size=3, unique=True),
        namespace=namespaces,
        shard=shards,
        shift=st.sampled_from([0, 8]),
    )
    def put_share(self, batch: list[int], namespace: bytes, shard: Shard, shift: int) -> None:
        views = [
            memory(payload(self.page(namespace, number), TABLE, shard), shift) for number in batch
        ]
        pages = [[view[:700], view[700:]] for view in views]
        names = [key(number) for number in batch]
        stored = self.store.put(namespace, names, pages, shard=shard, table=TABLE)
        assert all(stored) or self.bounded
        for view in views:
            view[:] = bytes(len(view))
        for number, ok in zip(batch, stored, strict=True):
            mine = self.given.setdefault((namespace, number), {})
            covered = not shard.eighths & ~self.eighths(namespace, number)
            # What was evicted is written again, nobody knows when.
            if ok and (self.bounded or not covered):
                mine.setdefault(shard, set()).add(self.writer)

    @rule(batch=st.lists(numbers, min_size=1, max_size=8), namespace=namespaces)
    def get(self, batch: list[int], namespace: bytes) -> None:
        self.get_share(batch, namespace, Shard(0, 1))

    @rule(batch=st.lists(numbers, min_size=1, max_size=3), namespace=namespaces, shard=shards)
    def get_share(self, batch: list[int], namespace: bytes, shard: Shard) -> None:
        views = [memory(len(payload(bytes(SIZE), TABLE, shard))) for _ in batch]
        names = [key(number) for number in batch]
        found = self.store.get(namespace, names, [[view] for view in views], shard=shard)
        for number, view, ok in zip(batch, views, found, strict=True):
            given = not shard.eighths & ~self.eighths(namespace, number)
            assert ok <= given, "a page that was never given, or was deleted, is there"
            assert ok or not given or self.bounded, "a page is gone without eviction"
            if ok:
                assert bytes(view) == payload(self.page(namespace, number), TABLE, shard)

    @rule(namespace=namespaces, shard=shards)
    def exists(self, namespace: bytes, shard: Shard) -> None:
        present = self.store.exists(namespace, [key(n) for n in range(16)], shard=shard)
        for number, ok in enumerate(present):
            given = not shard.eighths & ~self.eighths(namespace, number)
            assert ok <= given
            assert ok or not given or self.bounded

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

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "store"):
            assert_sound(self.store)
            for disk in self.store.disks:
                with disk.use() as folder:
                    assert not self.bounded or folder.index.totals().bytes <= QUOTA

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
        shutil.rmtree(self.root)

    def eighths(self, namespace: bytes, number: int) -> int:
        mask = 0
        for shard in self.given.get((namespace, number), {}):
            mask |= shard.eighths
        return mask

    @staticmethod
    def page(namespace: bytes, number: int) -> bytes:
        return content(key(number), SIZE, version=namespace[0])


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
