"""L3 on local disks: pages by name, in any number of folders, one for each disk.

The parts, from the outside in: ``page_store`` puts pages on disks in turn; ``disk`` is one folder
while the server runs, which may vanish and come back; ``eviction`` keeps it in its bounds;
``maintenance`` syncs it and recovers its index; ``folder`` is the folder on the disk, with its page
files, and ``index`` the index in it; ``direct_io`` reads and writes these files; ``file_ops`` are
the system calls, and ``kvikio_ops`` the same with reads by KvikIO.
"""

from hcache_backend.store.file_ops import FileOps
from hcache_backend.store.folder import (
    SERVER_REPORT,
    NotOurFolderError,
    is_store_folder,
    write_sidecar,
)
from hcache_backend.store.kvikio_ops import best_file_ops
from hcache_backend.store.page_store import PageStore
from hcache_backend.store.stats import StoreStats

__all__ = [
    "SERVER_REPORT", "FileOps", "NotOurFolderError", "PageStore", "StoreStats",
    "best_file_ops", "is_store_folder", "write_sidecar",
]  # fmt: skip
